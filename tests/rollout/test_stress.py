import asyncio
import contextlib

import numpy as np
import pytest

from jaxrl_llm.rollout.engine import Request, SamplingParams
from tests.guarded import NATIVE
from tests.rollout.conftest import build, drawn_from, log_softmax, opened, weights
from tests.waiting import wait_until

COUNT = 300
ATOL = {"dense": 5e-5, "delta": 2e-3}  # a bit of the latter's weights can change 5e-4


def draw_requests(rng):
    """Prompts of all lengths, many of which begin alike."""
    stems, requests = rng.integers(0, 32, (5, 30)).tolist(), []
    for seed in range(COUNT):
        length = int(rng.integers(1, 31))
        start = stems[int(rng.integers(5))][:length]
        start[-1] = int(rng.integers(32)) if seed % 2 else start[-1]
        sampling = SamplingParams(
            int(rng.integers(1, 41 - length)), stop_ids=(3, 9)[: 2 * (seed % 4 == 0)]
        )
        requests.append(Request(tuple(start), sampling, seed))
    return requests


SLOW = [pytest.mark.slow, pytest.mark.guards(*NATIVE)]


@pytest.fixture(scope="module", params=["dense", pytest.param("delta", marks=SLOW)])
def model(request):
    return request.param


@pytest.fixture(scope="module")
def cramped(model):
    """Few rows, room for two of the longest sequences, and prompts that are read in pieces."""
    with contextlib.closing(build(model=model)) as plain:
        programs = plain.programs
        gb = 2 * (7.5 * programs.page_bytes() + 6 * programs.slot_bytes()) / 1e9
    sizes = {"PREFILL_LENGTHS": (16,), "PREFILL_TOKENS": (64,)}
    with opened(model, max_running_sequences=6, steps=3, cache_gb=gb, sizes=sizes) as engine:
        yield engine


class Story:
    """What is done to an engine, and what its callers see.

    Attributes:
        loaded: whether the cache was read again, for each version that was loaded.
        done: the newest version whose load has ended.
        seen: (version when it was asked for, request, answer) of what ended.
    """

    def __init__(self, engine, model, rng):
        self.engine, self.model, self.rng = engine, model, rng
        self.loaded, self.done, self.seen, self.given_up = {}, -1, [], 0
        self.over, self.crowd = False, asyncio.Semaphore(16)

    async def load(self, *, recompute):
        version = len(self.loaded)
        self.loaded[version], params = recompute, weights(self.model, version % 2)
        await asyncio.to_thread(self.engine.load, params, version, recompute=recompute)
        self.done = version

    async def meddle(self):
        """Pause, sleep and load, each time that a few answers more are there."""
        ended = 0
        while not self.over:
            await asyncio.sleep(0.002)
            if len(self.seen) < ended:
                continue
            ended = len(self.seen) + int(self.rng.integers(4, 16))
            action = self.rng.choice(["load", "recompute", "pause", "sleep", "paused load"])
            if action in ("pause", "sleep", "paused load"):
                stop = self.engine.sleep if action == "sleep" else self.engine.pause
                await asyncio.to_thread(stop)
            if action != "pause":
                await self.load(recompute=bool(action == "recompute" or self.rng.random() < 0.6))
            self.engine.wake() if action == "sleep" else self.engine.resume()

    async def call(self, request, streams, patience):
        async with self.crowd:
            done = self.done
            ask = self.collect(request) if streams else self.engine.generate(request)
            try:
                self.seen.append((done, request, await asyncio.wait_for(ask, patience)))
            except TimeoutError:
                self.given_up += 1

    async def collect(self, request):
        pieces = [piece async for piece in self.engine.stream(request)]
        assert [p.finish for p in pieces[:-1]] == [""] * (len(pieces) - 1)
        assert all(len(p.tokens) for p in pieces)
        whole = [np.concatenate([piece[i] for piece in pieces]) for i in range(3)]
        return type(pieces[-1])(*whole, *pieces[-1][3:])

    async def run(self, requests):
        await self.load(recompute=False)
        meddling = asyncio.create_task(self.meddle())
        chance = self.rng.random((len(requests), 3))
        ways = [(a < 0.4, 0.03 * c if b < 0.2 else None) for a, b, c in chance]
        calls = [self.call(request, *way) for request, way in zip(requests, ways, strict=True)]
        await asyncio.wait_for(asyncio.gather(*calls), 300)
        self.over = True
        await asyncio.wait_for(meddling, 60)


def test_nothing_is_lost_and_nothing_hangs(cramped, model):
    rng = np.random.default_rng(7)
    requests, story = draw_requests(rng), Story(cramped, model, rng)
    before = cramped.stats()
    asyncio.run(story.run(requests))
    assert len(story.seen) + story.given_up == COUNT
    assert story.given_up > 5 and len(story.loaded) > 5
    exact = mixed = 0
    for done, request, answer in story.seen:
        sampling, versions = request.sampling, answer.versions.tolist()
        assert versions == sorted(versions) and set(versions) <= set(story.loaded)
        assert versions[0] >= done, "none from weights that had been replaced"
        stopped = answer.tokens[-1] in sampling.stop_ids
        assert answer.finish == ("stop" if stopped else "length")
        assert answer.stopped_by == (answer.tokens[-1] if stopped else None)
        assert stopped or len(answer.tokens) == sampling.max_new_tokens
        assert not set(answer.tokens[:-1].tolist()) & set(sampling.stop_ids)
        assert len(answer.logprobs) == len(versions) == len(answer.tokens)
        if all(story.loaded[v] for v in range(done + 1, versions[-1] + 1)):
            exact, mixed = exact + 1, mixed + (versions[0] != versions[-1])
            check_versions(request, answer, model)
    assert exact > 30 and mixed > 0

    def is_idle():
        stats = cramped.stats()
        return (stats.running, stats.waiting, stats.cached_tokens) == (0, 0, 0)

    wait_until(is_idle)  # the step that drops those who gave up
    after = cramped.stats()
    assert after.preemptions > before.preemptions
    assert after.reused_tokens > before.reused_tokens
    for pages in cramped._runner.scheduler.pages:
        assert (pages.available, pages.available_slots) == (pages.count, pages.slots)


def check_versions(request, answer, model):
    """Compare each log-prob with a forward pass of its weights over all before it."""
    for version in set(answer.versions.tolist()):
        mine = answer.versions == version
        after = log_softmax(drawn_from(weights(model, version % 2), request, answer, model))
        expected = after[np.arange(len(answer.tokens)), answer.tokens]
        np.testing.assert_allclose(answer.logprobs[mine], expected[mine], atol=ATOL[model])
