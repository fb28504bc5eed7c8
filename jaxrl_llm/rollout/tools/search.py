"""Tools that search: a folder of passages, or a server of Search-R1. Worker processes import this.

https://arxiv.org/abs/2503.09516 tells passages as `PASSAGE` does.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.servers import ServerError, check_client, post
from jaxrl_llm.rollout.observation import BrokenTool
from jaxrl_llm.rollout.tools.loading import prepared_by
from jaxrl_llm.rollout.tools.search_index import Passage, build_index, search_corpus
from jaxrl_llm.workers.retries import wait_before_retry

PASSAGE = "Doc {rank}(Title: {title}) {text}"
NOTHING = "No passage was found."
DEADLINE_SHARE = 0.9  # of the time limit, in which a server must answer


def told(passages: Sequence[Passage], passage: str) -> str:
    """Return what the model is told of passages.

    Args:
        passages: the best one first.
        passage: how each is written, with any of `{rank}`, `{id}`, `{title}` (the first line),
            `{text}` (the others) and `{contents}`.

    >>> told([Passage("7", "Rome\\nis old.")], PASSAGE)
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
        told([Passage("", "")], passage)
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


@prepared_by(prepare_search)
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
        corpus: folder of .jsonl files (`jaxrl_llm.rollout.tools.search_index.build_index`).
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


@prepared_by(prepare_retrieve)
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
    return Passage(str(document.get("id", "")), contents)
