"""Tokenizers and chat templates: from messages to token ids.

Tokenizers come from a local directory (a Hugging Face snapshot or one of our exports), or from the
snapshot of a hub repository that the model itself comes from.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxrl_llm.data.chat_template import ChatTemplate, Message, Tools
from jaxrl_llm.models.hf.hub import resolve

log = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@runtime_checkable
class Tokenizer(Protocol):
    """What this library asks of a tokenizer; every `transformers` tokenizer fits."""

    eos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Return a mapping whose `input_ids` are the ids of `text`."""
        ...

    def get_chat_template(self) -> str:
        """Return the Jinja source of the chat template; ValueError if there is none."""
        ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Return the ids of the conversation under the chat template, or its text."""
        ...


def load_tokenizer(directory: str | Path) -> Any:
    """Load the `transformers` tokenizer of a model.

    Args:
        directory: holds `tokenizer.json` or the files of a slow tokenizer, its
            `tokenizer_config.json` and, where there is one, its chat template; or a hub
            repository, as `resolve` takes it.

    Returns:
        A `transformers` tokenizer; it satisfies `Tokenizer`.

    Raises:
        ValueError: there is no such directory or repository, or no tokenizer that can be read.

    >>> load_tokenizer("/no/such/model")
    Traceback (most recent call last):
    ValueError: tokenizer: expected a local model or one of the hub: no directory '/no/such/model'
    """
    try:
        path = resolve(directory)
    except FileNotFoundError as error:
        raise ValueError(f"tokenizer: expected a local model or one of the hub: {error}") from error
    from transformers import AutoTokenizer

    try:
        if not any((path / name).is_file() for name in VOCABULARIES):
            # transformers would make an empty tokenizer of the model's type
            raise ValueError(f"there is none of {', '.join(VOCABULARIES)}")
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        files = ", ".join(sorted(p.name for p in path.iterdir())[:12]) or "no files"
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"tokenizer: can't load one from {str(path)!r} (it holds {files}): {reason}"
        ) from error


def encode_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools = (), **template_kwargs: Any
) -> list[int]:
    """Return the ids of a chat up to where the assistant's reply begins.

    Args:
        tokenizer: its chat template must be set.
        messages: the chat, as `ChatTemplate` takes it.
        tools: schemas of tools that the model may call.
        **template_kwargs: variables of the chat template itself, such as Qwen3's
            `enable_thinking`. A name that the template never mentions is refused.

    Returns:
        The token ids, ending in the template's generation prompt.

    Raises:
        ValueError: no chat template; a variable that it does not have; the template refuses the
            chat, or leaves out something that it says.

    >>> encode_prompt(load_tokenizer("configs/quickstart"), [{"role": "user", "content": "042"}])
    [259, 15, 19, 17, 257, 260]
    """
    return ChatTemplate(tokenizer, template_kwargs).prompt(messages, tools)


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools = (), **template_kwargs: Any
) -> str:
    """Return the text whose ids `encode_prompt` returns.

    Args:
        tokenizer: as there.
        messages: as there.
        tools: as there.
        **template_kwargs: as there.

    Raises:
        ValueError: as there.

    >>> render_prompt(load_tokenizer("configs/quickstart"), [{"role": "user", "content": "042"}])
    '<|user|>042<|end|><|assistant|>'
    """
    return ChatTemplate(tokenizer, template_kwargs).prompt_text(messages, tools)


class PolicyTokens(NamedTuple):
    """A policy's tokenizer, and the tokens that end an answer."""

    tokenizer: Any
    stops: tuple[int, ...]


def stop_ids(
    tokenizer: Tokenizer, directory: str | Path, *, vocab_size: int | None = None
) -> tuple[int, ...]:
    """Return every token id that ends a reply, in rising order.

    They are the tokenizer's end-of-sequence token, those that `generation_config.json` names, or
    where it names none those of `config.json`, and those with which the chat template ends an
    answer: an instruction-tuned model often ends its turn with another token than a base model.

    Args:
        tokenizer: its `eos_token_id` may be None, and it may have no chat template.
        directory: the model's directory or hub repository; both files may be missing in it.
        vocab_size: of the model, which samples ids below it; None: it is not known.

    Raises:
        ValueError: one of the files can't be read, or nothing names a stop token that the model
            can sample.
        FileNotFoundError: there is no such directory or repository.

    >>> stop_ids(load_tokenizer("configs/quickstart"), "/")
    (257,)
    """
    tokens = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    folder = resolve(directory)
    generation = _configured_stop_ids(folder / "generation_config.json")
    tokens |= generation or _configured_stop_ids(folder / "config.json")
    try:
        tokens |= {*ChatTemplate(tokenizer).closing_ids}
    except ValueError as error:  # a base model has no template
        log.info("stop tokens: none of a chat template: %s", error)
    if not tokens:
        raise ValueError(
            "stop tokens: the tokenizer has no eos token, and neither generation_config.json nor "
            f"config.json in {str(folder)!r} names an eos_token_id, so a reply could never end"
        )
    if vocab_size is not None and min(tokens) >= vocab_size:
        raise ValueError(
            f"stop tokens: expected one below {vocab_size}, the model's vocabulary, got "
            f"{sorted(tokens)}, so a reply could never end"
        )
    return tuple(sorted(tokens))


def load_policy_tokens(path: str, *, vocab_size: int | None = None) -> PolicyTokens:
    """Load the tokenizer of a directory, and what ends an answer; see `stop_ids`."""
    tokenizer = load_tokenizer(path)
    return PolicyTokens(tokenizer, stop_ids(tokenizer, path, vocab_size=vocab_size))


def _configured_stop_ids(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"stop tokens: can't read {str(path)!r}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"stop tokens: can't read {str(path)!r}: it holds no JSON object")
    value = config.get("eos_token_id")
    if value is None:
        value = (config.get("text_config") or {}).get("eos_token_id")
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise ValueError(
            f"stop tokens: expected an id or a list of ids as eos_token_id in {str(path)!r}, "
            f"got {value!r}"
        )
    return set(listed)
