import asyncio
import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rollout.tools.builtin import build_index, search, search_corpus
from tests.listening import listening
from tests.refusals import refuses
from tests.rollout.conftest import call_tools
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


def call(name, *queries, keywords, workers=0, seconds=60.0, retries=0, before=lambda: None):
    """Call a tool as an episode does; return (text, failure) of each call."""
    process = {"workers": workers, "timeout_s": seconds, "retries": retries}
    with open_tools([FunctionSpec(name, keywords)], **process) as pool:
        before()
        results = call_tools(pool, *((name, {"query": query}) for query in queries))
    return [(result.text, result.failure) for result in results]


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


def test_the_ranking_is_that_of_bm25(tmp_path):
    rng, weights = random.Random(0), [1 / (1 + rank) for rank in range(len(LOREM))]

    def text(longest):
        return " ".join(rng.choices(LOREM, weights, k=rng.randint(1, longest)))

    passages = {f"p{number}": text(12) for number in range(300)}
    passages |= {f"q{number}": passages[f"p{number}"] for number in range(20)}  # which are as good
    shuffled = dict(rng.sample(sorted(passages.items()), len(passages)))
    corpus = write(tmp_path / "corpus", "a.jsonl", shuffled)
    for _ in range(30):
        query, k = text(5), rng.randint(1, 40)
        found = [name for name, _ in search_corpus(query, corpus=corpus, k=k)]
        assert found == by_formula(passages, query, k), query


def test_words_are_found_whatever_stands_between_them(cities):
    expected = {
        "cities": ["a", "b"],  # of one length, so by id
        "LODZ": [],  # the Polish letter is no accented one
        "quebec rivers": ["7"],
        'the "light" of: (paris) * NOT': ["a", "b"],
        "nowhere": [],
    }
    found = {q: [name for name, _ in search_corpus(q, corpus=cities)] for q in expected}
    assert found == expected


@given(st.text(st.characters(), max_size=60) | st.text('"()*:^-+ ANDORTNE\0a', max_size=60))
def test_no_query_breaks_the_search(cities, query):
    try:
        assert len(search_corpus(query, corpus=cities, k=2)) <= 2
    except ValueError as error:
        assert "words" in str(error)
        assert not any(c.isalnum() for c in query)


def test_a_model_is_told_passages_or_what_is_wrong(cities):
    def told(*queries, **keywords):
        return call("search", *queries, keywords={"corpus": cities} | keywords, workers=1)

    found, nowhere, *wrong = told("a city of light", "nowhere", "?!", "x " * 201, k=2)
    docs = 'Doc 1(Title: Paris) The "city" of light.\nDoc 2(Title: Łódź) A city of mills.'
    assert found == (docs, None)
    assert nowhere == ("No passage was found.", None)
    assert [failure for _, failure in wrong] == ["failed"] * 2
    (shown,) = told("river", k=1, passage="{rank} {id} {contents}")
    assert shown[0] == "1 7 Québec\nIt lies on a river."
    assert told("river", corpus="none", answer="?") == [("?", None)]


def test_what_does_not_fit_is_refused_before_workers_start(tmp_path, cities, subtests):
    corpus = write(tmp_path / "corpus", "a.jsonl", {"a": "b", "7": "c"})
    other = Path(corpus) / "b.jsonl"
    for line in (
        *(b"{", b"[" * 10**5, b"\xff", b'"text"', b'{"id": 1}', b'{"id": [1], "contents": "b"}'),
        b'{"id": 7, "contents": "d"}',  # there is one
    ):
        with subtests.test(line=line[:30]):
            other.write_bytes(b'{"id": 2, "contents": ""}\n' + line + b"\n")
            with pytest.raises(ValueError, match=r"b\.jsonl"):
                build_index(corpus)
            assert {path.name for path in Path(corpus).iterdir()} == {"a.jsonl", "b.jsonl"}
    with refuses("rollout.tools"):
        call("search", keywords={"corpus": corpus})
    for keywords in (
        *({"corpus": "nowhere"}, {"k": 0}, {"passage": "{name}"}, {"passage": "{"}),
        {"index": "/nowhere/x"},
    ):
        with refuses("rollout.tools"):
            call("search", keywords={"corpus": cities} | keywords)
    other.unlink()
    write(tmp_path / "corpus", "a.jsonl", {})
    with pytest.raises(ValueError, match="passages"):
        build_index(corpus)


def test_an_index_is_built_again_only_where_it_must_be(tmp_path):
    corpus = write(tmp_path / "corpus", "a.jsonl", {"a": "old words"})
    path = build_index(corpus)

    def finds(query, name, **keywords):
        return search(query, corpus=corpus, passage="{id}", **keywords) == name

    before = path.stat()
    assert finds("old", "a")
    build_index(corpus)
    assert path.stat() == before
    write(tmp_path / "corpus", "b.jsonl", {"b": "new words, old ones"})
    assert finds("new", "b")
    path.write_bytes(b"no index" * 1000)
    write(tmp_path / "corpus", "b.jsonl", {"c": "new words"})
    assert finds("new", "c")
    elsewhere = tmp_path / "elsewhere.sqlite"
    path.unlink()
    assert finds("new", "c", index=str(elsewhere))
    assert elsewhere.exists() and not path.exists()
    # a corpus that is gone is no fault of the model
    gone = {"before": lambda: shutil.rmtree(corpus), "keywords": {"corpus": corpus}}
    assert call("search", "b", **gone)[0][1] == "broken"


def passages_of(query, topk):
    contents = [f"Title {rank}\n{query} {rank}" for rank in range(topk)]
    return [{"document": {"id": "1", "contents": c}, "score": 1.0} for c in contents]


WRONG = {
    **{"refused": Response("no", 400), "bomb": Response("[" * 10**6)},
    "two": JSONResponse({"result": [[], []]}),
    "no text": JSONResponse({"result": [[{"document": {"contents": None}}]]}),
    "too many": JSONResponse({"result": [passages_of("x", 9)]}),
}


@pytest.fixture(scope="module")
def server():
    """A server of Search-R1, at its worst where a query says so."""
    asked = Counter()

    async def retrieve(request):
        body = await request.json()
        assert set(body) == {"queries", "topk", "return_scores"} and body["return_scores"] is True
        (query,), topk = body["queries"], body["topk"]
        asked[query] += 1
        if query == "hangs":
            await asyncio.sleep(2.0)
        if query == "busy once" and asked[query] == 1:
            return Response(status_code=503)
        found = [] if query == "nothing" else passages_of(query, topk)
        return WRONG.get(query) or JSONResponse({"result": [found]})

    with listening(Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])) as address:
        yield f"{address}/retrieve", asked


def test_a_server_is_asked_for_passages(server):
    url, asked = server
    fine, busy, nothing, empty = call(
        "retrieve", "fine", "busy once", "nothing", " ", keywords={"url": url, "k": 2}
    )
    expected = "Doc 1(Title: Title 0) {0} 0\nDoc 2(Title: Title 1) {0} 1"
    assert [fine[0], busy[0]] == [expected.format(query) for query in ("fine", "busy once")]
    assert asked["busy once"] == 2
    assert nothing == ("No passage was found.", None)
    assert empty[1] == "failed"
    with refuses("rollout.tools"):
        call("retrieve", keywords={"url": "localhost:8000"})


def test_a_server_that_answers_nonsense_or_not_in_time_breaks_the_call(server, monkeypatch):
    url, asked = server
    for text, failure in call("retrieve", *WRONG, keywords={"url": url}, retries=1):
        assert failure == "broken" and len(text) < 500
    assert {asked[query] for query in WRONG} == {2}
    monkeypatch.setattr("jaxrl_llm.rollout.tools.builtin.DEADLINE_SHARE", 0.02)
    late = call("retrieve", "hangs", keywords={"url": url}, seconds=30.0)
    gone = call("retrieve", "x", keywords={"url": "http://127.0.0.1:9/retrieve"}, seconds=30.0)
    assert [failure for _, failure in late + gone] == ["broken"] * 2
