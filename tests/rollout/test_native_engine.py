"""The engine's life: weights, queue, pauses, failures, limits."""

import asyncio
import contextlib
import re
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
from tests.waiting import wait_until


def request(length=3, new=2, *, seed=0, token=1, **options):
    return Request((token,) * length, SamplingParams(max_new_tokens=new, **options), seed)


def slow_step(engine, started, go_on):
    """Let an engine's chunk wait for an event; all that runs ends with it."""

    def step():
        with engine._state:
            incoming, engine._incoming = engine._incoming, []
        started.set()
        go_on.wait(10)
        for sequence in incoming:
            sequence.versions, sequence.finish = [engine._version], "length"
        return incoming

    engine._step = step


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


# --------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_echoes_what_the_engine_holds(hollow, params, dtype):
    engine = hollow(dtype=dtype)
    receipt = engine.load(params, version=5)
    assert receipt.version == 5
    held = cast_tree(params, engine.model.compute_dtypes(dtype))
    assert receipt.checksum == int(checksum(held))
    norms = {leaf.dtype for leaf in (held["final_norm"], held["layers"]["query_norm"])}
    assert norms == {jnp.dtype("float32")}  # as in the trainer's forward pass
    assert held["embed"].dtype == jnp.dtype(dtype)
    for mine, expected in zip(
        *map(jax.tree.leaves, (engine._params, by_layer(held, engine.model.declare()))), strict=True
    ):
        assert mine.dtype == expected.dtype
        np.testing.assert_array_equal(mine, expected)
    words = np.array(params["final_norm"]).view(np.uint32)
    words[3] ^= 1  # the lowest bit
    changed = params | {"final_norm": jnp.asarray(words.view(np.float32))}
    assert engine.load(changed, version=6).checksum != receipt.checksum
    assert engine.load(params, version=7)[:2] == (7, receipt.checksum)


def test_the_trainer_may_donate_what_it_has_pushed(engine, params):
    mine = jax.tree.map(jnp.copy, params)
    engine.load(mine, version=1)
    expected = engine.sample([request(new=8)])[0].tokens.tolist()
    jax.block_until_ready(
        jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)(mine)
    )
    assert engine.sample([request(new=8)])[0].tokens.tolist() == expected


def test_weights_wait_for_the_chunk_in_flight(hollow, params, other_params, pool):
    engine, started, go_on = hollow(), threading.Event(), threading.Event()
    slow_step(engine, started, go_on)
    engine.load(params, version=1)
    waiting = pool.submit(engine.sample, [request()])
    started.wait(10)
    push = pool.submit(engine.load, other_params, 2)
    time.sleep(0.1)
    assert not push.done()
    go_on.set()
    assert waiting.result(10)[0].versions.tolist() == [1]
    assert push.result(10).version == 2
    assert engine.sample([request()])[0].versions.tolist() == [2]


def test_nothing_compiles_after_the_first_load(engine, params, other_params, compile_rest):
    engine.sample([request()])
    engine.programs.warm_up()  # another test's end has dropped what was left
    compile_rest()
    with contextlib.closing(CompileCounter()) as counter:
        for length in range(1, 33):
            engine.sample([request(length, new=1 + length % 7, token=length % 32)])
        engine.load(other_params, version=9)
        engine.sample([request(4), request(38), request(4, temperature=0.0, top_p=0.5, top_k=3)])
        engine.sleep()
        engine.wake()
        engine.sample([request()])
        engine.load(params, version=10)
        assert counter.count == 0


# ----------------------------------------------------------------------------------------- pause


def test_pause_and_resume(engine, pool):
    engine.pause()
    waiting = pool.submit(engine.sample, [request()])
    wait_until(lambda: engine._incoming)
    time.sleep(0.1)
    assert not waiting.done()
    engine.resume()
    assert len(waiting.result(10)) == 1


def test_sleep_frees_the_cache_and_wake_brings_it_back(engine, pool):
    before = engine.sample([request(new=8)])[0].tokens.tolist()
    engine.sleep()
    assert engine._runner.pool is None
    waiting = pool.submit(engine.sample, [request(new=8)])
    time.sleep(0.1)
    assert not waiting.done()
    assert engine._runner.pool is None
    engine.wake()
    assert waiting.result(10)[0].tokens.tolist() == before


def test_weights_may_be_loaded_asleep(engine, other_params):
    engine.sleep()
    engine.load(other_params, version=3)
    assert engine._runner.pool is None
    engine.wake()
    assert engine.sample([request()])[0].versions.tolist() == [3, 3]


def test_a_pause_holds_requests_that_were_about_to_start(engine, pool):
    """The worker has seen them, but waits for the weights."""
    with engine._device:
        waiting = pool.submit(engine.sample, [request()])
        wait_until(lambda: engine._incoming)
        time.sleep(0.1)
        pausing = pool.submit(engine.pause)
        wait_until(lambda: engine._paused)
    pausing.result(10)
    time.sleep(0.1)
    assert not waiting.done()
    assert len(engine._incoming) == 1
    engine.resume()
    assert len(waiting.result(10)) == 1


# ----------------------------------------------------------------------------------------- close


def test_waiting_requests_fail_when_the_engine_closes(hollow, params, pool):
    engine = hollow()
    engine.load(params, version=1)
    engine.pause()
    waiting = [pool.submit(engine.sample, [request(), request()]) for _ in range(2)]
    wait_until(lambda: len(engine._incoming) == 4)
    engine.close()
    for future in waiting:
        with pytest.raises(EngineError, match=r"^the engine was closed$"):
            future.result(10)
    assert not engine._worker.is_alive()


def test_what_ends_with_the_chunk_in_flight_is_answered_when_the_engine_closes(
    hollow, params, pool
):
    engine, started, go_on = hollow(), threading.Event(), threading.Event()
    slow_step(engine, started, go_on)
    engine.load(params, version=1)
    waiting = pool.submit(engine.sample, [request()])
    started.wait(10)
    closing = pool.submit(engine.close)
    time.sleep(0.05)
    assert not closing.done()
    go_on.set()
    assert len(waiting.result(10)) == 1
    closing.result(10)


def test_what_does_not_end_with_the_chunk_in_flight_fails_when_the_engine_closes(
    hollow, params, pool
):
    engine, started, go_on = hollow(), threading.Event(), threading.Event()
    take_in = engine._step

    def step():
        started.set()
        go_on.wait(10)
        with engine._state:
            engine._runner.scheduler.add(engine._incoming)
            engine._incoming = []
        return []

    assert take_in.__func__ is type(engine)._step
    engine._step = step
    engine.load(params, version=1)
    waiting = pool.submit(engine.sample, [request()])
    started.wait(10)
    closing = pool.submit(engine.close)
    go_on.set()
    with pytest.raises(EngineError, match=r"^the engine was closed$"):
        waiting.result(10)
    closing.result(10)


def test_a_closed_engine_refuses(hollow, params):
    engine = hollow()
    engine.load(params, version=1)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match=r"^the engine is closed$"):
        engine.sample([request()])
    with pytest.raises(EngineError, match=r"^the engine is closed$"):
        asyncio.run(engine.generate(request()))


# -------------------------------------------------------------------------------------- failures


def test_an_engine_without_weights_refuses(hollow):
    with pytest.raises(EngineError, match=r"^the engine has no weights: call load first$"):
        hollow().sample([request()])


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            request(39),
            "a prompt of 39 tokens with max_new_tokens=2 does not fit: the engine holds "
            "sequences of 2 to 40 tokens",
        ),
        (
            request(20, new=21),
            "a prompt of 20 tokens with max_new_tokens=21 does not fit: the engine holds "
            "sequences of 2 to 40 tokens",
        ),
        (
            request(0),
            "a prompt of 0 tokens with max_new_tokens=2 does not fit: the engine holds "
            "sequences of 2 to 40 tokens",
        ),
        (
            request(3, new=0),
            "a prompt of 3 tokens with max_new_tokens=0 does not fit: the engine holds "
            "sequences of 2 to 40 tokens",
        ),
        (request(token=32), "prompt holds token id 32, expected 0 to 31"),
        (request(token=-1), "prompt holds token id -1, expected 0 to 31"),
        (
            request(logit_bias=((3, 1.0), (32, 1.0))),
            "logit_bias holds token id 32, expected 0 to 31",
        ),
        (request(stop_ids=tuple(range(9))), "got number of stop_ids 9, expected 0 to 8"),
        (request(seed=2**32), "got seed 4294967296, expected 0 to 4294967295"),
        (request(seed=-1), "got seed -1, expected 0 to 4294967295"),
        (request(temperature=-0.1), "got temperature -0.1, expected 0 to inf"),
        (request(top_p=1.1), "got top_p 1.1, expected 0 to 1"),
        (request(min_p=float("nan")), "got min_p nan, expected 0 to 1"),
        (request(top_logprobs=21), "got top_logprobs 21, expected 0 to 20"),
        (
            request(stop=("end",)),
            "got texts that stop the answer, but this engine has no tokenizer",
        ),
    ],
)
def test_requests_that_can_not_be_served_are_refused(engine, bad, text):
    """At once, and none of the others with it is started."""
    with pytest.raises(EngineError, match=f"^{re.escape(text)}$"):
        engine.sample([request(), bad])
    with pytest.raises(EngineError, match=f"^{re.escape(text)}$"):
        asyncio.run(engine.generate(bad))
    assert not engine._runner.scheduler.is_busy
    assert len(engine.sample([request()])) == 1


def test_slots_must_divide_among_the_devices(build):
    with pytest.raises(ValueError) as error:
        build(devices=8, max_running_sequences=12)
    assert str(error.value) == (
        "rollout.max_running_sequences=12 can't be shared evenly by the 8 parts of a batch; "
        "expected a multiple of 8"
    )


@pytest.mark.parametrize("axis", ["stage", "context"])
def test_nothing_is_decoded_over_stages_or_contexts(build, axis):
    with pytest.raises(ValueError, match=f"^nothing is decoded over the axis '{axis}'; expected"):
        build(devices=8, axes={axis: 2, "data": 4}, max_running_sequences=8)


def test_a_failure_reaches_the_caller_and_the_engine_goes_on(engine, monkeypatch):
    expected = engine.sample([request(new=8)])[0].tokens.tolist()

    def fail(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_decode", fail)
        with pytest.raises(RuntimeError, match=r"^out of memory$"):
            engine.sample([request(new=8)])
        with pytest.raises(RuntimeError, match=r"^out of memory$"):
            asyncio.run(engine.generate(request(new=8)))
    assert engine.sample([request(new=8)])[0].tokens.tolist() == expected


def test_a_caller_that_gives_up_harms_nobody(engine):
    async def race():
        engine.pause()
        others = [asyncio.ensure_future(engine.generate(request(seed=s))) for s in range(3)]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.generate(request(seed=8)), timeout=0.05)
        others.append(asyncio.ensure_future(engine.generate(request(seed=9))))
        await asyncio.sleep(0)
        engine.resume()
        return await asyncio.wait_for(asyncio.gather(*others), timeout=20)

    assert len(asyncio.run(race())) == 4
    assert engine._worker.is_alive()


def test_a_caller_may_give_up_before_the_engine_closes(hollow, params):
    engine = hollow()
    engine.load(params, version=1)
    engine.pause()

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.generate(request()), timeout=0.05)

    asyncio.run(give_up())
    engine.close()


def test_no_requests_no_answers(engine):
    assert engine.sample([]) == []


# --------------------------------------------------------------------- answers that are not whole


def drawn_so_far(requests, answers):
    """Return requests that go on with answers."""
    return [
        replace(request, drawn=answer if len(answer.tokens) else None)
        for request, answer in zip(requests, answers, strict=True)
        if not answer.finish
    ]


def test_answers_that_were_left_go_on_as_if_nothing_had_happened(engine):
    """More than fit at once: some are whole, some begun, some not."""
    requests = [request(3 + i % 2, new=5 + 9 * (i % 4), seed=i, stop_ids=(7,)) for i in range(12)]
    whole = engine.sample(requests)
    for needed in (1, 4, 11):
        parts = engine.sample_until(requests, needed)
        assert all(part.finish for part in parts[:needed])
        left = [i for i, part in enumerate(parts) if not part.finish]
        rest = engine.sample(drawn_so_far(requests, parts)) if left else []
        for i, answer in zip(left, rest, strict=True):
            assert len(parts[i].tokens) < len(answer.tokens)
            parts[i] = answer
        for part, answer in zip(parts, whole, strict=True):
            np.testing.assert_array_equal(part.tokens, answer.tokens)
            np.testing.assert_allclose(part.logprobs, answer.logprobs, atol=1e-5)
            assert (part.finish, part.stopped_by) == (answer.finish, answer.stopped_by)
    again = [engine.sample_until(requests, 4) for _ in range(2)]
    for one, other in zip(*again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert engine.stats().running == engine.stats().waiting == 0


def test_an_answer_knows_which_weights_drew_each_token(engine, params, other_params):
    requests = [request(new=4), *(request(new=37, seed=seed) for seed in range(1, 6))]
    parts = engine.sample_until(requests, 1)
    engine.load(other_params, version=8)
    first = parts[1].versions[0]
    for part, answer in zip(parts[1:], engine.sample(drawn_so_far(requests, parts)), strict=True):
        count = len(part.tokens)
        np.testing.assert_array_equal(answer.logprobs[:count], part.logprobs)
        assert answer.versions.tolist() == [first] * count + [8] * (len(answer.tokens) - count)
    engine.load(params, version=9)


@pytest.mark.parametrize(
    ("drawn", "needed", "text"),
    [
        ("whole", 1, "expected one that is not whole"),
        ("too long", 1, "of less than 2 tokens"),
        ("none", 0, "needed=0, expected 1 to 2"),
        ("none", 3, "needed=3, expected 1 to 2"),
    ],
)
def test_what_can_not_be_gone_on_with_is_refused(engine, drawn, needed, text):
    answer = engine.sample([request(new=2)])[0]
    begun = {"whole": answer, "too long": answer._replace(finish=""), "none": None}[drawn]
    with pytest.raises(EngineError, match=text):
        engine.sample_until([replace(request(), drawn=begun), request(seed=1)], needed)
