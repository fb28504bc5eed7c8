"""Where a model's files are: a local directory, or a repository of the Hugging Face hub."""

import functools
import re
from pathlib import Path

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
WANTED_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",  # of models that see images
)


def resolve(path_or_id: str | Path) -> Path:
    """Return the directory of a model: the one that is named, or the hub's snapshot of it.

    A name such as `Qwen/Qwen3-0.6B`, where there is no such directory, is a repository of the
    Hugging Face hub, and `Qwen/Qwen3-0.6B@main` one revision of it. Config, weights and tokenizer
    are downloaded into the hub's cache, and found there the next time; with `HF_HUB_OFFLINE=1` only
    the cache is looked at. Within one process a name always means the same snapshot.

    Args:
        path_or_id: A directory, or a string that names a repository. A `Path` is always local.

    Returns:
        An existing directory.

    Raises:
        FileNotFoundError: There is no such directory, and no such repository that can be had.

    >>> resolve("/no/such/model")
    Traceback (most recent call last):
    FileNotFoundError: no directory '/no/such/model'
    """
    path = Path(path_or_id)
    if path.is_dir():
        return path
    named = repository(path_or_id)
    if named is None:
        raise FileNotFoundError(f"no directory {str(path_or_id)!r}")
    return _snapshot(*named)


def repository(path_or_id: str | Path) -> tuple[str, str | None] | None:
    """Return the repository and the revision that a model's name means; None for a directory.

    >>> repository("Qwen/Qwen3-0.6B@main"), repository("./models")
    (('Qwen/Qwen3-0.6B', 'main'), None)
    """
    if isinstance(path_or_id, Path) or path_or_id.startswith(".") or Path(path_or_id).is_dir():
        return None
    match = HUB_ID.fullmatch(path_or_id)
    return match and (match["repo"], match["revision"])


@functools.cache
def _snapshot(repo: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*WANTED_FILES]))
    except (OSError, ValueError) as error:
        at = f" at revision {revision!r}" if revision else ""
        if constants.HF_HUB_OFFLINE:
            why = (
                f"the hub's cache {constants.HF_HUB_CACHE} does not hold it{at}, and "
                f"HF_HUB_OFFLINE is set; run `hf download {repo}` where there is a network"
            )
        else:
            why = f"it can't be had from the Hugging Face hub{at}: {' '.join(str(error).split())}"
        raise FileNotFoundError(f"no directory {repo!r} here, and {why}") from error
