"""From tokens to text, piece by piece: whole characters only, and no stop text."""

from collections.abc import Callable, Sequence

from jaxrl_llm.data.token_bytes import UNFINISHED

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
