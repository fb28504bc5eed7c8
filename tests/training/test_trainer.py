"""What a step does, in which order, and what the engine says of its weights."""

from pathlib import Path
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ValidationConfig
from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import Completion, Engine, EngineError, Receipt
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.runs.checkpoint import Saved
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.buffer import Buffer, Group, PolicyWeights, Sampler, Scorer
from jaxrl_llm.training.experience import with_ages, with_scores
from jaxrl_llm.training.loop import OpenFiles
from jaxrl_llm.training.roles import Models, Reference, Role
from jaxrl_llm.training.teachers import TeacherPrompts, Teachers
from jaxrl_llm.training.trainer import RLTrainer
from jaxrl_llm.training.update import Learner, TrainState
from jaxrl_llm.types import Batch

STATE = TrainState({}, (), jnp.int32(0), jnp.int32(0))
PROMPT = Prompt(0, (1, 2), "arithmetic", "3")


def config_of(**tree):
    base = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, **tree}
    return from_tree(TrainConfig, base)


def functions_of(**functions):
    """Return the functions of a config that names only those given."""
    names = ("kl", "advantage", "pairs", "answer_filter", "group_filter", "penalty")
    given = {
        **dict.fromkeys(names),
        **{
            "controller": Mock(),
            "corrections": (),
            "needs": frozenset(),
            "needs_teacher": False,
            "updates": {},
            "distillation": None,
            "on_policy": True,
            "probes_only": False,
        },
    }
    return Mock(spec=AlgorithmFunctions, **(given | functions))


def actor_of(*, infer=None, learner=None):
    return Role(
        name="actor",
        learner=learner or Mock(spec=Learner, shape=None),
        infer=infer or Mock(),
        learning_rate=lambda updates: 0.1,
        max_skipped=1,
    )


def trainer_of(
    config, *, actor=None, models=(), sampler=None, scorer=None, buffer=None, **functions
):
    """Return a trainer of which only what is given is real."""
    absent = dict.fromkeys(("tower", "reference", "teacher", "teacher_prompts"))
    roles = {"actor": actor or actor_of()}
    tokens = PolicyTokens(Mock(decode=lambda ids, **options: "x"), (0,))
    sampler = sampler or Mock(spec=Sampler, keeps_cache=False)
    sampler.tokens = tokens
    return RLTrainer(
        *(config, functions_of(**functions)),
        (Mock(spec=OpenFiles, total_steps=2), Saved(0, {"actor": STATE}, {})),
        models=Models(**{"roles": roles, **absent, **dict(models)}),
        sampler=sampler,
        scorer=scorer or Mock(spec=Scorer),
        buffer=buffer or Mock(spec=Buffer),
        validation_prompts=[],
    )


def drawn_token(version=0):
    return Completion(np.array([5]), np.zeros(1, np.float32), np.array([version]), "length")


def answered(version=0):
    """Return rollouts of two answers to a prompt, of one token each, drawn by these weights."""
    episode = Episode.of(PROMPT.tokens, drawn_token(version))
    return Rollouts([PROMPT] * 2, [episode] * 2, ["3", "4"])


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_step_goes_from_sampling_to_the_next_weights_in_this_order(
    is_stale, tmp_path, monkeypatch
):
    """The engine gets the weights that the update has made, of the advantages of the scores.

    Where no answer is of the newest weights, some are drawn that are, before the engine goes on.
    """
    calls, updated = Mock(), STATE._replace(updates=jnp.int32(1))
    scores, given = [Score(1.0, {}, None), Score(0.0, {}, None)], answered(7 * is_stale)
    group = Mock(spec=Group, states=[], result=calls.taken)
    calls.taken.return_value = scores
    learner = Mock(spec=Learner, shape=None, **{"update.return_value": (updated, {"skipped": 0})})
    attached = {
        "buffer": Mock(spec=Buffer),
        "reference": Mock(spec=Reference),
        "scorer": Mock(spec=Scorer),
        "learner": learner,
        "sampler": Mock(spec=Sampler, keeps_cache=False),
    }
    for name, part in attached.items():
        calls.attach_mock(part, name)
    calls.buffer.take.return_value = [group], {}
    calls.sampler.gather.return_value = calls.sampler.examine.return_value = given
    calls.buffer.interrupt.return_value = {}
    calls.scorer.lay_out.side_effect = lambda given: lay_out(given, samples=2, max_tokens=4)
    calls.scorer.add_scores.side_effect = lambda batch, given: with_scores(batch, given, samples=2)
    calls.scorer.add_penalty.side_effect = lambda batch: batch
    calls.reference.logprobs.return_value = np.zeros((2, 4), np.float32)
    calls.reference.is_due.return_value = False
    calls.advantages.side_effect = lambda batch: batch.add(advantages=batch["rewards"])
    calls.sampler.sync.return_value = {}
    monkeypatch.setattr("jaxrl_llm.training.trainer.batch_metrics", lambda *given: {})
    trainer = trainer_of(
        config_of(run_dir=str(tmp_path), rollout={"samples_per_prompt": 2}),
        actor=actor_of(learner=learner),
        models={"reference": calls.reference},
        **{name: attached[name] for name in ("buffer", "scorer", "sampler")},
    )
    trainer._add_advantages, trainer.check_canaries = calls.advantages, calls.check_canaries
    calls.check_canaries.return_value = {}
    trainer.step(Clock())
    trainer.close()
    step = trainer.finished
    assert [name for name, *_ in calls.mock_calls] == [
        "buffer.take",
        "sampler.gather",
        "sampler.examine",
        *["sampler.sample_canaries"] * is_stale,
        "buffer.go_on",
        "scorer.lay_out",
        *["check_canaries"] * is_stale,
        "reference.logprobs",
        "taken",
        "scorer.add_scores",
        "scorer.add_penalty",
        "advantages",
        "learner.update",
        "reference.is_due",
        "buffer.interrupt",
        "sampler.sync",
    ]
    assert step.number == 1 and step.scores == scores
    state, minibatch, _ = learner.update.call_args.args
    assert state == STATE and minibatch["advantages"].sum(1).tolist() == [1.0, 0.0]
    assert trainer.states == {"actor": updated}
    calls.sampler.sync.assert_called_once_with(updated.params, 1)


@pytest.mark.parametrize("prompted", [False, True])
def test_servers_are_asked_before_the_other_models_are_run(prompted):
    """Those that read other prompts wait for the scores, of which these may tell."""
    zeros, calls = np.zeros((2, 4), np.float32), Mock()
    attached = {"teacher": Mock(spec=Teachers), "reference": Mock(spec=Reference)}
    for name, part in attached.items():
        calls.attach_mock(part, name)
    calls.infer.return_value = {"logprobs": zeros, "entropy": zeros}
    calls.reference.logprobs.return_value = zeros
    calls.teacher.add_logprobs.side_effect = lambda batch, rollouts: (batch, {"told": 1.0})
    prompts = Mock(spec=TeacherPrompts) if prompted else None
    trainer = trainer_of(
        config_of(),
        actor=actor_of(infer=calls.infer),
        models={"teacher_prompts": prompts, **attached},
        on_policy=False,
    )
    batch = with_ages(lay_out(answered(), samples=2, max_tokens=4), 1)
    _, metrics = trainer.add_logprobs(batch, answered(), 1, Clock())
    run = ["infer", "reference.logprobs"]
    asked = run if prompted else ["teacher.begin", *run, "teacher.add_logprobs"]
    assert [name for name, *_ in calls.mock_calls] == asked
    assert ("told" in metrics) is not prompted


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
    trainer = trainer_of(config, actor=actor_of(infer=infer))
    batch, metrics = trainer.add_old_logprobs(batch, 1)
    np.testing.assert_array_equal(batch["old_logprobs"], np.ones((4, 8)))
    assert metrics["training/rollout_logprobs_diff_mean"] == 0
    if from_engine:
        assert widths == [2], "17 tokens hold two sequences of 8"
    else:
        assert widths == [4] and batch["sum_pi_squared"][0, 0] == 3
        assert "logprobs" not in batch.fields


def sampler_of(engine, weights=None):
    tokens = PolicyTokens(Mock(decode=lambda ids, **options: "x"), (0,))
    rest = {"seed": 0, "folder": Path("r")}
    return Sampler(config_of().rollout, engine, tokens, weights or Mock(), **rest)


def test_what_the_engine_echoes_is_compared_with_what_was_sent():
    for echo, is_right in (
        (Receipt(3, 17), True),
        (Receipt(3, 18), False),
        (Receipt(2, 17), False),
        (Receipt(3, None), True),  # it has compared by itself
        (Receipt(2, None), False),
    ):
        engine = Mock(spec=Engine, **{"load.return_value": echo})
        weights = Mock(spec=PolicyWeights, merged=Mock(), checksum=Mock(return_value=17))
        sampler = sampler_of(engine, weights)
        if is_right:
            assert sampler.sync({}, 3) == {"perf/moved_gb": 0.0}
        else:
            with pytest.raises(EngineError, match="version 3"):
                sampler.sync({}, 3)
        assert weights.checksum.called == (echo.checksum is not None)


def test_the_engine_holds_its_cache_only_while_it_samples():
    names = ["wake", "sample", "sleep"]
    engine = Mock(spec=Engine, **{"sample.return_value": [drawn_token()]})
    sampler_of(engine).sample_validation([PROMPT], 1, ValidationConfig())
    assert [name for name, *_ in engine.mock_calls] == names
    engine = Mock(spec=Engine, **{"sample.side_effect": RuntimeError("gone")})
    with pytest.raises(RuntimeError, match="gone"):
        sampler_of(engine).sample_canaries(Rollouts([PROMPT], [], []), 1)
    assert [name for name, *_ in engine.mock_calls] == names
