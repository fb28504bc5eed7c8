"""Which texts are too long for a model whatever their tokens are: they need not be tokenised."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.data.token_bytes import BYTE_OF
from jaxrl_llm.serving.fields import APIError

COMPOSED = 4  # code points that a composing normal form of Unicode makes one of, at most
KEEPING = {"ByteLevel", "Digits", "Lowercase", "Metaspace", "NFD", "NFKD", "Prepend"}
KEEPING |= {"UnicodeScripts"}
"""Steps of a tokenizer after which a text has no fewer characters than before."""

BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""The tokens of bytes into which an unknown character is split."""


@dataclass(frozen=True)
class TextLimit:
    """The characters that a sequence of tokens can stand for.

    A token stands for at most as many characters as the longest one has, if the tokenizer drops
    none. vLLM has this limit, too (`max_chars_per_token`), for all tokenizers alike.

    Attributes:
        tokens: of the longest sequence.
        longest: characters of the longest token.
        composed: characters other than ASCII's that the tokenizer may make one of.
        spaces: whether it keeps white space; if not, other characters are counted.
    """

    tokens: int
    longest: int
    composed: int
    spaces: bool

    def check(self, text: str, param: str) -> None:
        """Refuse a text that can't fit.

        Raises:
            APIError: with the code that a sequence of too many tokens has.

        >>> TextLimit(2, 3, 1, spaces=True).check("abcdef", "prompt")
        """
        most = self.tokens * self.longest
        if len(text) <= most:
            return
        if not text.isascii():
            most *= self.composed
        count = len(text) if self.spaces else len("".join(text.split()))
        if count > most:
            raise APIError(
                f"{param}: got {count} characters, expected at most {most}: the model takes "
                f"{self.tokens} tokens, and none of its tokens is longer than {self.longest}",
                param=param,
                code="context_length_exceeded",
            )


def text_limit(tokenizer: Any, tokens: int) -> TextLimit | None:
    """Return the limit of texts for a tokenizer; None where a token may stand for any number.

    None is it where characters may be dropped or unknown ones joined: for models of words, for
    normalizers that delete, and for tokenizers that are not of the `tokenizers` library.

    Args:
        tokenizer: of `transformers`.
        tokens: of the longest sequence.
    """
    if not tokenizer.is_fast:
        return None
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = [*leaves(parts["normalizer"]), *leaves(parts["pre_tokenizer"])]
    composing = sum(step["type"] in ("NFC", "NFKC") for step in steps)
    others = [step for step in steps if step["type"] not in ("NFC", "NFKC", "Strip")]
    if not all(map(keeps, others)) or not knows_all(parts["model"], steps):
        return None
    strips = any(step["type"] == "Strip" for step in steps)
    strips |= any(added["lstrip"] or added["rstrip"] for added in parts["added_tokens"])
    longest = max(map(len, tokenizer.get_vocab()))
    return TextLimit(tokens, longest, COMPOSED**composing, spaces=not strips)


def leaves(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, which may be sequences.

    >>> [step["type"] for step in leaves({"type": "Sequence", "normalizers": [{"type": "NFC"}]})]
    ['NFC']
    """
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step.get("normalizers", step.get("pretokenizers", ())):
        yield from leaves(part)


def keeps(step: Mapping[str, Any]) -> bool:
    """Tell whether a text has no fewer characters after a step than before.

    >>> keeps({"type": "Replace", "pattern": {"String": " "}, "content": "_"})
    True
    >>> keeps({"type": "Replace", "pattern": {"Regex": " +"}, "content": " "})
    False
    """
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(step["content"]) >= len(replaced)
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in KEEPING


def knows_all(model: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> bool:
    """Tell whether a model has a token for every character, or for each one's bytes."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    vocabulary = model["vocab"]
    known = set(vocabulary if model["type"] == "BPE" else (token for token, _ in vocabulary))
    if model["byte_fallback"] and known >= BYTES:
        return True
    return any(step["type"] == "ByteLevel" for step in steps) and known >= set(BYTE_OF)
