"""From tokens to text, piece by piece: whole characters only, and no stop text."""

import re
from collections.abc import Callable, Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What a character is decoded to while bytes of it are missing."""

LONGEST_HELD = 1024
"""So many unfinished characters in a row are none."""


class AnswerText:
    """The text of one answer, as its tokens come.

    A window of the last tokens is decoded, from a border between characters on. What may still
    become another character, or a stop text, is held back.

    Args:
        decode: tokens -> text.
        stops: texts that end the answer and are no part of it.

    >>> words = AnswerText(lambda tokens: bytes(tokens).decode(errors="replace"), ["END"])
    >>> words.push([0x20, 0xE2, 0x82]), words.push([0xAC, 0x45]), words.push([0x4E, 0x44])
    (' ', '€', '')
    >>> words.stopped
    True
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        """Begin without a token."""
        self._decode, self._stops = decode, stops
        self._before: list[int] = []  # tokens of the window whose text is known
        self._after: list[int] = []
        self._known = 0  # characters of the window's text
        self._held = ""
        self.length = 0  # of all text so far, what is held included
        self.stopped = False

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Take the next tokens and return the text that is now certain.

        Args:
            tokens: any number of them.
            last: nothing follows: give all.
        """
        if self.stopped:
            return ""
        fresh = self._read(tokens, last)
        self.length += len(fresh)
        text = self._held + fresh
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        keep = 0 if last else longest_beginning(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _read(self, tokens: Sequence[int], last: bool) -> str:
        self._after += tokens
        whole = self._decode(self._before + self._after)
        certain = whole if last else whole.rstrip(UNFINISHED)
        if len(whole) - len(certain) > LONGEST_HELD:
            certain = whole
        fresh = certain[self._known :]
        self._known = max(self._known, len(certain))
        if len(certain) == len(whole) and (known := len(self._decode(self._after))):
            self._before, self._after, self._known = self._after, [], known
        return fresh


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which a stop text begins.

    >>> longest_beginning("so the EN", ["END"])
    2
    """
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(stop.startswith(text[len(text) - size :]) for stop in stops):
            return size
    return 0


class Vocabulary:
    """Single tokens as texts and bytes, for log-probs.

    Args:
        tokenizer: of `transformers`.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer; nothing is decoded yet."""
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return what a token stands for, a part of a character included."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def text_of(self, token: int) -> str:
        """Return a token's text, or as OpenAI `bytes:\\xe2\\x82` for a part of a character."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _find(self, token: int) -> bytes:
        text = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if UNFINISHED in text:
            if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
                return bytes.fromhex(byte[1])
            if all(letter in BYTE_OF for letter in piece):
                return bytes(BYTE_OF[letter] for letter in piece)
        if piece.startswith("▁") and not text.startswith(" "):
            text = f" {text}"  # decoded alone, a word loses its space
        return text.encode()


def byte_letters() -> dict[str, int]:
    """Return the letters by which byte-level BPE writes bytes (GPT-2's `bytes_to_unicode`).

    >>> byte_letters()["Ġ"]
    32
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = byte_letters()
