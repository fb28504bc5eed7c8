"""Samples of prompts: their order, texts and seeds."""

import numpy as np

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rollout.engine import Completion, Engine, Request, SamplingParams
from jaxrl_llm.rollout.rollouts import sample


def prompt(*tokens):
    return Prompt(index=0, tokens=tokens, data_source="test", ground_truth=None)


def completion(*tokens, stopped_by=None):
    ids, finish = np.array(tokens, np.int32), "length" if stopped_by is None else "stop"
    return Completion(ids, np.zeros(len(ids), np.float32), np.zeros_like(ids), finish, stopped_by)


class Echo(Engine):
    """An engine that answers a prompt with its last token, then the number of the request.

    That number ends the second answer of each three, and a text the third.
    """

    def __init__(self):
        self.seen = []

    def sample(self, requests):
        self.seen += requests
        return [
            completion(r.prompt[-1], i, stopped_by=(None, i, "five")[i % 3])
            for i, r in enumerate(requests)
        ]


def draw(seed=(1, 2), samples=3):
    engine, sampling = Echo(), SamplingParams(max_new_tokens=4, temperature=0.5)
    prompts = [prompt(5, 6), prompt(7)]
    rollouts = sample(
        engine,
        prompts,
        sampling,
        samples=samples,
        seed=seed,
        decode=lambda tokens: ",".join(map(str, tokens)),
    )
    return engine, sampling, prompts, rollouts


def test_the_answers_of_a_prompt_lie_side_by_side():
    engine, sampling, prompts, rollouts = draw()
    assert rollouts.prompts == [prompts[0]] * 3 + [prompts[1]] * 3
    for request, rolled in zip(engine.seen, rollouts.prompts, strict=True):
        assert request == Request(rolled.tokens, sampling, request.seed)
    assert [c.tokens.tolist() for c in rollouts.episodes[2:4]] == [[6, 2], [7, 3]]


def test_texts_leave_out_a_token_that_stopped_them_but_not_a_text():
    assert draw()[3].texts == ["6,0", "6", "6,2", "7,3", "7", "7,5"]


def test_every_answer_has_a_seed_of_its_own_and_the_same_call_the_same_ones():
    seeds = [r.seed for r in draw()[0].seen]
    assert len(set(seeds)) == 6
    assert all(0 <= s < 2**32 for s in seeds)
    assert seeds == [r.seed for r in draw()[0].seen]
    assert not set(seeds) & {r.seed for r in draw(seed=(1, 3))[0].seen}
