"""What tools have answered, on disk, so that a step that is drawn again is told the same.

The file has a line of JSON for each result, which is handed to the operating system before the
result is used. So a process that is killed loses at most the line that it was writing.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.rollout.tools.tool import ToolError, ToolResult, read_result

log = logging.getLogger(__name__)

VERSION = 2
FIELDS = ToolResult._fields[:-2]
"""What is kept of a result: all but what is reported of an error."""


def call_digest(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a digest by which a call is known again.

    >>> call_digest("add", {"x": 1, "y": 2}) == call_digest("add", {"y": 2, "x": 1})
    True
    """
    text = json.dumps([name, arguments], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Journal:
    """Results of calls by episode and call number, read from a file and appended to it.

    Args:
        path: of the file; an existing one is gone on with.
        config: digest of all that decides what is drawn; a file of another one is refused.

    Raises:
        ToolError: the file is another config's, or is damaged before its last line.
    """

    def __init__(self, path: str | os.PathLike[str], *, config: str) -> None:
        self._path = Path(path)
        self._entries: dict[int, dict[int, tuple[str, ToolResult]]] = {}
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._load(config)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return how many results there are."""
        return sum(len(calls) for calls in self._entries.values())

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def find(self, episode: int, call: int, digest: str) -> ToolResult | None:
        """Return the result of a call, if it is here.

        Where it is another call's, the episode is drawn in another way than it was: then this
        result and the later ones of the episode are dropped.

        Args:
            episode: its number.
            call: its number in the episode.
            digest: of `call_digest`.
        """
        entry = self._entries.get(episode, {}).get(call)
        if entry is None:
            return None
        if entry[0] == digest:
            return entry[1]
        log.warning(
            "%s: call %d of episode %d is another one than before; its results from there on are"
            " dropped",
            *(self._path, call, episode),
        )
        self._append({"drop": [episode, call]})
        self._drop(episode, call)
        return None

    def record(self, episode: int, call: int, digest: str, result: ToolResult) -> None:
        """Append the result of a call."""
        told = {name: getattr(result, name) for name in FIELDS}
        self._append({"key": [episode, call], "digest": digest, "result": told})
        self._entries.setdefault(episode, {})[call] = digest, result

    def _append(self, entry: dict[str, Any]) -> None:
        data = memoryview(json.dumps(entry).encode() + b"\n")
        while data:
            data = data[os.write(self._file, data) :]

    def _drop(self, episode: int, call: int) -> None:
        calls = self._entries.get(episode, {})
        for number in [number for number in calls if number >= call]:
            del calls[number]

    def _load(self, config: str) -> None:
        content = self._path.read_bytes()
        *lines, rest = content.split(b"\n")
        if rest:
            log.warning("%s: its last line is cut and dropped", self._path)
            os.ftruncate(self._file, len(content) - len(rest))
        header = {"journal": VERSION, "config": config}
        if not lines:
            self._append(header)
            return
        if (recorded := self._parse(lines[0], 1)) != header:
            if set(recorded) != set(header):
                raise ToolError(f"{self._path}: expected a journal of tools, got another file")
            raise ToolError(
                f"{self._path}: got a journal of another config, or of another version of the"
                " library; remove it, to run the tools again"
            )
        for number, line in enumerate(lines[1:], start=2):
            self._take(self._parse(line, number), number)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise self._damaged(number)
        return entry

    def _damaged(self, number: int) -> ToolError:
        return ToolError(
            f"{self._path}: line {number} is damaged; remove the file, to run the tools again"
        )

    def _take(self, entry: dict[str, Any], number: int) -> None:
        """Take in a line."""
        key = entry.get("drop") or entry.get("key")
        if not (isinstance(key, list) and [type(part) for part in key] == [int, int]):
            raise self._damaged(number)
        if entry.keys() == {"drop"}:
            self._drop(*key)
            return
        digest, result = entry.get("digest"), entry.get("result")
        if entry.keys() != {"key", "digest", "result"} or not isinstance(digest, str):
            raise self._damaged(number)
        if not isinstance(result, dict) or result.keys() != {*FIELDS}:
            raise self._damaged(number)
        if (read := read_result(result | {"error": "", "trace": ""})) is None:
            raise self._damaged(number)
        self._entries.setdefault(key[0], {})[key[1]] = digest, read
