"""Samples of prompts: their order, texts and seeds."""

import numpy as np

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rollout.engine import Completion, Engine, Request, SamplingParams
from jaxrl_llm.rollout.rollouts import sample

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.5)


class Echo(Engine):
    """An engine that answers a prompt with its last token, then the number of the request.

    That number ends the second answer of each three, and a text the third.
    """

    def sample(self, requests):
        self.seen = requests
        answers = []
        for i, request in enumerate(requests):
            ids, stop = np.array([request.prompt[-1], i], np.int32), (None, i, "five")[i % 3]
            arrays = ids, np.zeros(2, np.float32), np.zeros_like(ids)
            answers.append(Completion(*arrays, "stop" if i % 3 else "length", stop))
        return answers


def draw(seed=(1, 2)):
    engine = Echo()
    prompts = [Prompt(index, ids, "test", None) for index, ids in enumerate([(5, 6), (7,)])]
    options = {"seed": seed, "decode": lambda tokens: ",".join(map(str, tokens))}
    return engine, prompts, sample(engine, prompts, SAMPLING, samples=3, **options)


def test_the_answers_of_a_prompt_lie_side_by_side_with_seeds_of_their_own():
    engine, prompts, rollouts = draw()
    assert rollouts.prompts == [prompts[0]] * 3 + [prompts[1]] * 3
    for request, rolled in zip(engine.seen, rollouts.prompts, strict=True):
        assert request == Request(rolled.tokens, SAMPLING, request.seed)
    assert [c.tokens.tolist() for c in rollouts.episodes[2:4]] == [[6, 2], [7, 3]]
    assert rollouts.texts == ["6,0", "6", "6,2", "7,3", "7", "7,5"], "without ids that stop"
    seeds = [r.seed for r in engine.seen]
    assert len(set(seeds)) == 6 and all(0 <= s < 2**32 for s in seeds)
    assert seeds == [r.seed for r in draw()[0].seen]
    assert not set(seeds) & {r.seed for r in draw(seed=(1, 3))[0].seen}
