"""A folder of passages as a full-text index, ranked by BM25. Worker processes import this."""

import hashlib
import json
import sqlite3
import unicodedata
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jaxrl_llm.data.files import atomic_write
from jaxrl_llm.rollout.observation import BrokenTool
from jaxrl_llm.workers.answers import shorten

INDEX_FILE = ".search_index.sqlite"
"""In the folder of a corpus, unless a config names another file."""

READ = "mode=ro&immutable=1"
MAX_WORDS = 200  # of a query
FORMAT = 1  # of the index; another one is built anew

TABLES = """
CREATE TABLE about (fingerprint TEXT);
CREATE TABLE passages (number INTEGER PRIMARY KEY, id TEXT, contents TEXT);
CREATE VIRTUAL TABLE words USING fts5 (
    contents, content = 'passages', content_rowid = 'number',
    tokenize = 'porter unicode61 remove_diacritics 2'
);
CREATE TEMP TABLE read (id TEXT, contents TEXT, place TEXT);
"""
FIND = """
SELECT id, contents FROM (
    SELECT rowid AS number, bm25(words) AS cost FROM words WHERE words MATCH ?
    ORDER BY cost, number LIMIT ?
) JOIN passages USING (number) ORDER BY cost, number
"""


class Passage(NamedTuple):
    """A passage of a corpus.

    Attributes:
        id: its name, unique in the corpus.
        contents: its text; the first line of several is the title.
    """

    id: str
    contents: str


class _IsBuilt(Exception):
    """Another process has built the index meanwhile."""


def search_corpus(
    query: str, *, corpus: str, k: int = 3, index: str | None = None
) -> list[Passage]:
    """Return the passages of a corpus that fit a query best, by BM25 (k1 = 1.2, b = 0.75).

    A passage needs one of the query's words. Words are compared without case, accents and endings
    (Porter's stemmer). Passages that fit equally well come in the order of their ids.

    Args:
        query: words; everything that is no letter or digit only parts them.
        corpus: folder of .jsonl files, see `build_index`.
        k: how many passages, at most.
        index: file of the index; None: `INDEX_FILE` in the folder.

    Raises:
        ValueError: the query has no word, or too many.
        BrokenTool: the index can't be read.
    """
    words = query_words(query)
    if not words or len(words) > MAX_WORDS:
        raise ValueError(f"expected a query of 1 to {MAX_WORDS} words, got {len(words)} words")
    try:
        path = build_index(corpus, index)
    except (OSError, ValueError) as error:  # of the corpus, which was right before
        raise BrokenTool(f"{corpus}: {error}") from error
    try:
        with closing(_connect(path, READ)) as database:
            rows = database.execute(FIND, [" OR ".join(f'"{word}"' for word in words), k])
            return [Passage(*row) for row in rows.fetchall()]
    except sqlite3.Error as error:
        raise BrokenTool(f"{path}: {error}") from error


def query_words(query: str) -> list[str]:
    """Return the words of a query.

    >>> query_words('Who wrote "Faust" (1808)?')
    ['Who', 'wrote', 'Faust', '1808']
    """
    kept = (c if unicodedata.category(c)[0] in "LNM" else " " for c in query)
    return [word for word in "".join(kept).split() if any(c.isalnum() for c in word)]


def build_index(corpus: str, index: str | None = None) -> Path:
    """Build the index of a corpus, unless it is there; return its file.

    It is built once, whole or not at all, also where several processes begin at the same time. It
    is built anew when a file of the corpus has another name, size or time.

    Args:
        corpus: folder of .jsonl files. Their lines have an `id` and `contents`, or `title` and
            `text`.
        index: file of the index; None: `INDEX_FILE` in the folder.

    Raises:
        ValueError: the folder has no such files or no passages, a line does not fit, two have the
            same id, or SQLite fails.
        OSError: the index can't be written.
    """
    files = _corpus_files(corpus)
    path, wanted = Path(index or Path(corpus) / INDEX_FILE), _fingerprint(files)
    if _is_current(path, wanted):
        return path
    with suppress(_IsBuilt), atomic_write(path) as file:
        if _is_current(path, wanted):
            raise _IsBuilt
        try:
            _write_index(Path(str(file.name)), files, wanted)
        except sqlite3.Error as error:  # of a full disk, or of a Python without FTS5
            raise ValueError(f"index: {path} can't be built: {error}") from error
    return path


def _corpus_files(corpus: str) -> list[Path]:
    files = sorted(path for path in Path(corpus).glob("*.jsonl") if path.is_file())
    if not files:
        raise ValueError(f"corpus: expected a folder with .jsonl files, got {corpus!r}")
    return files


def _fingerprint(files: list[Path]) -> str:
    stats = [(path.name, path.stat()) for path in files]
    told = [FORMAT, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _is_current(path: Path, wanted: str) -> bool:
    if not path.is_file():
        return False
    with suppress(sqlite3.Error), closing(_connect(path, READ)) as database:
        return database.execute("SELECT fingerprint FROM about").fetchone() == (wanted,)
    return False  # what is no index is replaced


def _connect(path: Path, query: str, **options: Any) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.resolve()))}?{query}", uri=True, **options)


def _write_index(path: Path, files: list[Path], fingerprint: str) -> None:
    """Write an index to a file that is empty, and locked by us."""
    with closing(_connect(path, "nolock=1", isolation_level=None)) as database:
        for setting in ("journal_mode = OFF", "synchronous = OFF"):  # it is renamed when whole
            database.execute(f"PRAGMA {setting}")
        database.executescript(TABLES)
        database.execute("BEGIN")
        lines = (line for file in files for line in _read_lines(file))
        database.executemany("INSERT INTO read VALUES (?, ?, ?)", lines)
        if database.execute("SELECT 1 FROM read LIMIT 1").fetchone() is None:
            raise ValueError(f"corpus: expected passages in {', '.join(map(str, files))}, got none")
        twice = "SELECT id, group_concat(place, ' and ') FROM read GROUP BY id HAVING count(*) > 1"
        if (duplicate := database.execute(f"{twice} LIMIT 1").fetchone()) is not None:
            name, places = duplicate
            raise ValueError(f"corpus: expected an id of its own each, got {name!r} in {places}")
        database.execute(
            "INSERT INTO passages (id, contents) SELECT id, contents FROM read ORDER BY id"
        )
        database.execute("INSERT INTO words (words) VALUES ('rebuild')")
        database.execute("INSERT INTO words (words) VALUES ('optimize')")
        database.execute("INSERT INTO about VALUES (?)", [fingerprint])
        database.execute("COMMIT")


def _read_lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield id, contents and place of each line of a file that is not empty."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                passage = _read_passage(line, place)
                yield passage.id, passage.contents, place


def _read_passage(line: bytes, place: str) -> Passage:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"corpus: {place}: not JSON: {error}") from None
    got = shorten(line.decode("utf-8", "replace").strip(), 100)
    if isinstance(fields, dict):
        name = fields.get("id", fields.get("_id"))
        contents = fields.get("contents")
        if contents is None and isinstance(fields.get("text"), str):
            contents = f"{fields.get('title') or ''}\n{fields['text']}"
        if type(name) in (str, int) and isinstance(contents, str):
            return Passage(*(str(t).encode("utf-8", "replace").decode() for t in (name, contents)))
    raise ValueError(
        f"corpus: {place}: expected an object with 'id' and 'contents', or 'title' and 'text',"
        f" got {got}"
    )
