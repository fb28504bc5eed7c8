"""The library's tools by name, as `rollout.tools: [python]` names them.

Worker processes import this: it needs no array library.
"""

import asyncio
import hashlib
import json
import sqlite3
import unicodedata
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.files import atomic_write
from jaxrl_llm.rollout.observation import BrokenTool, EpisodeRow, FailedTool
from jaxrl_llm.rollout.servers import ServerError, check_client, post
from jaxrl_llm.rollout.tools.mcp import mcp_tools
from jaxrl_llm.rollout.tools.tool import LoadedTool, marked, toolset_tool
from jaxrl_llm.rollout.tools.verl import verl_tools
from jaxrl_llm.sandbox.expression import calculate
from jaxrl_llm.sandbox.interpreter import CodeResult, open_interpreter, read_limits
from jaxrl_llm.workers.retries import wait_before_retry
from jaxrl_llm.workers.values import shorten

__all__ = [
    "calculator",
    "look_up",
    "mcp_tools",
    "python",
    "retrieve",
    "search",
    "verifiers_tools",
    "verl_tools",
]


SHARE_OF_TIME = 0.8
"""Of the time limit of a call, which one run may take: the rest is to start and to answer."""

ABILITIES = {
    "expression": "Compute an arithmetic expression: numbers, parentheses and + - * / // % **.",
    "process": "Run Python. There is an empty folder for files, and no network.",
    "service": "Run Python.",
}
KEPT = {True: " Names stay from call to call.", False: " Nothing stays from call to call."}
SEEN = {
    "expression": "",
    "process": " What is printed is returned, and the value of a last expression.",
    "service": " What is printed is returned.",
}


def check_python(seconds: float, **keywords: Any) -> None:
    """Open an interpreter and close it: what can't be had is an error.

    Args:
        seconds: that a call may take.
        keywords: of `python`.

    Raises:
        ConfigError: as for `python`.
        ConnectionError: a server gives no answer.
    """
    opened = python(seconds, **keywords)
    next(opened)
    opened.close()


@marked(check=check_python)
def python(
    seconds: float,
    *,
    sandbox: str,
    keep_state: bool = True,
    url: str | None = None,
    answer: str | None = None,
    **limits: Any,
) -> Generator[Callable[..., str], None, None]:
    """Give an episode an interpreter, which lives until its end.

    Args:
        seconds: that a call may take.
        sandbox: level of isolation (docs/sandbox.md).
        keep_state: whether a call finds the names that earlier ones have bound.
        url: of the server, for `service` alone.
        answer: told for every call instead, to see what a model does without the tool.
        limits: `cpu_s`, `wall_s`, `memory_mb`, `processes`, `file_mb` and `output_bytes` of each
            call (`CodeLimits`); `wall_s` is 0.8 of `seconds` at most, and if it is not given.

    Yields:
        The function that the model calls.

    Raises:
        ConfigError: there is no such level on this machine, or a limit is none.
    """
    bounds = read_limits(limits, wall_s=SHARE_OF_TIME * seconds)
    if bounds.wall_s > SHARE_OF_TIME * seconds:
        raise ConfigError(
            f"expected wall_s of at most {SHARE_OF_TIME * seconds:g}, {SHARE_OF_TIME:g} of "
            f"rollout.tool_process.timeout_s, got {bounds.wall_s:g}; raise one or lower the other"
        )
    with open_interpreter(sandbox, bounds, keep_state=keep_state, url=url) as interpreter:

        def run(code: str) -> str:
            return told_result(interpreter.run(code)) if answer is None else answer

        has_state = KEPT[keep_state] if sandbox != "expression" else ""
        run.__doc__ = (
            f"{ABILITIES[sandbox]}{has_state}{SEEN[sandbox]}\n\nArgs:\n    code: to be run.\n"
        )
        yield run


def starts_processes(function: Callable[..., Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether a tool keeps processes of its own for each open episode, which it bounds.

    A limit on the processes of a worker, in which many episodes live, would end them all.

    >>> starts_processes(python, {"sandbox": "service"})
    False
    """
    return function is python and keywords.get("sandbox") == "process"


def told_result(result: CodeResult) -> str:
    """Return what a model is told of code that came to its end: output, then errors.

    Raises:
        FailedTool: the code failed, which is told.
        BrokenTool: the infrastructure did.

    >>> told_result(CodeResult("42\\n"))
    '42'
    """
    if result.failure == "unavailable":
        raise BrokenTool(f"python: {result.reason}")
    parts = [result.output.rstrip("\n"), result.errors.rstrip("\n")]
    if result.failure is None:
        return "\n".join(filter(None, parts)) or "(no output)"
    if result.reason not in result.errors:
        parts.append(f"error: {result.reason}")
    raise FailedTool("\n".join(filter(None, parts)), kind=result.failure)


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


Passage = tuple[str, str]
"""Of a corpus: its id, unique there, and its text; the first line of several is the title."""


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
            return rows.fetchall()
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
                yield (*_read_passage(line, place), place)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


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
            return _encodable(str(name)), _encodable(contents)
    raise ValueError(
        f"corpus: {place}: expected an object with 'id' and 'contents', or 'title' and 'text',"
        f" got {got}"
    )


PASSAGE = "Doc {rank}(Title: {title}) {text}"
NOTHING = "No passage was found."
DEADLINE_SHARE = 0.9  # of the time limit, in which a server must answer


# Tools that search: a folder of passages, or a server of Search-R1. Worker processes import this.
#
# https://arxiv.org/abs/2503.09516 tells passages as `PASSAGE` does.


def told(passages: Sequence[Passage], passage: str) -> str:
    """Return what the model is told of passages.

    Args:
        passages: the best one first.
        passage: how each is written, with any of `{rank}`, `{id}`, `{title}` (the first line),
            `{text}` (the others) and `{contents}`.

    >>> told([("7", "Rome\\nis old.")], PASSAGE)
    'Doc 1(Title: Rome) is old.'
    """
    lines = []
    for rank, (name, contents) in enumerate(passages, start=1):
        title, _, text = contents.partition("\n")
        given = {"rank": rank, "id": name, "title": title, "text": text, "contents": contents}
        lines.append(passage.format(**given))
    return "\n".join(lines) or NOTHING


def _check(k: int, passage: str) -> None:
    if type(k) is not int or k < 1:
        raise ValueError(f"k: expected a number of passages from 1 on, got {k!r}")
    try:
        told([("", "")], passage)
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            "passage: expected a text with any of {rank}, {id}, {title}, {text} and {contents},"
            f" got {passage!r}"
        ) from error


def prepare_search(
    *,
    corpus: str,
    k: int = 3,
    passage: str = PASSAGE,
    index: str | None = None,
    answer: str | None = None,
) -> None:
    """Check the keywords of `search`, and build the index of its corpus.

    Raises:
        ValueError: a keyword or a line of the corpus does not fit.
        OSError: the index can't be written.
    """
    _check(k, passage)
    if answer is None:
        build_index(corpus, index)


@marked(prepare=prepare_search)
def search(
    query: str,
    *,
    corpus: str,
    k: int = 3,
    passage: str = PASSAGE,
    index: str | None = None,
    answer: str | None = None,
) -> str:
    """Search for passages of text.

    Args:
        query: what to look for, in a few words.
        corpus: folder of .jsonl files (`jaxrl_llm.rollout.tools.builtin.build_index`).
        k: how many passages are told, at most.
        passage: how each of them is told, see `told`.
        index: file of the index; null keeps it in the folder of the corpus.
        answer: told for every call instead, to see what a model does without the tool.

    Returns:
        The passages that fit best.

    Raises:
        ValueError: the query has no word, or too many.
        BrokenTool: the index can't be read.
    """
    if answer is not None:
        return answer
    return told(search_corpus(query, corpus=corpus, k=k, index=index), passage)


def prepare_retrieve(
    *, url: str, k: int = 3, passage: str = PASSAGE, answer: str | None = None
) -> None:
    """Check the keywords of `retrieve`; the server need not be there yet.

    Raises:
        ConfigError: the package for requests is missing.
        ValueError: a keyword does not fit.
    """
    _check(k, passage)
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url: expected one such as http://localhost:8000/retrieve, got {url!r}")
    check_client("retrieve", key="rollout.tools")


@marked(prepare=prepare_retrieve)
async def retrieve(
    query: str,
    seconds: float,
    *,
    url: str,
    k: int = 3,
    passage: str = PASSAGE,
    answer: str | None = None,
) -> str:
    """Search for passages of text.

    Args:
        query: what to look for, in a few words.
        seconds: the time limit. A server that can't be reached, or asks to wait, is asked again
            until then.
        url: of the /retrieve of a server of Search-R1, or of one that speaks as it does.
        k: how many passages are told, at most.
        passage: how each of them is told, see `told`.
        answer: told for every call instead, to see what a model does without the tool.

    Returns:
        The passages that fit best.

    Raises:
        ValueError: the query is empty.
        BrokenTool: the server gave no passages in time.
    """
    if answer is not None:
        return answer
    if not query.strip():
        raise ValueError("expected a query, got an empty one")
    latest: Exception | None = None
    tries = 0
    try:
        async with asyncio.timeout(DEADLINE_SHARE * seconds):
            while True:
                tries += 1
                try:
                    return told(await _asked(url, query, k), passage)
                except (ServerError, ConnectionError) as error:
                    latest, wait = error, wait_before_retry(error, tries)
                if wait is None:
                    break
                await asyncio.sleep(wait)
    except TimeoutError:
        pass
    why = latest or f"no answer within {DEADLINE_SHARE * seconds:g} s"
    raise BrokenTool(f"{url}: {why}") from latest


async def _asked(url: str, query: str, k: int) -> list[Passage]:
    body = {"queries": [query], "topk": k, "return_scores": True}
    response = await post(url, "", body)
    try:
        (passages,) = response.json()["result"]
        if not isinstance(passages, list) or len(passages) > k:
            raise ValueError("no list of passages, or too many")
        return [_passage(each["document"]) for each in passages]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        expected = f"JSON with a list of up to {k} {{document: {{contents: …}}}} as result[0]"
        raise ServerError(response, expected) from error


def _passage(document: Any) -> Passage:
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError("contents is no text")
    return str(document.get("id", "")), contents


@marked(is_toolset=True)
def verifiers_tools(*, id: str, args: Mapping[str, Any] | None = None) -> list[LoadedTool]:
    """Give the schemas of the tools of an environment, for the agent `verifiers_environment`.

    Args:
        id: of the environment.
        args: keywords of its `load_environment`.

    Returns:
        Its tools, which only the environment can run.

    Raises:
        ConfigError: there is no such environment.
    """
    from jaxrl_llm.data.verifiers_rows import load_verifiers  # which imports array libraries

    env = load_verifiers(id, json.dumps(args or {}, sort_keys=True))
    return [
        toolset_tool(
            {"name": t.name, "description": t.description, "parameters": t.parameters},
            _run_elsewhere,
        )
        for t in env.tool_defs or []
    ]


def _run_elsewhere() -> Generator[Callable[..., Any], None, None]:
    raise RuntimeError("expected rollout.agent: verifiers_environment, which runs these tools")
    yield


def calculator(
    expression: str, rng: Random | None = None, *, failing: float = 0.0, answer: str | None = None
) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: of numbers, parentheses and + - * / // % **, such as (17 + 4) * 0.5.
        rng: of the episode, for `failing`.
        failing: the chance that `!` is told instead, to see whether a model learns to try again.
        answer: told for every call instead, to see what a model does without the tool.

    Returns:
        The number; a fraction where it has no end as a decimal.

    Raises:
        ValueError: it is no such expression, or a number in it gets too large.

    >>> calculator("0.1 + 0.2"), calculator("2 ** 70"), calculator("2 / 6")
    ('0.3', '1180591620717411303424', '1/3, about 0.333333333333')
    """
    if answer is not None:
        return answer
    if rng is not None and rng.random() < failing:
        return "!"
    return calculate(expression)


def look_up(letter: str, row: EpisodeRow, *, answer: str | None = None) -> str:
    """Read the letter that stands for a letter in the table of the episode.

    Args:
        letter: one from a to z.
        row: of the episode; its `extra_info` has the `table`, 26 letters.
        answer: told for every call instead, to see what a model does without the tool.

    Returns:
        The letter of the table.

    Raises:
        ValueError: it is not one letter from a to z.

    >>> look_up("c", EpisodeRow(0, extra_info={"table": "bcdefghijklmnopqrstuvwxyza"}))
    'd'
    """
    if len(letter) != 1 or not "a" <= letter <= "z":
        raise ValueError(f"expected one letter from a to z, got {letter[:20]!r}")
    return row.extra_info["table"][ord(letter) - ord("a")] if answer is None else answer
