"""Keys of `config.json` that mean the same in every family, and those that change nothing."""

import functools
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Keys that transformers reads, and that do not change what a model computes for given tokens and
# weights. What it does not read is found by `without_effect`.
WITHOUT_EFFECT = {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "pretraining_tp",
    "attn_implementation",
    "cache_implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "problem_type",
    "num_labels",
    "id2label",
    "label2id",
    "classifier_dropout",
    "token_classification_bias",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "chunk_size_feed_forward",
    # how to generate, which transformers 4 wrote here too
    "do_sample",
    "max_length",
    "temperature",
    "top_k",
    "top_p",
}


def check_whole(config: Config, keys: Iterable[str]) -> None:
    """Refuse keys that are no whole numbers; specs say which of these they can have.

    >>> check_whole({"head_dim": "8"}, ["head_dim"])
    Traceback (most recent call last):
    ValueError: {'head_dim': '8'}: expected whole numbers
    """
    given = {key: config.get(key) for key in sorted(keys)}
    if wrong := {key: value for key, value in given.items() if type(value) is not int}:
        raise ValueError(f"{wrong}: expected whole numbers")


SHARED = (
    "configuration_utils.py",
    "modeling_utils.py",
    "modeling_rope_utils.py",
    "modeling_layers.py",
    "masking_utils.py",
    "cache_utils.py",
    "integrations/*attention*.py",
    "integrations/moe.py",
)
"""Code that the models of all families run."""


def without_effect(model_type: str, config: Mapping[str, Any]) -> set[str]:
    """Return the keys of a config that transformers' code for its family does not read.

    These are those that begin with an underscore, and those whose names occur nowhere in the
    sources of the family and in the code that all families run. The sources are read as text. Of a
    family that the installed transformers does not have only the former are.

    Args:
        model_type: The family, as in `config.json`.
        config: Its keys.

    >>> config = {"rope_interleaved": True, "_name_or_path": "a/b", "attention_dropout": 0.1}
    >>> sorted(without_effect("llama", config))
    ['_name_or_path', 'rope_interleaved']
    """
    words = _words(model_type)
    return {key for key in config if key.startswith("_") or (words and key not in words)}


def has_sources(model_type: str) -> bool:
    """Return whether the installed transformers has a family, so that its code can be read.

    >>> has_sources("llama"), has_sources("llama_of_tomorrow")
    (True, False)
    """
    return bool(_words(model_type))


@functools.cache
def _words(model_type: str) -> frozenset[str]:
    """Return all names in the sources that a family's models run; none: it is not there to read."""
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.submodule_search_locations, "the library depends on it"
    root = Path(package.submodule_search_locations[0])
    family = f"models/{model_type.removesuffix('_text')}/*.py"
    if not (files := [*root.glob(family)]):
        return frozenset()
    files += [path for pattern in SHARED for path in root.glob(pattern)]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text("utf-8")))
