"""What the loop's stages do at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import Engine, EngineError
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.sampling import Rollouts, lay_out
from jaxrl_llm.rollout.types import Completion, Receipt
from jaxrl_llm.training.buffer import Collected
from jaxrl_llm.training.experience import with_scores
from jaxrl_llm.training.loop import Stages, make_experience
from jaxrl_llm.training.stages.models import ModelsStage, reference_pass
from jaxrl_llm.training.stages.rollout import RolloutStage
from jaxrl_llm.training.stages.scoring import (
    ScoringStage,
    submit_scores,
    unchanged,
    without_greedy_scores,
)

LIMIT = 10.0  # seconds


def test_answers_are_scored_while_the_devices_compute():
    """Reward function and reference each wait until the other has begun."""
    scoring, computing = threading.Event(), threading.Event()

    def score(rollouts):
        scoring.set()
        assert computing.wait(LIMIT), "the reference waits for the scores"
        return [Score(0.5, {}, None)]

    def reference(states, batch):
        computing.set()
        assert scoring.wait(LIMIT), "nobody scores while the reference is computed"
        return {"logprobs": np.zeros(batch.tokens.shape, np.float32)}

    prompt = Prompt(0, (1, 2), "arithmetic", "3", {}, [])
    answer = Completion(np.array([5]), np.zeros(1, np.float32), np.zeros(1, int), "length")
    sampled = Rollouts([prompt], [Episode.of(prompt.tokens, answer)], ["3"])
    with ThreadPoolExecutor(1) as executor:
        stages = Stages(
            rollout=Mock(),
            scoring=ScoringStage(
                start=partial(submit_scores, executor, score),
                keep=None,
                lay_out=lambda rollouts: lay_out(rollouts, samples=1, max_tokens=8),
                add_scores=with_scores,
                add_penalty=unchanged,
                add_greedy_scores=without_greedy_scores,
                score_validation=score,
                in_background=True,
            ),
            models=ModelsStage(
                roles=(),
                passes=(reference_pass(reference),),
                warmup_steps=0,
                check_canaries=Mock(),
            ),
            algorithm=Mock(),
            run=Mock(),
        )
        waiting = stages.scoring.start(sampled, Clock())
        collected = Collected(sampled, waiting.result, {})
        batch, scores, _ = make_experience(stages, {}, collected, 1, Clock())
    assert batch["scores"].tolist() == [0.5] and scores == [Score(0.5, {}, None)]
    assert "ref_logprobs" in batch.fields


@pytest.mark.parametrize(
    ("echo", "told"),
    [
        (Receipt(3, 17), None),
        (Receipt(3, 18), "echoed version 3 with checksum 18, expected version 3 with 17"),
        (Receipt(2, 17), "echoed version 2 with checksum 17, expected version 3"),
        (Receipt(3, None), None),  # it has compared by itself
        (Receipt(2, None), "echoed version 2 with checksum None, expected version 3"),
    ],
)
def test_what_the_engine_echoes_is_compared_with_what_was_sent(echo, told):
    engine, sums = Mock(spec=Engine), Mock(return_value=17)
    engine.load.return_value = echo
    stage = RolloutStage(
        engine=engine,
        tokenizer=Mock(),
        policy=Mock(),
        sample=Mock(),
        gather=Mock(),
        examine=Mock(),
        sample_greedy=Mock(),
        sample_validation=Mock(),
        sample_canaries=Mock(),
        merge_for_engine=Mock(),
        engine_checksum=sums,
        awake=Mock(),
    )
    if told is None:
        assert stage.sync_weights({}, 3) == {"perf/moved_gb": 0.0}
    else:
        with pytest.raises(EngineError, match=told):
            stage.sync_weights({}, 3)
    assert sums.called == (echo.checksum is not None)
