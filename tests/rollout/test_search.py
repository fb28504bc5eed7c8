"""Search in a folder of passages, against the formula of BM25; and a server that is asked."""

import asyncio
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.builtin import INDEX_FILE, build_index, search, search_corpus
from tests.listening import listening
from tests.tool_pools import open_tools

LOREM = [f"w{number}" for number in range(30)]


def write(folder, name, passages):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"id": id, "contents": contents}) for id, contents in passages.items()]
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder)


@pytest.fixture(scope="module")
def cities(tmp_path_factory):
    """A small corpus in two files, of which one has title and text."""
    folder = tmp_path_factory.mktemp("cities")
    write(folder, "a.jsonl", {"b": "Łódź\nA city of mills.", "a": 'Paris\nThe "city" of light.'})
    row = {"_id": 7, "title": "Québec", "text": "It lies on a river."}
    (folder / "b.jsonl").write_text(f"{json.dumps(row)}\n\n")
    return str(folder)


def call(spec, query, *, workers=0, seconds=10.0, retries=0, before=lambda: None):
    """Call a tool as an episode does."""

    async def ask(pool):
        before()
        session = pool.open(0, EpisodeRow(0), 0, None)
        try:
            return await session.call(ToolCall(spec.fn, {"query": query}))
        finally:
            await session.close()

    with open_tools([spec], workers=workers, timeout_s=seconds, retries=retries) as pool:
        return asyncio.run(ask(pool))


# ------------------------------------------------------------------------------------ the ranking


def by_formula(passages, query, k, k1=1.2, b=0.75):
    """Return the best ids by BM25, added up word by word; equal ones by id."""
    counts = {name: Counter(text.split()) for name, text in passages.items()}
    mean = sum(count.total() for count in counts.values()) / len(counts)
    scores = Counter()
    for word in query.split():
        holding = sum(word in count for count in counts.values())
        idf = math.log((len(counts) - holding + 0.5) / (holding + 0.5))
        for name, count in counts.items():
            if word in count:
                length = 1 - b + b * count.total() / mean
                gain = count[word] * (k1 + 1) / (count[word] + k1 * length)
                scores[name] += max(idf, 1e-6) * gain
    return sorted(scores, key=lambda name: (-round(scores[name], 9), name))[:k]


@pytest.mark.parametrize("seed", range(3))
def test_the_ranking_is_that_of_bm25(tmp_path, seed):
    rng = random.Random(seed)

    def text(longest):
        weights = [1 / (1 + rank) for rank in range(len(LOREM))]
        return " ".join(rng.choices(LOREM, weights, k=rng.randint(1, longest)))

    passages = {f"p{number}": text(12) for number in range(300)}
    passages |= {f"q{number}": passages[f"p{number}"] for number in range(20)}  # which are as good
    shuffled = dict(rng.sample(sorted(passages.items()), len(passages)))
    corpus = write(tmp_path / "corpus", "a.jsonl", shuffled)
    for _ in range(100):
        query, k = text(5), rng.randint(1, 40)
        found = [name for name, _ in search_corpus(query, corpus=corpus, k=k)]
        assert found == by_formula(passages, query, k), query


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("cities", ["a", "b"]),  # of one length, so by id
        ("LODZ", []),  # the Polish letter is no accented one
        ("łodz", ["b"]),
        ("quebec rivers", ["7"]),
        ('the "light" of: (paris)', ["a", "b"]),
        ("Quebec NOT river", ["7"]),
        ("contents : mills * AND", ["b"]),
        ("nowhere", []),
    ],
)
def test_words_are_found_whatever_stands_between_them(cities, query, expected):
    assert [name for name, _ in search_corpus(query, corpus=cities)] == expected


@given(st.text(st.characters(), max_size=60) | st.text('"()*:^-+ ANDORTNE\0a', max_size=60))
def test_no_query_breaks_the_search(cities, query):
    try:
        found = search_corpus(query, corpus=cities, k=2)
    except ValueError as error:
        assert "got 0 words" in str(error)
        assert not any(c.isalnum() for c in query)
    else:
        assert len(found) <= 2


# -------------------------------------------------------------------------------------- the tool


@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_is_told_passages_or_what_is_wrong(cities, workers):
    spec = FunctionSpec("search", {"corpus": cities, "k": 2})
    result = call(spec, "a city of light", workers=workers)
    assert result.text == (
        'Doc 1(Title: Paris) The "city" of light.\nDoc 2(Title: Łódź) A city of mills.'
    )
    assert call(spec, "nowhere", workers=workers).text == "No passage was found."
    for query, count in (("?!", 0), ("x " * 201, 201)):
        result = call(spec, query, workers=workers)
        assert result.failure == "failed"
        assert result.text == (
            f"error: ValueError: expected a query of 1 to 200 words, got {count} words"
        )
    shown = FunctionSpec("search", {"corpus": cities, "k": 1, "passage": "{rank} {id} {contents}"})
    assert call(shown, "river", workers=workers).text == "1 7 Québec\nIt lies on a river."
    control = FunctionSpec("search", {"corpus": "none", "answer": "?"})
    assert call(control, "river", workers=workers).text == "?"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 10**5, "not JSON"),
        (b"\xff", "not JSON"),
        (b'"text"', "expected an object with 'id' and 'contents', or 'title' and 'text', got"),
        (b'{"id": 1}', "expected an object"),
        (b'{"contents": "b"}', "expected an object"),
        (b'{"id": [1], "contents": "b"}', "expected an object"),
        (b'{"id": 1, "contents": 3}', "expected an object"),
    ],
)
def test_a_corpus_that_does_not_fit_is_refused_before_workers_start(tmp_path, line, message):
    corpus = write(tmp_path / "corpus", "a.jsonl", {"a": "b"})
    (tmp_path / "corpus" / "b.jsonl").write_bytes(b'{"id": 2, "contents": ""}\n' + line + b"\n")
    place = rf"^rollout.tools: search: corpus: .*/b.jsonl, line 2: {message}"
    with pytest.raises(ConfigError, match=place):
        call(FunctionSpec("search", {"corpus": corpus}), "b")
    assert {path.name for path in Path(corpus).iterdir()} == {"a.jsonl", "b.jsonl"}


def test_a_corpus_without_passages_is_refused(tmp_path):
    write(tmp_path / "corpus", "a.jsonl", {})
    with pytest.raises(ValueError, match=r"expected passages in .*a\.jsonl, got none"):
        build_index(str(tmp_path / "corpus"))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"corpus": "nowhere"}, "corpus: expected a folder with .jsonl files, got 'nowhere'"),
        ({"k": 0}, "k: expected a number of passages from 1 on, got 0"),
        ({"passage": "{name}"}, "passage: expected a text with any of"),
        ({"passage": "{"}, "passage: expected a text with any of"),
        ({"index": "/nowhere/x"}, "No such file or directory: '/nowhere"),
    ],
)
def test_keywords_that_do_not_fit_are_refused(cities, keywords, message):
    with pytest.raises(ConfigError, match=rf"^rollout.tools: search: .*{message}"):
        call(FunctionSpec("search", {"corpus": cities} | keywords), "x")


def test_two_documents_of_one_id_are_refused(tmp_path):
    corpus = write(tmp_path / "corpus", "a.jsonl", {"a": "b", "7": "c"})
    (tmp_path / "corpus" / "b.jsonl").write_text('{"id": 7, "contents": "d"}')
    with pytest.raises(ValueError, match=r"got '7' in .*a.jsonl, line 2 and .*b.jsonl, line 1"):
        build_index(corpus)


# -------------------------------------------------------------------------------------- the index

BUILD = """
import os, sys, time
from jaxrl_llm.rollout.tools.builtin import build_index, search_corpus
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
path = build_index(sys.argv[1])
print(os.stat(path).st_ino, [name for name, _ in search_corpus("w1 w2", corpus=sys.argv[1])])
"""


def test_processes_that_begin_together_build_one_index(tmp_path):
    rng = random.Random(0)
    passages = {str(number): " ".join(rng.choices(LOREM, k=40)) for number in range(20000)}
    corpus = write(tmp_path / "corpus", "a.jsonl", passages)
    begin = str(time.time() + 2.0)
    command = [sys.executable, "-c", BUILD, corpus, begin]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0] for process in running}
    assert len(said) == 1 and all(process.returncode == 0 for process in running)
    assert {path.name for path in Path(corpus).iterdir()} == {INDEX_FILE, "a.jsonl"}


def test_an_index_is_built_again_only_where_it_must_be(tmp_path):
    corpus = write(tmp_path / "corpus", "a.jsonl", {"a": "old words"})
    path = build_index(corpus)

    def made():
        return path.stat().st_ino, path.stat().st_mtime_ns

    before = made()
    assert search("old", corpus=corpus, passage="{id}") == "a"
    build_index(corpus)
    assert made() == before
    write(tmp_path / "corpus", "b.jsonl", {"b": "new words, old ones"})
    assert search("new", corpus=corpus, passage="{id}") == "b"
    assert made() != before
    path.write_bytes(b"no index" * 1000)
    write(tmp_path / "corpus", "b.jsonl", {"c": "new words"})
    assert search("new", corpus=corpus, passage="{id}") == "c"
    elsewhere = tmp_path / "elsewhere.sqlite"
    path.unlink()
    assert search("new", corpus=corpus, passage="{id}", index=str(elsewhere)) == "c"
    assert elsewhere.exists() and not path.exists()


def test_an_index_that_can_t_be_built_is_an_error_that_says_so(tmp_path, monkeypatch):
    corpus = write(tmp_path / "corpus", "a.jsonl", {"a": "b"})
    tables = "jaxrl_llm.rollout.tools.builtin.TABLES"
    monkeypatch.setattr(tables, "CREATE VIRTUAL TABLE words USING fts9 (contents);")
    with pytest.raises(
        ConfigError, match=r"search: index: .* can't be built: no such module: fts9"
    ):
        call(FunctionSpec("search", {"corpus": corpus}), "b")
    assert [path.name for path in Path(corpus).iterdir()] == ["a.jsonl"]


def test_a_corpus_that_is_gone_is_no_fault_of_the_model(tmp_path):
    corpus = write(tmp_path / "corpus", "a.jsonl", {"a": "b"})
    spec = FunctionSpec("search", {"corpus": corpus})
    result = call(spec, "b", before=lambda: shutil.rmtree(corpus))
    assert result.failure == "broken"
    assert "expected a folder with .jsonl files" in result.text


# -------------------------------------------------------------------------------- a server is asked


def passages_of(query, topk):
    contents = [f"Title {rank}\n{query} {rank}" for rank in range(topk)]
    return [
        {"document": {"id": str(rank), "contents": c}, "score": 1.0}
        for rank, c in enumerate(contents)
    ]


@pytest.fixture(scope="module")
def server():
    """A server of Search-R1, at its worst where a query says so."""
    asked = Counter()

    async def broken_off():
        yield b'{"result": [['
        raise ConnectionResetError

    async def retrieve(request):
        body = await request.json()
        assert set(body) == {"queries", "topk", "return_scores"} and body["return_scores"] is True
        (query,), topk = body["queries"], body["topk"]
        asked[query] += 1
        if query == "hangs":
            await asyncio.sleep(1.5)
        if query == "busy once" and asked[query] == 1:
            return Response(status_code=503)
        wrong = {
            "refused": Response("no", 400),
            "garbage": Response("<html>"),
            "bomb": Response("[" * 10**6),
            "number": JSONResponse(3),
            "empty": JSONResponse({}),
            "two": JSONResponse({"result": [[], []]}),
            "no list": JSONResponse({"result": [{"document": 1}]}),
            "no document": JSONResponse({"result": [["text"]]}),
            "no text": JSONResponse({"result": [[{"document": {"contents": None}}]]}),
            "too many": JSONResponse({"result": [passages_of(query, topk + 1)]}),
            "nothing": JSONResponse({"result": [[]]}),
        }
        if query == "breaks off":
            return StreamingResponse(broken_off())
        return wrong.get(query) or JSONResponse({"result": [passages_of(query, topk)]})

    with listening(Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])) as address:
        yield f"{address}/retrieve", asked


def test_a_server_is_asked_for_passages(server):
    url, asked = server
    spec = FunctionSpec("retrieve", {"url": url, "k": 2})
    expected = "Doc 1(Title: Title 0) {0} 0\nDoc 2(Title: Title 1) {0} 1"
    assert call(spec, "fine").text == expected.format("fine")
    assert call(spec, "busy once").text == expected.format("busy once")
    assert asked["busy once"] == 2
    assert call(spec, "nothing").text == "No passage was found."
    result = call(spec, " ")
    assert result.failure == "failed"
    assert result.text == "error: ValueError: expected a query, got an empty one"


@pytest.mark.parametrize(
    "query",
    (
        *("refused", "garbage", "bomb", "number", "empty", "two", "no list", "no document"),
        *("no text", "too many"),
    ),
)
def test_a_server_that_answers_nonsense_breaks_the_call(server, query):
    url, asked = server
    result = call(FunctionSpec("retrieve", {"url": url}), query, retries=1)
    assert result.failure == "broken" and ": expected " in result.text
    assert len(result.text) < 500
    assert asked[query] == 2


@pytest.mark.parametrize("query", ["hangs", "breaks off", "gone"])
def test_a_server_that_does_not_answer_in_time_breaks_the_call(server, query, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rollout.tools.builtin.DEADLINE_SHARE", 0.02)
    url = server[0] if query != "gone" else "http://127.0.0.1:9/retrieve"
    result = call(FunctionSpec("retrieve", {"url": url}), query, seconds=30.0)
    assert result.failure == "broken"
    if query == "hangs":
        assert "no answer within 0.6 s" in result.text


def test_keywords_of_a_server_are_checked(server, monkeypatch):
    with pytest.raises(ConfigError, match=r"rollout.tools: retrieve: url: expected one such as"):
        call(FunctionSpec("retrieve", {"url": "localhost:8000"}), "x")
    assert call(FunctionSpec("retrieve", {"url": server[0], "answer": "?"}), "x").text == "?"
    monkeypatch.setattr("jaxrl_llm.rollout.servers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout.tools: retrieve needs httpx2; pip install"):
        call(FunctionSpec("retrieve", {"url": server[0]}), "x")
