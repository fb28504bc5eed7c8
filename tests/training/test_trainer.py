"""What a step does beside the devices, and what the engine says of its weights."""

import threading
from unittest.mock import Mock

import numpy as np
import pytest

from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import Engine, EngineError
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.sampling import Rollouts, lay_out
from jaxrl_llm.rollout.types import Completion, Receipt
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.buffer import Buffer, Collected
from jaxrl_llm.training.loop import OpenFiles
from jaxrl_llm.training.roles import Models, Reference, Role
from jaxrl_llm.training.sampler import PolicyWeights, Sampler
from jaxrl_llm.training.scoring import Scorer
from jaxrl_llm.training.trainer import RLTrainer
from jaxrl_llm.training.update import TrainState
from jaxrl_llm.types import Batch

LIMIT = 10.0  # seconds


def config_of(**tree):
    base = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, **tree}
    return from_tree(TrainConfig, base)


def trainer_of(config, *, infer=None, reference=None, scorer=None, buffer=None, **functions):
    """Return a trainer of which only what is given is real."""
    given = {
        **dict.fromkeys(("kl", "advantage", "pairs", "answer_filter", "group_filter")),
        **{
            "controller": Mock(),
            "corrections": (),
            "needs": frozenset(),
            "on_policy": True,
            "probes_only": False,
        },
    }
    states = {"actor": TrainState({}, (), 0, 0)}
    files = Mock(spec=OpenFiles, step=0, total_steps=2, states=states, extra={})
    tokens = PolicyTokens(Mock(decode=lambda ids, **options: "x"), (0,))
    models = Models(
        roles={"actor": Mock(spec=Role, infer=infer)},
        tower=None,
        reference=reference,
        policy_teacher=None,
        teachers=None,
        teacher_prompts=None,
    )
    return RLTrainer(
        *(config, Mock(spec=AlgorithmFunctions, **(given | functions)), files),
        models=models,
        sampler=Mock(spec=Sampler, tokens=tokens, keeps_cache=False),
        scorer=scorer or Mock(spec=Scorer),
        buffer=buffer or Mock(spec=Buffer),
        validation_prompts=[],
    )


class ReachedError(Exception):
    """A step has come so far."""


def test_answers_are_scored_while_the_devices_compute(tmp_path):
    """Reward function and reference each wait until the other has begun."""
    scoring, computing = threading.Event(), threading.Event()

    def score(rollouts):
        scoring.set()
        assert computing.wait(LIMIT), "the reference waits for the scores"
        return [Score(0.5, {}, None)]

    def logprobs(states, batch):
        computing.set()
        assert scoring.wait(LIMIT), "nobody scores while the reference is computed"
        return np.zeros(batch.tokens.shape, np.float32)

    def add_scores(batch, scores):
        raise ReachedError(batch, scores)

    prompt = Prompt(0, (1, 2), "arithmetic", "3", {}, [])
    answer = Completion(np.array([5]), np.zeros(1, np.float32), np.zeros(1, int), "length")
    sampled = Rollouts([prompt], [Episode.of(prompt.tokens, answer)], ["3"])
    waiting = threading.Thread(target=lambda: scores.append(score(sampled)))
    scores = []
    scorer = Mock(
        spec=Scorer,
        lay_out=lambda rollouts: lay_out(rollouts, samples=1, max_tokens=8),
        add_scores=add_scores,
    )

    def take(step, clock):
        waiting.start()
        return Collected(sampled, lambda: waiting.join() or scores[0], {})

    trainer = trainer_of(
        config_of(run_dir=str(tmp_path)),
        reference=Mock(spec=Reference, logprobs=logprobs),
        scorer=scorer,
        buffer=Mock(spec=Buffer, take=take),
    )
    with pytest.raises(ReachedError) as reached:
        trainer.step(Clock())
    batch, given = reached.value.args
    assert given == [Score(0.5, {}, None)] and "ref_logprobs" in batch.fields


@pytest.mark.parametrize("from_engine", [False, True])
def test_with_the_engines_logprobs_the_policy_runs_over_the_first_sequences_only(from_engine):
    widths = []

    def infer(params, batch):
        widths.append(len(batch.sequence_lengths))
        zeros = np.zeros(batch.tokens.shape, np.float32)
        return {"logprobs": zeros + 1, "entropy": zeros + 2, "sum_pi_squared": zeros + 3}

    tokens = np.ones((4, 8), np.int32)
    fields = {"mask": tokens > 0, "rollout_logprobs": np.ones((4, 8), np.float32)}
    fields |= {name: np.zeros((4, 8), np.int32) for name in ("ages", "versions")}
    batch = Batch(tokens, np.full(4, 8, np.int32), fields)
    algorithm = {"use_rollout_logprobs": from_engine}
    lengths = {"data": {"train": "t", "max_prompt_tokens": 4}, "rollout": {"max_new_tokens": 4}}
    config = config_of(batch={"max_tokens_per_device": 17}, algorithm=algorithm, **lengths)
    trainer = trainer_of(config, infer=infer)
    batch, metrics = trainer.add_old_logprobs(batch, 1)
    np.testing.assert_array_equal(batch["old_logprobs"], np.ones((4, 8)))
    assert metrics["training/rollout_logprobs_diff_mean"] == 0
    if from_engine:
        assert widths == [2], "17 tokens hold two sequences of 8"
    else:
        assert widths == [4] and batch["sum_pi_squared"][0, 0] == 3
        assert "logprobs" not in batch.fields


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
    engine, weights = (
        Mock(spec=Engine),
        Mock(spec=PolicyWeights, merged=Mock(), checksum=Mock(return_value=17)),
    )
    engine.load.return_value = echo
    sampler = Sampler(config_of(), engine, PolicyTokens(Mock(), ()), weights)
    if told is None:
        assert sampler.sync({}, 3) == {"perf/moved_gb": 0.0}
    else:
        with pytest.raises(EngineError, match=told):
            sampler.sync({}, 3)
    assert weights.checksum.called == (echo.checksum is not None)
