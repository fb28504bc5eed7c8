import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.arrays import by_layer
from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.rollout.engine import EngineError, Request, SamplingParams
from jaxrl_llm.sharding.checksum import checksum
from jaxrl_llm.sharding.reshard import cast_tree
from tests.rollout.conftest import build, check_same, weights
from tests.waiting import wait_until


def request(length=3, new=2, *, seed=0, token=1, **options):
    return Request((token,) * length, SamplingParams(max_new_tokens=new, **options), seed)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_load_echoes_what_the_engine_holds(hollow):
    engine, params = hollow(dtype="bfloat16"), weights()
    receipt = engine.load(params, version=5)
    held = cast_tree(params, engine.model.compute_dtypes("bfloat16"))
    assert receipt[:2] == (5, int(checksum(held)))
    norms = {leaf.dtype for leaf in (held["final_norm"], held["layers"]["query_norm"])}
    assert norms == {jnp.dtype("float32")}  # as in the trainer's forward pass
    layers = by_layer(held, engine.model.declare())
    for mine, expected in zip(*map(jax.tree.leaves, (engine._params, layers)), strict=True):
        assert mine.dtype == expected.dtype
        np.testing.assert_array_equal(mine, expected)
    words = np.array(params["final_norm"]).view(np.uint32)
    words[3] ^= 1  # the lowest bit
    changed = params | {"final_norm": jnp.asarray(words.view(np.float32))}
    assert engine.load(changed, version=6).checksum != receipt.checksum
    assert engine.load(params, version=7)[:2] == (7, receipt.checksum)


def test_nothing_compiles_after_the_first_load(engine, compile_rest):
    engine.sample([request()])
    engine.programs.warm_up()  # another test's end has dropped what was left
    compile_rest()
    with contextlib.closing(CompileCounter()) as counter:
        for length in range(1, 33):
            engine.sample([request(length, new=1 + length % 7, token=length % 32)])
        engine.load(weights(seed=1), version=9)
        engine.sample([request(4), request(38), request(4, temperature=0.0, top_p=0.5, top_k=3)])
        engine.sleep()
        engine.wake()
        engine.sample([request()])
        engine.load(weights(), version=10)
        assert counter.count == 0


def test_who_waits_at_a_pause_or_asleep_is_answered_after_it(engine, pool):
    expected = engine.sample([request(new=8)])
    for stop, go_on in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
        stop()
        assert (engine._runner.pool is None) == (stop == engine.sleep)
        waiting = pool.submit(engine.sample, [request(new=8)])
        wait_until(lambda: engine._incoming)
        time.sleep(0.05)
        assert not waiting.done()
        go_on()
        check_same(waiting.result(120), expected)
    engine.sleep()
    engine.load(weights(seed=1), version=3)
    assert engine._runner.pool is None
    engine.wake()
    assert engine.sample([request()])[0].versions.tolist() == [3, 3]


def test_at_the_close_what_ends_with_the_chunk_in_flight_is_answered(hollow, pool):
    engine, started, go_on = hollow(), threading.Event(), threading.Event()

    def step():
        with engine._state:
            incoming, engine._incoming = engine._incoming, []
        started.set()
        go_on.wait(120)
        for sequence in incoming:
            sequence.versions, sequence.finish = [engine._version], "length"
        return incoming

    engine._step = step
    engine.load(weights(), version=1)
    waiting = pool.submit(engine.sample, [request()])
    assert started.wait(120)
    closing = pool.submit(engine.close)
    time.sleep(0.05)
    assert not closing.done()
    go_on.set()
    closing.result(120)
    assert len(waiting.result(120)) == 1


def test_an_engine_that_is_closed_or_has_no_weights_refuses(hollow, pool):
    engine = hollow()
    for ask in (engine.sample, lambda one: engine.score_tokens(one[0].prompt)):
        with pytest.raises(EngineError, match="weights"):
            ask([request()])
    engine.load(weights(), version=1)
    engine.pause()

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.generate(request()), timeout=0.05)

    asyncio.run(give_up())
    waiting = [pool.submit(engine.sample, [request(), request()]) for _ in range(2)]
    wait_until(lambda: len(engine._incoming) >= 4)
    for _ in range(2):
        engine.close()
    for future in waiting:
        with pytest.raises(EngineError, match="closed"):
            future.result(120)
    assert not engine._worker.is_alive()
    for ask in (engine.sample, lambda one: asyncio.run(engine.generate(one[0]))):
        with pytest.raises(EngineError, match="closed"):
            ask([request()])


REFUSED = [
    *[("max_new_tokens", request(*sizes)) for sizes in ((20, 21), (0,), (3, 0))],
    *[("prompt", request(token=token)) for token in (32, -1)],
    ("logit_bias", request(logit_bias=((3, 1.0), (32, 1.0)))),
    ("stop_ids", request(stop_ids=tuple(range(9)))),
    *[("seed", request(seed=seed)) for seed in (2**32, -1)],
    ("temperature", request(temperature=-0.1)),
    ("top_p", request(top_p=1.1)),
    ("min_p", request(min_p=float("nan"))),
    ("top_logprobs", request(top_logprobs=21)),
    ("tokenizer", request(stop=("end",))),
]


def test_requests_that_can_not_be_served_are_refused(engine, subtests):
    for named, bad in REFUSED:
        with subtests.test(named, bad=bad):
            with pytest.raises(EngineError, match=named):
                engine.sample([request(), bad])
            with pytest.raises(EngineError, match=named):
                asyncio.run(engine.generate(bad))
            assert not engine._runner.scheduler.is_busy
    for tokens in ([], [1] * 40, [1, 32]):
        with pytest.raises(EngineError):
            engine.score_tokens(tokens)
    assert len(engine.sample([request()])) == 1 and engine.sample([]) == []


def test_what_no_mesh_can_hold_is_refused():
    with pytest.raises(ValueError, match="max_running_sequences"):
        build(devices=8, max_running_sequences=12)
    for axis in ("stage", "context"):
        with pytest.raises(ValueError, match=axis):
            build(devices=8, axes={axis: 2, "data": 4}, max_running_sequences=8)


def test_answers_that_were_left_go_on_as_if_nothing_had_happened(engine):
    requests = [request(3 + i % 2, new=5 + 9 * (i % 4), seed=i, stop_ids=(7,)) for i in range(12)]
    whole = engine.sample(requests)
    for needed in (1, 4, 11):
        parts = engine.sample_until(requests, needed)
        assert all(part.finish for part in parts[:needed])
        left = [i for i, part in enumerate(parts) if not part.finish]
        begun = {i: parts[i] if len(parts[i].tokens) else None for i in left}
        rest = engine.sample([replace(requests[i], drawn=part) for i, part in begun.items()])
        for i, answer in zip(left, rest, strict=True):
            assert len(parts[i].tokens) < len(answer.tokens)
            parts[i] = answer
        check_same(parts, whole)
    again = [engine.sample_until(requests, 4) for _ in range(2)]
    for one, other in zip(*again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert engine.stats().running == engine.stats().waiting == 0


def test_what_can_not_be_gone_on_with_is_refused(engine):
    (answer,) = engine.sample([request(new=2)])
    cases = [(answer, 1), (answer._replace(finish=""), 1), (None, 0), (None, 3)]
    for drawn, needed in cases:  # whole; too long; too few or many that are needed
        with pytest.raises(EngineError, match="finish|drawn|tokens" if drawn else "needed"):
            engine.sample_until([replace(request(), drawn=drawn), request(seed=1)], needed)
