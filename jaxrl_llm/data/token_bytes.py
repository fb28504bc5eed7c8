"""What single tokens stand for: their texts and bytes."""

import re
from typing import Any

UNFINISHED = "\ufffd"
"""What a character is decoded to while bytes of it are missing."""


class Vocabulary:
    """Single tokens as texts and bytes.

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
        if f" {text}" == piece.replace("▁", " "):
            text = f" {text}"  # decoded alone, a word loses its first space
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
