"""What the loop's stages do at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest

from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import Engine, EngineError
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.rollout.types import Completion, Receipt
from jaxrl_llm.training.experience import lay_out, with_scores
from jaxrl_llm.training.loop import Job, assess, gather, push
from jaxrl_llm.training.update import TrainState

LIMIT = 10.0  # seconds


def test_answers_are_scored_while_the_devices_compute():
    """Reward function and reference each wait until the other has begun."""
    scoring, computing = threading.Event(), threading.Event()

    def score(rollouts):
        scoring.set()
        assert computing.wait(LIMIT), "the reference waits for the scores"
        return [Score(0.5, {}, None)]

    def reference(batch):
        computing.set()
        assert scoring.wait(LIMIT), "nobody scores while the reference is computed"
        return {"logprobs": np.zeros(batch.tokens.shape, np.float32)}

    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
    prompt = Prompt(0, (1, 2), "arithmetic", "3", {}, [])
    answer = Completion(np.array([5]), np.zeros(1, np.float32), np.zeros(1, int), "length")
    drawn = Rollouts([prompt], [answer], ["3"])
    idle = dict.fromkeys(("keep", "penalty", "greedy_scores", "old_logprobs", "critic"))
    with ThreadPoolExecutor(1) as aside:
        job = Mock(
            spec=Job,
            config=from_tree(TrainConfig, tree),
            sample=lambda prompts, step, draw: drawn,
            score=score,
            aside=aside,
            scored_aside=True,
            lay_out=lambda rollouts: lay_out(rollouts, samples=1, max_tokens=8),
            add_scores=with_scores,
            reference=reference,
            reward_model=None,
            **idle,
        )
        rollouts, waiting, _ = gather(job, iter([[prompt]]), 1, Clock())
        batch, scores, _ = assess(job, {}, rollouts, waiting, 1, Clock())
    assert batch["scores"].tolist() == [0.5] and scores == [Score(0.5, {}, None)]
    assert "ref_logprobs" in batch.fields


@pytest.mark.parametrize(
    ("echo", "told"),
    [
        (Receipt(3, 17), None),
        (Receipt(3, 18), "echoed version 3 with checksum 18, wanted version 3 with 17"),
        (Receipt(2, 17), "echoed version 2 with checksum 17, wanted version 3"),
        (Receipt(3, None), None),  # it has compared by itself
        (Receipt(2, None), "echoed version 2 with checksum None, wanted version 3"),
    ],
)
def test_what_the_engine_echoes_is_compared_with_what_was_sent(echo, told):
    engine, sums = Mock(spec=Engine), Mock(return_value=17)
    engine.load.return_value = echo
    job = Mock(spec=Job, engine=engine, whole=Mock(), checksum=sums)
    states = {"actor": Mock(spec=TrainState, params={})}
    if told is None:
        assert push(job, states, 3) == {"perf/moved_gb": 0.0}
    else:
        with pytest.raises(EngineError, match=told):
            push(job, states, 3)
    assert sums.called == (echo.checksum is not None)
