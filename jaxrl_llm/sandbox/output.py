"""What a program writes: bounded while it comes in, and text in any case."""

MARK = "\n[... {} bytes left out ...]\n"


class BoundedOutput:
    """The beginning and the end of what is written, of which the middle may be left out.

    Args:
        limit: bytes to keep.

    >>> output = BoundedOutput(8)
    >>> for part in (b"abcdef", b"ghijkl"):
    ...     output.write(part)
    >>> output.text()
    'abcd\\n[... 4 bytes left out ...]\\nijkl'
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = b""
        self._tail = b""
        self._left_out = 0

    def write(self, data: bytes) -> None:
        """Take more of it."""
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        tail = self._tail + data[room:] if room < len(data) else self._tail
        excess = max(0, len(tail) - self._tail_limit)
        self._tail, self._left_out = tail[excess:], self._left_out + excess

    def text(self) -> str:
        """Return it as text: what is no UTF-8 is replaced, and so are NULs."""
        if self._left_out == 0:
            return _as_text(self._head + self._tail)
        return _as_text(self._head) + MARK.format(self._left_out) + _as_text(self._tail)


def shorten_output(text: str, limit: int) -> str:
    """Return a text of which the middle is left out, if it is longer than so many bytes.

    >>> shorten_output("abcdefghijkl", 8)
    'abcd\\n[... 4 bytes left out ...]\\nijkl'
    """
    output = BoundedOutput(limit)
    output.write(text.encode("utf-8", "replace"))
    return output.text()


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")
