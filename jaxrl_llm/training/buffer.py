"""The buffer: which prompts are sampled, in their order, and which answers a step trains on.

A step trains on the next P groups in the order of the prompts, of those that the group filter
keeps. A group is begun while there are fewer than (K+1)·P that are not trained yet. So no token is
more than K updates old, no answer is dropped for its age or its length, and memory is bounded. K is
`rollout.staleness`; at K = 0 a step samples its own prompts, and nothing else.

In `take` the engine samples until the step's groups are whole. From `go_on` to `interrupt`, before
the next weights are pushed, an engine with devices of its own goes on with the others, while the
models are trained. What is in flight then is plain data: the engine is empty.

A sampling is a call of `Sampler.sample`, which asks the engine for plain answers by
`rollout.rollouts.sample_states`, and for episodes of several turns by the agents' sampler.
"""

import base64
import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import RewardConfig, RolloutConfig, ValidationConfig
from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt, load_prompts
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.models.lora import combine_params, merge_adapter, without_adapter
from jaxrl_llm.models.model import Model, base_model
from jaxrl_llm.models.parameters import compute_dtypes
from jaxrl_llm.models.quantization import quantize_params
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import ModelScores, make_scoring
from jaxrl_llm.rollout.agents.sampler import EpisodeSampler
from jaxrl_llm.rollout.engine import (
    NOT_DRAWN,
    Completion,
    Engine,
    EngineError,
    SamplingParams,
    Stop,
)
from jaxrl_llm.rollout.rollouts import (
    EpisodeState,
    OnEnd,
    Rollouts,
    answer_seeds,
    as_rollouts,
    begin_episodes,
    lay_out,
    sample_states,
    turn_seed,
)
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.checksum import checksum, checksum_of_leaves
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.reshard import cast_tree, on_device
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.experience import (
    ScoreError,
    add_to_scores,
    per_answer,
    scoring_counts,
    with_scores,
    without_rows,
)
from jaxrl_llm.training.forward import has_chains
from jaxrl_llm.training.load_model import LoadedModel
from jaxrl_llm.training.loop import Metrics, open_executor
from jaxrl_llm.training.run_files import journal_path
from jaxrl_llm.training.update import TrainingError
from jaxrl_llm.types import Batch

log = logging.getLogger(__name__)

TRAINING, VALIDATION, GREEDY, CANARY = range(4)
"""The use of sampled answers, as a part of their seeds."""

CANARIES, CANARY_TOKENS = 8, 8
"""Answers, and tokens of each, by which the engine's weights are checked where a step has none."""


class Sampler:
    """Samples answers from the run's engine: plain ones, or episodes of several turns.

    Args:
        rollout: how the run samples.
        engine: holds the policy.
        tokens: the policy's tokenizer and stop tokens.
        weights: how the engine gets the policy's.
        seed: of the run.
        folder: of the run.
        episodes: samples episodes of several turns; None: answers are plain.
        overlaps_training: whether the engine may sample while the models are trained, as its
            devices are not theirs. It keeps its cache then.

    Attributes:
        keeps_cache: whether answers that go on after a push keep their keys and values.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        engine: Engine,
        tokens: PolicyTokens,
        weights: "PolicyWeights",
        *,
        seed: int,
        folder: Path,
        episodes: EpisodeSampler | None = None,
        overlaps_training: bool = False,
    ) -> None:
        """Sample nothing yet."""
        self.engine, self.tokens, self.episodes = engine, tokens, episodes
        self.overlaps_training = overlaps_training
        self.keeps_cache = rollout.at_push == "keep"
        self._rollout, self._seed = rollout, seed
        self._decode = text_decoder(tokens.tokenizer)
        self.weights, self._folder = weights, folder

    @activity("syncing weights")
    def sync(self, params: Any, version: int) -> dict[str, float]:
        """Give the engine the trained parameters, and compare its echo with what was sent.

        Raises:
            EngineError: it does not hold them.
        """
        with on_device(params) as trained:
            merged = self.weights.merged(trained)
            options = {"keep": True} if self.keeps_cache else {}
            receipt = self.engine.load(merged, version=version, **options)
            echoed = receipt.checksum  # None: the engine has compared by itself
            sent = None if echoed is None else int(self.weights.checksum(merged))
        if (receipt.version, echoed) != (version, sent):
            raise EngineError(
                f"the engine echoed version {receipt.version} with checksum {echoed}, expected "
                f"version {version} with {sent}: it does not hold the weights that were sent"
            )
        return {"perf/moved_gb": receipt.moved_bytes / 2**30}

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the engine have its cache."""
        if self.overlaps_training:
            yield
            return
        self.engine.wake()
        try:
            yield
        finally:
            self.engine.sleep()

    def sample(
        self,
        states: Sequence[EpisodeState],
        needed: int | None = None,
        stop: Stop | None = None,
        on_end: OnEnd | None = None,
        *,
        sampling: SamplingParams | None = None,
    ) -> None:
        """Sample answers, or go on with them.

        Args:
            states: of the answers.
            needed: it ends when so many of the first ones are whole; None: all.
            stop: ends it, too.
            on_end: is called with each answer that has ended.
            sampling: how to sample; None: as answers to train on.
        """
        rollout = self._rollout
        sampling = sampling or SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_ids=self.tokens.stops,
        )
        until: Any = {"needed": needed, "stop": stop, "on_end": on_end}
        with self.awake():
            if self.episodes is None:
                sample_states(self.engine, states, sampling, **until)
            else:
                journal = functools.partial(journal_path, self._folder)
                self.episodes.sample_states(self.engine, states, sampling, **until, journal=journal)

    def gather(self, states: Sequence[EpisodeState]) -> Rollouts:
        """Return answers that are whole."""
        if self.episodes is None:
            return as_rollouts(states, decode=self._decode)
        return self.episodes.as_rollouts(states)

    def examine(self, rollouts: Rollouts) -> Rollouts:
        """Return a step's answers with metrics of how they were sampled.

        Raises:
            RunError: too many episodes are broken.
        """
        return rollouts if self.episodes is None else self.episodes.examine(rollouts)

    def sample_validation(
        self, prompts: Sequence[Prompt], step: int, validation: ValidationConfig
    ) -> Rollouts:
        """Sample answers to validation prompts."""
        sampling = SamplingParams(
            max_new_tokens=self._rollout.max_new_tokens,
            temperature=validation.temperature,
            top_p=validation.top_p,
            stop_ids=self.tokens.stops,
        )
        return self._answer(prompts, sampling, validation.samples, (step, VALIDATION))

    def sample_greedy(self, rollouts: Rollouts, step: int) -> Rollouts:
        """Sample a greedy answer to each prompt of a step's answers."""
        rollout = self._rollout
        sampling = SamplingParams(
            max_new_tokens=rollout.max_new_tokens, temperature=0.0, stop_ids=self.tokens.stops
        )
        prompts = rollouts.prompts[:: rollout.samples_per_prompt]
        return self._answer(prompts, sampling, 1, (step, GREEDY))

    def sample_canaries(self, rollouts: Rollouts, step: int) -> Rollouts:
        """Sample a few short plain answers to a step's prompts, to compare engine and trainer."""
        rollout = self._rollout
        prompts = rollouts.prompts[:: rollout.samples_per_prompt]
        sampling = SamplingParams(
            max_new_tokens=min(CANARY_TOKENS, rollout.max_new_tokens),
            temperature=rollout.temperature,
            stop_ids=self.tokens.stops,
        )
        states = begin_episodes(prompts[:CANARIES], 1, (self._seed, step, CANARY))
        with self.awake():
            sample_states(self.engine, states, sampling)
        return as_rollouts(states, decode=self._decode)

    def _answer(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        samples: int,
        seed: tuple[int, int],
    ) -> Rollouts:
        """Sample G answers to each prompt."""
        states = begin_episodes(prompts, samples, (self._seed, *seed))
        self.sample(states, sampling=sampling)
        return self.examine(self.gather(states))


def needs_canaries(rollouts: Rollouts, step: int, *, keeps_cache: bool) -> bool:
    """Return whether no answer of a step tells if the engine holds the newest weights.

    Args:
        rollouts: of the step.
        step: that trains on them.
        keeps_cache: whether answers keep keys and values of weights before; then only those tell it
            that were wholly drawn by the newest.
    """
    fresh = np.all if keeps_cache else np.any
    drawn = (e.versions[e.versions != NOT_DRAWN] for e in rollouts.episodes)
    return not any(len(versions) and fresh(versions == step - 1) for versions in drawn)


class PolicyWeights:
    """The policy's weights on their way from the trainer to the engine.

    Args:
        rollout: how the run samples.
        model: the policy, as it was loaded.
        layout: of training.
        dtype: of computing.

    Attributes:
        model: without an adapter.
        layout: of training.
        dtype: of computing.
        merged: trained parameters -> the model's, as the engine takes them.
        checksum: of the model's parameters, as the engine should hold them.
    """

    def __init__(
        self, rollout: RolloutConfig, model: LoadedModel, layout: Layout, dtype: str
    ) -> None:
        """Prepare the merging of an adapter, and the checksum."""
        self.model, self.layout = base_model(model.model), layout
        self.dtype = dtype
        self.merged = merge_for_engine(model, self.dtype)
        # vLLM quantizes what its host was sent, of which the checksum is
        quantized = rollout.engine == "native" and rollout.quantization == "fp8"
        self.checksum = engine_checksum(self.model, self.dtype, quantized=quantized)


def merge_for_engine(model: LoadedModel, dtype: str) -> Callable[[Any], Any]:
    """Return the function from trained parameters to those of the model, as the engine takes them.

    An adapter is merged into its base in float32, and the sum is cast to the engine's dtype. A
    frozen vision tower is put back.
    """
    if model.tower is not None:
        tower, merge_rest = model.tower.params, merge_for_engine(model._replace(tower=None), dtype)
        return lambda params: {**merge_rest(params), "vision": tower}
    if model.frozen is None:
        return lambda params: params
    spec, frozen = model.spec, model.frozen
    dtypes = compute_dtypes(without_adapter(spec), dtype)
    layout = jax.tree.map(lambda leaf: leaf.sharding, frozen)

    @functools.partial(jax.jit, out_shardings=layout)
    def merged(adapter: Any, frozen: Any) -> Any:
        return cast_tree(merge_adapter(combine_params(adapter, frozen), spec)[0], dtypes)

    return lambda adapter: merged(adapter, frozen)


def engine_checksum(model: Model, dtype: str, *, quantized: bool) -> Callable[[Any], Any]:
    """Return the checksum of a model's parameters as the engine casts or quantizes them."""
    dtypes = model.compute_dtypes(dtype)
    declared = model.declare_quantized() if quantized else model.declare()
    if not quantized and all(dtype == jnp.float32 for dtype in jax.tree.leaves(dtypes)):
        return checksum_of_leaves  # the masters are what it holds

    def engines_checksum(params: Any) -> Any:
        return checksum(quantize_params(cast_tree(params, dtypes), declared, dtypes))

    return jax.jit(engines_checksum)


class Scorer:
    """Scores answers, and lays them out as a batch with their scores.

    Args:
        config: of the run.
        functions: that it names.
        by_model: answers' scores by a reward model; None: functions score them.
        stack: ends the scoring processes at the run's end.

    Attributes:
        score: rollouts -> one score for each answer; waits for them.
        score_validation: the same for answers to validation prompts.
        in_background: whether answers are scored elsewhere than on the devices.
    """

    def __init__(
        self,
        config: TrainConfig,
        functions: AlgorithmFunctions,
        by_model: Callable[[Rollouts], ModelScores] | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Start the reward functions."""
        reward, folder = config.reward, Path(config.run_dir)
        self.score, self.score_validation = make_scoring(reward, by_model, stack, folder)
        # elsewhere than on the devices, and not together with other processes
        self.in_background = (
            by_model is None and reward.workers > 0 and distributed.process_count() == 1
        )
        self._executor = open_executor(1, "scoring", stack)
        self._config, self._samples = config, config.rollout.samples_per_prompt
        self._compares = "group_ids" in functions.needs
        self._one_chain_only = refused_with_chains(functions, reward)
        self._has_warned = False
        self._penalty = functions.penalty and per_answer(
            functions.penalty, "algorithm.penalty", np.floating
        )
        self._keep = functions.group_filter and whole_groups(
            per_answer(functions.group_filter, "algorithm.group_filter", np.bool_), self._samples
        )

    @property
    def filters_groups(self) -> bool:
        """Whether a group filter refuses some groups."""
        return self._keep is not None

    def start(self, rollouts: Rollouts, clock: Clock) -> Future[list[Score]]:
        """Return the scores of answers, as soon as they are known."""
        if self.in_background:
            return self._executor.submit(self.score, rollouts)
        future: Future[list[Score]] = Future()
        with clock("reward"):
            future.set_result(self.score(rollouts))
        return future

    def keep_groups(self, rollouts: Rollouts, scores: list[Score]) -> list[bool]:
        """Return which groups the group filter keeps [P].

        It sees as many groups as a step has: where there are fewer, the first one fills the places,
        or other numbers would compile it again.
        """
        assert self._keep is not None
        samples = self._samples
        groups, filling = len(scores) // samples, list(range(samples))
        rows = list(range(len(scores))) + filling * (self._config.batch.prompts_per_step - groups)
        some = [scores[row] for row in rows]
        batch = self.add_scores(self.lay_out(rollouts.take(rows)), some)
        return np.any(self._keep(batch).reshape(-1, samples), axis=1).tolist()[:groups]

    def lay_out(self, rollouts: Rollouts, *, samples: int | None = None) -> Batch:
        """Lay answers out as a batch.

        Args:
            rollouts: the answers.
            samples: to each prompt; None: as many as the run has.

        Raises:
            ScoreError: an episode has several chains, which the algorithm is not defined for.
        """
        samples = samples or self._samples
        batch = lay_out(
            rollouts,
            samples=samples,
            max_tokens=self._config.longest_sequence,
            compares=self._compares,
        )
        return check_chains(batch, self._one_chain_only)

    def add_scores(
        self, batch: Batch, scores: Sequence[Score], *, samples: int | None = None
    ) -> Batch:
        """Add the scores of a batch's answers; see `with_scores`."""
        samples = samples or self._samples
        self._warn_of_rounding(scores, samples)
        return with_scores(
            batch,
            scores,
            samples=samples,
            compares=self._compares,
            components=self._config.reward.components,
        )

    def add_penalty(self, batch: Batch) -> Batch:
        """Add the penalty to a batch's scores, if there is one."""
        return add_to_scores(batch, self._penalty(batch)) if self._penalty else batch

    def add_greedy_scores(self, batch: Batch, greedy: Rollouts) -> tuple[Batch, dict[str, float]]:
        """Add `greedy_scores`, of a greedy answer to each prompt; return metrics, too.

        Answers whose greedy one has no score are not usable.
        """
        scores = self.score(greedy)
        scored = self.add_scores(self.lay_out(greedy, samples=1), scores, samples=1)
        added = self._penalty(scored) if self._penalty else np.float32(0)
        metrics = {
            "reward/greedy_errors": float(sum(score.has_failed for score in scores)),
            "reward/greedy_unscored": float(sum(score.is_unscored for score in scores)),
        }
        greedy_scores = np.repeat(scored["scores"] + added, self._samples)
        batch = without_rows(batch, np.repeat(~scored["usable"], self._samples))
        return batch.add(greedy_scores=greedy_scores), metrics

    def _warn_of_rounding(self, scores: Sequence[Score], samples: int) -> None:
        """Warn, once, of scores of one prompt that are equal in float32 alone.

        What differs by float64's rounding, as 0.3 and 0.1 + 0.2, is equal.
        """
        if self._has_warned or (pair := lost_in_rounding(scores, samples)) is None:
            return
        self._has_warned = True
        log.warning(
            "reward.function gave answers to one prompt the scores %r and %r, which are equal "
            "in float32, in which advantages are computed: let it return smaller numbers, less "
            "a constant or divided by one",
            *pair,
        )


def lost_in_rounding(scores: Sequence[Score], samples: int) -> tuple[float, float] | None:
    """Return two scores of one prompt that differ, but not in float32; None: there are none.

    >>> lost_in_rounding([Score(s, {}, None) for s in (1e9, 1e9 + 1)], 2)
    (1000000000.0, 1000000001.0)
    """
    ordered = np.sort(np.array([score.score for score in scores]).reshape(-1, samples))
    low, high = ordered[:, :-1], ordered[:, 1:]
    differ = high - low > 1e-12 * np.abs(high)
    lost = np.argwhere(differ & (low.astype(np.float32) == high.astype(np.float32)))
    return (float(low[tuple(lost[0])]), float(high[tuple(lost[0])])) if lost.size else None


def refused_with_chains(functions: AlgorithmFunctions, reward: RewardConfig) -> list[str]:
    """Return the keys of a config that compare whole answers, and take no several chains."""
    keys = {
        "algorithm.pairs": functions.pairs is not None,
        "algorithm.distillation": functions.distillation is not None,
        "teacher": functions.needs_teacher,
        "implicit_reward_model": "implicit_reward_model" in functions.updates,
        "reward.step_rewards": reward.step_rewards,
    }
    return [key for key, is_set in keys.items() if is_set]


def check_chains(batch: Batch, refused: Sequence[str]) -> Batch:
    """Return a batch that has no episode of several chains, or has them where that is defined.

    Args:
        batch: of a step.
        refused: as `refused_with_chains` returns them.

    Raises:
        ScoreError: it has some beside one of the keys.
    """
    if refused and has_chains(batch):
        several = int((batch["chain_ids"].max(1) > 0).sum())
        raise ScoreError(
            f"{refused[0]} is set, and the agent has begun other chains (chat.new) in {several} of "
            f"{len(batch.tokens)} episodes, which it is not defined for: remove {refused[0]}, or "
            "use an agent that keeps one history"
        )
    return batch


def whole_groups(
    keep: Callable[[Batch], np.ndarray], samples: int
) -> Callable[[Batch], np.ndarray]:
    """Return `keep`, checked to decide for groups of `samples` answers as wholes.

    Answers that are not usable go with those of their group that are; a group has to have some.
    """

    def checked(batch: Batch) -> np.ndarray:
        usable = batch["usable"].reshape(-1, samples)
        groups = keep(batch).reshape(-1, samples) & usable
        split = np.flatnonzero(groups.any(1) & (groups != usable).any(1))
        if split.size:
            raise ScoreError(
                f"algorithm.group_filter kept {int(groups[split[0]].sum())} of the {samples} "
                "answers of a group; expected all or none, as baselines are over whole groups"
            )
        return np.repeat(groups.any(1), samples)

    return checked


WHOLE = -1
"""Stands for the tokens of an answer that is whole."""

TRAINERS, OWN, NODES = "on the trainer's devices", "on devices of its own", "on nodes"
"""Where an engine is. One on nodes draws what its messages leave it time for."""

FILE = "schedule.jsonl"
"""A run's own schedule, in its folder."""

StartScoring = Callable[[Rollouts, Clock], Future[list[Score]]]


@dataclass(eq=False)
class Group:
    """The answers to one prompt, from their beginning to the step that trains on them.

    Attributes:
        ordinal: of the group, from 0, in the order of the prompts.
        states: of the answers [G].
        scores: of the answers; None until all are whole.
        kept: whether the group filter has kept it.
    """

    ordinal: int
    states: list[EpisodeState]
    scores: Future[list[Score]] | None = None
    kept: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether all its answers have ended."""
        return all(state.episode is not None for state in self.states)

    def result(self) -> list[Score]:
        """Wait for its scores."""
        assert self.scores is not None  # of a group that is whole
        return self.scores.result()


def states_of(groups: Sequence[Group]) -> list[EpisodeState]:
    """Return the answers of groups."""
    return [state for group in groups for state in group.states]


def scores_of(groups: Sequence[Group]) -> list[Score]:
    """Wait for the scores of groups."""
    return [score for group in groups for score in group.result()]


class GroupScores:
    """Scores groups that are whole: those that come while others are scored, together after them.

    Args:
        start: (rollouts, clock) -> their scores, as soon as they are known.
        gather: states that are whole -> answers.
    """

    def __init__(
        self, start: StartScoring, gather: Callable[[Sequence[EpisodeState]], Rollouts]
    ) -> None:
        """Score nothing yet."""
        self._start, self._gather = start, gather
        self._waiting: list[Group] = []
        self._is_busy, self._lock = False, threading.Lock()

    def add(self, groups: Sequence[Group], clock: Clock) -> None:
        """Score those of some groups that are whole, and have no scores yet; from any thread."""
        with self._lock:
            new = [group for group in groups if group.scores is None and group.is_whole]
            for group in new:
                group.scores = Future()
            self._waiting += new
        self._begin(clock)

    def _begin(self, clock: Clock) -> None:
        with self._lock:
            if self._is_busy or not self._waiting:
                return
            groups, self._waiting, self._is_busy = self._waiting, [], True
        states = states_of(groups)
        try:
            scores = self._start(self._gather(states), clock)
        except BaseException as error:
            scores = Future[list[Score]]()
            scores.set_exception(error)
        scores.add_done_callback(lambda done: self._give(groups, done, clock))

    def _give(self, groups: Sequence[Group], done: Future[list[Score]], clock: Clock) -> None:
        """Give groups their scores, and go on with those that came meanwhile."""
        first = 0
        for group in groups:
            assert group.scores is not None  # `add` makes it
            if done.cancelled():
                group.scores.cancel()
            elif error := done.exception():
                group.scores.set_exception(error)
            else:
                group.scores.set_result(done.result()[first : first + len(group.states)])
            first += len(group.states)
        with self._lock:
            self._is_busy = False
        self._begin(clock)


# A run's schedule: how far each answer in flight had come when new weights were pushed.


class Row(NamedTuple):
    """Where the answers stood at a push.

    Attributes:
        step: whose update made the weights.
        engine: `TRAINERS` or `OWN` devices, or `NODES`.
        turns: that it took while the step was trained, on devices of its own.
        slots: sequences that it ran at once.
        drawn: tokens of each answer of each group that is begun and not trained, by the group's
            ordinal; `WHOLE` where it is whole.
    """

    step: int
    engine: str
    turns: int
    slots: int
    drawn: Mapping[int, list[int]]

    def as_json(self) -> str:
        """Return a line of the file."""
        return json.dumps(self._asdict(), separators=(",", ":"))

    @classmethod
    def of_json(cls, line: str) -> "Row":
        """Read a line of the file."""
        row = json.loads(line)
        return cls(**{**row, "drawn": {int(k): drawn for k, drawn in row["drawn"].items()}})


class Schedule:
    """Writes the schedule of a run, and gives the rows that it has to follow.

    Args:
        folder: of the run; None: nothing is written.
        slots: sequences that the engine runs at once.
        done: steps that the run has taken; rows after them are of a run that was killed.
        replayed: file of the schedule to follow at every step; None: follow what was killed.
        repeats: whether the engine draws the same tokens again. If not, nothing is followed.

    Raises:
        ConfigError: `replayed` can't be read.

    Attributes:
        slots: sequences that the engine runs at once.
        replays: whether a schedule is replayed.
    """

    def __init__(
        self, folder: Path | None, *, slots: int, done: int, replayed: str | None, repeats: bool
    ) -> None:
        """Drop the rows after the steps that are done from the file."""
        self.slots, self.replays = slots, replayed is not None
        self._path = folder and folder / FILE
        rows = _read(self._path) if self._path is not None and self._path.exists() else {}
        if replayed is not None:
            self._followed = _read(Path(replayed), key="rollout.schedule: ")
        else:  # at no step done, the rows are of a run that was begun with another config, maybe
            later = {step: row for step, row in rows.items() if step > done}
            self._followed = later if done and repeats else {}
        if self._path is not None:
            kept = "".join(f"{row.as_json()}\n" for step, row in rows.items() if step <= done)
            new = self._path.with_suffix(".new")
            new.write_text(kept)
            new.replace(self._path)

    def row(self, step: int) -> Row | None:
        """Return the row that a step has to follow; None: it is free.

        Raises:
            TrainingError: the schedule that is replayed has none.
        """
        row = self._followed.get(step)
        if row is None and self.replays:
            raise TrainingError(
                f"rollout.schedule has no row of step {step}, expected one: its last is of step "
                f"{max(self._followed, default=0)}"
            )
        return row

    def record(self, row: Row) -> None:
        """Write a row, which is on disk then.

        Raises:
            TrainingError: the step has not come to the row that is replayed.
        """
        followed = self._followed.get(row.step)
        if followed is not None and followed.drawn != row.drawn and not self.replays:
            log.warning("the config has changed: the run goes on otherwise than it was killed")
            self._followed = {}
        elif followed is not None and followed.drawn != row.drawn:
            number = next(
                n
                for n in sorted({*row.drawn, *followed.drawn})
                if row.drawn.get(n) != followed.drawn.get(n)
            )
            raise TrainingError(
                f"step {row.step} does not follow the schedule: the answers of group {number} have "
                f"{row.drawn.get(number)} tokens, expected {followed.drawn.get(number)}. It was "
                "recorded with another config, data, model or version"
            )
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{row.as_json()}\n")
                file.flush()
                os.fsync(file.fileno())


def open_schedule(config: RolloutConfig, folder: Path, done: int) -> Schedule:
    """Return the schedule of a run.

    Args:
        config: how it samples.
        folder: of the run.
        done: steps that it has taken.

    Raises:
        ConfigError: the schedule to replay can't be read.
    """
    # of several processes, which take the same turns by themselves, only the first has the rows
    repeats = config.engine == "native" and config.at_push != "keep"
    repeats &= distributed.process_count() == 1
    repeats &= config.order == "lockstep" or not config.has_episodes
    return Schedule(
        folder if config.staleness and distributed.is_first() else None,
        slots=config.max_running_sequences,
        done=done,
        replayed=config.schedule,
        repeats=repeats,
    )


def _read(path: Path, *, key: str = "") -> dict[int, Row]:
    """Read the rows of a file, by step; the last line may have been cut off by the run's end.

    A message begins with the key that has named it.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        lines = path.read_text().splitlines(keepends=True)
        rows: list[Any] = [Row.of_json(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{key}{path} is no schedule of a run ({FILE}): {error}") from error
    return {row.step: row for row in rows}


# The buffer.


class Buffer:
    """The prompts and answers of a run that are not trained yet.

    Args:
        config: of the run.
        total_steps: after which no group is trained.
        sampler: samples answers.
        scorer: scores them, and says which groups are kept.
        prompt_batches: iterator over lists of P prompts, with `get_state`.
        prompts: all prompts, in the order of the data.
        schedule: of the run.
        executor: two threads: for sampling while a step is trained, and for groups that end.
    """

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        sampler: Sampler,
        scorer: Scorer,
        *,
        prompt_batches: Any,
        prompts: list[Prompt],
        schedule: Schedule,
        executor: Executor,
    ) -> None:
        """Begin no group yet."""
        self.config, self.total_steps, self.sampler = config, total_steps, sampler
        self.scorer, self.prompt_batches, self.prompts = scorer, prompt_batches, prompts
        self.schedule, self.executor = schedule, executor
        self._scores = GroupScores(scorer.start, sampler.gather)
        self._groups, self._upcoming, self._ordinal = list[Group](), list[Prompt](), 0
        self._overlapped: tuple[Future[float], Stop | None] | None = None
        """A sampling that goes on while the models are trained: when it has ended, and what ends it
        before all answers are whole."""

    def take(self, step: int, clock: Clock) -> tuple[list[Group], Metrics]:
        """Sample until the step's groups are whole, and begin to score what is.

        Args:
            step: that trains on them.
            clock: of the step.

        Returns:
            The groups, and metrics of those that the group filter refused.

        Raises:
            TrainingError: the group filter refused too many groups, or the schedule that is
                replayed has no such step.
        """
        size = self.config.batch.prompts_per_step
        ahead = min(self.config.rollout.staleness, self.total_steps - step)
        dropped: list[Group] = []
        row = self.schedule.row(step)
        while True:
            self._begin_groups((ahead + 1) * size)
            by_length = self._follows_lengths(row)
            self._set_limits(size, row if by_length else None)
            self._sample(size, clock, all_ends=by_length)
            if not self.scorer.filters_groups or self._filter(step, size, dropped, clock):
                break
        taken, self._groups = self._groups[:size], self._groups[size:]
        metrics = Metrics()
        if self.scorer.filters_groups:
            metrics["batch/generation_batches"] = 1 + len(dropped) / len(taken)
            metrics["batch/dropped_groups"] = float(len(dropped))
            metrics |= scoring_counts(scores_of(taken) + scores_of(dropped))
        return taken, metrics

    def go_on(self, step: int) -> None:
        """Let an engine with devices of its own go on while a step is trained."""
        row = self.schedule.row(step)
        states = [state for state in states_of(self._groups) if state.episode is None]
        if not self.sampler.overlaps_training or not states or self._follows_lengths(row):
            return
        rollout, stop = self.config.rollout, None
        if rollout.at_push != "finish":
            stop = Stop(rollout.turns if row is None else row.turns)

        def sample() -> float:
            self.sampler.sample(states, len(states), stop, self._score_soon())
            return time.monotonic()

        self._overlapped = self.executor.submit(sample), stop

    def interrupt(self, step: int, clock: Clock) -> Metrics:
        """Leave what is in flight, and write down how far it has come.

        Args:
            step: whose weights are pushed next.
            clock: of the step.

        Raises:
            TrainingError: it has not come as far as in the schedule that is replayed.
        """
        if not self.config.rollout.staleness:
            return {}
        metrics, turns = {}, 0
        if self._overlapped is not None:
            (ended, stop), self._overlapped, begun = self._overlapped, None, time.monotonic()
            if stop is not None and stop.turns is None:
                stop.set()
            idle = begun - ended.result()
            metrics["timing_s/pause"] = time.monotonic() - begun
            metrics["timing_s/engine_idle"] = max(0.0, idle)
            if self._engine == OWN:
                turns = 0 if stop is None else stop.taken
                metrics["async/turns"] = float(turns)
            self._scores.add(self._groups, clock)
        drawn = {
            group.ordinal: [WHOLE if s.episode is not None else s.drawn for s in group.states]
            for group in self._groups
        }
        self.schedule.record(Row(step, self._engine, turns, self.schedule.slots, drawn))
        waiting = states_of(self._groups)
        open_ones = [state for state in waiting if state.episode is None]
        return metrics | {
            "async/ready_answers": float(len(waiting) - len(open_ones)),
            "async/in_flight_answers": float(len(open_ones)),
            "async/in_flight_tokens": float(sum(state.drawn for state in open_ones)),
        }

    def get_state(self) -> dict[str, Any]:
        """Return what is not trained yet, besides the data's position, as JSON can hold it."""
        return {
            "upcoming": [prompt.index for prompt in self._upcoming],
            "ordinal": self._ordinal,
            "groups": [
                {
                    "ordinal": group.ordinal,
                    "prompt": group.states[0].prompt.index,
                    "turns": [[packed_completion(turn) for turn in s.turns] for s in group.states],
                    "seeds": [s.seeds for s in group.states],
                }
                for group in self._groups
            ],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_state` has returned.

        Answers that were whole are scored again.
        """
        by_index = {prompt.index: prompt for prompt in self.prompts}
        self._upcoming = [by_index[index] for index in state["upcoming"]]
        self._ordinal, self._groups = state["ordinal"], []
        for group in state["groups"]:
            begun = self._new_group(group["ordinal"], by_index[group["prompt"]])
            for episode, turns in zip(begun.states, group["turns"], strict=True):
                episode.turns = [unpacked_completion(turn) for turn in turns]
            for number, episode in enumerate(begun.states):
                own = [turn_seed(episode.seed, turn) for turn in range(len(episode.turns))]
                episode.seeds = group["seeds"][number] if "seeds" in group else own  # older states
            self._groups.append(begun)

    def _begin_groups(self, room: int) -> None:
        """Begin the next groups, until there are so many."""
        while len(self._groups) < room:
            if not self._upcoming:
                self._upcoming = load_prompts(next(self.prompt_batches))
            self._groups.append(self._new_group(self._ordinal, self._upcoming.pop(0)))
            self._ordinal += 1

    def _new_group(self, ordinal: int, prompt: Prompt) -> Group:
        """Return a group of which nothing is drawn; its seeds depend on its ordinal alone.

        Images and videos of the prompt are decoded.
        """
        prompt = prompt.loaded()
        samples, size = self.config.rollout.samples_per_prompt, self.config.batch.prompts_per_step
        batch, place = divmod(ordinal, size)
        draw = self.config.seed, batch + 1, TRAINING, 0
        first = place * samples
        seeds = answer_seeds(draw, first + samples)[first:]
        states = [EpisodeState(prompt, s, draw, first + i) for i, s in enumerate(seeds)]
        return Group(ordinal, states)

    def _sample(self, size: int, clock: Clock, *, all_ends: bool) -> None:
        """Sample until the first groups, or all, are whole; begin to score those that are."""
        states = states_of(self._groups)
        needed = sum(len(group.states) for group in self._groups[:size])
        finishes = self.config.rollout.at_push == "finish" and not self.sampler.overlaps_training
        if all_ends or finishes:
            needed = len(states)
        waited_for = states[:needed]
        describe = functools.partial(self._describe_wait, waited_for)
        with clock("gen"), activity("sampling", describe=describe):
            self.sampler.sample(states, needed, None, self._score_soon())
        self._scores.add(self._groups, clock)

    def _describe_wait(self, states: Sequence[EpisodeState]) -> str:
        """Return what a step waits for; how far answers have come is known where they end."""
        open_ones = [state for state in states if state.episode is None]
        prompts = sorted({state.prompt.index for state in open_ones})
        stats = self.sampler.engine.stats()
        engine = f"; the engine: {stats}" if stats is not None else ""
        return (
            f"{len(open_ones)} of {len(states)} answers to sample, to the prompts of rows "
            f"{', '.join(map(str, prompts[:8]))}{' …' if len(prompts) > 8 else ''}{engine}"
        )

    def _score_soon(self) -> Callable[[EpisodeState], None] | None:
        """Return what is told of each answer that ends, to score groups before the sampling ends.

        The synchronous loop scores all answers of a step together.
        """
        if not self.config.rollout.staleness or not self.scorer.in_background:
            return None
        groups = {state: group for group in self._groups for state in group.states}

        def tell(state: EpisodeState) -> None:
            if groups[state].is_whole:
                self.executor.submit(self._scores.add, [groups[state]], Clock())

        return tell

    def _set_limits(self, size: int, row: Row | None) -> None:
        """Let answers that the step does not need come as far as a row says; None: no limits."""
        for place, group in enumerate(self._groups):
            limits: list[int] = [WHOLE] * len(group.states)
            if row is not None and place >= size:
                limits = row.drawn.get(group.ordinal, [])
            if len(limits) != len(group.states):  # not in the row, or of a schedule that is refused
                limits = [0] * len(group.states)
            for state, limit in zip(group.states, limits, strict=True):
                state.limit = None if limit == WHOLE else limit

    def _follows_lengths(self, row: Row | None) -> bool:
        """Return whether answers need limits to come as far as a row says; not without one.

        The engine that has written it comes as far by itself, in as many turns.

        Raises:
            TrainingError: episodes of several turns, which have no limits, are to be replayed.
        """
        if row is None:
            return False
        if (row.engine, row.slots) == (self._engine, self.schedule.slots) and row.engine != NODES:
            return False
        if self.sampler.episodes is not None and self.schedule.replays:
            raise TrainingError(
                f"the schedule was recorded with rollout.max_running_sequences={row.slots} and an "
                f"engine {row.engine}, here are {self.schedule.slots} and one {self._engine}: "
                "expected the same, as the run has episodes of several turns, and not on nodes"
            )
        return self.sampler.episodes is None

    @property
    def _engine(self) -> str:
        if self.config.rollout.nodes:
            return NODES
        return OWN if self.sampler.overlaps_training else TRAINERS

    def _filter(self, step: int, size: int, dropped: list[Group], clock: Clock) -> bool:
        """Drop the groups that the filter refuses; return whether the step has all that it needs.

        Raises:
            TrainingError: too many are refused.
            RunError: too many of the episodes are broken, those that are refused included.
        """
        undecided = [group for group in self._groups[:size] if not group.kept]
        with clock("reward"):
            scores = scores_of(undecided)
        rollouts = self.sampler.gather(states_of(undecided))
        kept = self.scorer.keep_groups(rollouts, scores)
        for group, is_kept in zip(undecided, kept, strict=True):
            group.kept = is_kept
        refused = [group for group in undecided if not group.kept]
        self._groups = [group for group in self._groups if group not in refused]
        dropped += refused
        kept_groups = [group for group in self._groups if group.kept]
        if self.sampler.episodes is not None:  # or what failed by itself would seem too hard
            states = states_of(dropped + kept_groups)
            self.sampler.episodes.check_broken([s.episode for s in states if s.episode is not None])
        limit = self.config.algorithm.max_generation_batches
        if (count := len(dropped)) > (limit - 1) * size:
            unscored = sum(score.is_unscored for score in scores_of(dropped))
            other = f" {unscored} of the dropped answers are unscored." if unscored else ""
            raise TrainingError(
                f"step {step}: algorithm.group_filter kept {len(kept_groups)} of "
                f"{len(kept_groups) + count} groups, expected {size} of at most {size * limit}: "
                f"the prompts are too easy or too hard for the policy.{other} Raise "
                "algorithm.max_generation_batches and run the same command again, or begin a run "
                "with other prompts or more answers to each"
            )
        return not refused


# Completions as JSON can hold them, bit for bit.


def packed_completion(completion: Completion) -> dict[str, Any]:
    """Return a completion without its likeliest tokens as JSON can hold it."""

    def packed(array: np.ndarray, dtype: str) -> str:
        return base64.b64encode(np.asarray(array, dtype).tobytes()).decode()

    routes = {}
    if completion.routes is not None:
        dtype = completion.routes.dtype.newbyteorder("<").str
        data = packed(completion.routes, dtype)
        routes["routes"] = {"shape": completion.routes.shape, "dtype": dtype, "data": data}
    return routes | {
        "tokens": packed(completion.tokens, "<i4"),
        "logprobs": packed(completion.logprobs, "<f4"),
        "versions": packed(completion.versions, "<i4"),
        "finish": completion.finish,
        "stopped_by": completion.stopped_by,
    }


def unpacked_completion(packed: dict[str, Any]) -> Completion:
    """Return what `packed_completion` has packed."""

    def array(name: str, dtype: str) -> np.ndarray:
        return np.frombuffer(base64.b64decode(packed[name]), dtype)

    routes = packed.get("routes")
    if routes is not None:
        flat = np.frombuffer(base64.b64decode(routes["data"]), routes["dtype"])
        routes = flat.reshape(routes["shape"])
    return Completion(
        array("tokens", "<i4"),
        array("logprobs", "<f4"),
        array("versions", "<i4"),
        packed["finish"],
        packed["stopped_by"],
        routes=routes,
    )
