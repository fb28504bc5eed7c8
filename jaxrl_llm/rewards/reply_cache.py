"""Replies of a server on disk: nothing is asked twice, and a run that goes on gets the same."""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

WAIT_S = 30.0  # for other processes to write theirs


def request_key(url: str, body: Mapping[str, Any]) -> str:
    """Return the digest of a request.

    >>> request_key("http://a", {"x": 1, "y": 2}) == request_key("http://a", {"y": 2, "x": 1})
    True
    """
    text = json.dumps([url, body], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class ReplyCache:
    """Replies by the digests of their requests, in a file that several processes share.

    Args:
        path: of the file, in a folder that is there.
    """

    def __init__(self, path: Path) -> None:
        """Make the file where there is none."""
        self._path = path
        with self._open() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)"
            )

    def get(self, key: str) -> str | None:
        """Return the reply to a request; None where none is kept."""
        with self._open() as database:
            row = database.execute("SELECT reply FROM replies WHERE key = ?", [key]).fetchone()
        return row and row[0]

    def keep(self, key: str, reply: str) -> str:
        """Keep a reply, and return the one that is kept: the first, if others asked the same."""
        with self._open() as database:
            database.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", [key, reply])
            row = database.execute("SELECT reply FROM replies WHERE key = ?", [key]).fetchone()
        return row[0]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction: threads and forks can share no connection."""
        with closing(sqlite3.connect(self._path, timeout=WAIT_S)) as database, database:
            yield database
