"""The run's engine, and the answers that are sampled from it under the policy's newest weights."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config.sections import RolloutConfig, ValidationConfig
from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.models.lora import combine_params, merge_adapter, without_adapter
from jaxrl_llm.models.model import Model, base_model
from jaxrl_llm.models.parameters import compute_dtypes
from jaxrl_llm.models.quantization import quantize_params
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.agents.sampler import EpisodeSampler
from jaxrl_llm.rollout.engine import Engine, EngineError, SamplingParams, Stop
from jaxrl_llm.rollout.rollouts import (
    EpisodeState,
    OnEnd,
    Rollouts,
    as_rollouts,
    begin_episodes,
    sample_states,
)
from jaxrl_llm.sharding.checksum import checksum, checksum_of_leaves
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.offload import on_device
from jaxrl_llm.sharding.reshard import cast_tree
from jaxrl_llm.training.load_model import LoadedModel
from jaxrl_llm.training.run_files import Journals

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
        self.weights, self._journals = weights, Journals(folder)

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
        needed: int,
        stop: Stop | None,
        on_end: OnEnd | None,
    ) -> None:
        """Sample answers to train on, or go on with them.

        Args:
            states: of the answers.
            needed: it ends when so many of the first ones are whole.
            stop: ends it, too.
            on_end: is called with each answer that has ended.
        """
        rollout = self._rollout
        sampling = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_ids=self.tokens.stops,
        )
        self._run(states, sampling, needed, stop, on_end)

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

    def sample_canaries(self, prompts: Sequence[Prompt], step: int) -> Rollouts:
        """Sample a few short plain answers, to compare the engine with the trainer."""
        rollout = self._rollout
        sampling = SamplingParams(
            max_new_tokens=min(CANARY_TOKENS, rollout.max_new_tokens),
            temperature=rollout.temperature,
            stop_ids=self.tokens.stops,
        )
        states = begin_episodes(prompts[:CANARIES], 1, (self._seed, step, CANARY))
        with self.awake():
            sample_states(self.engine, states, sampling, needed=len(states))
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
        self._run(states, sampling, len(states), None, None)
        return self.examine(self.gather(states))

    def _run(
        self,
        states: Sequence[EpisodeState],
        sampling: SamplingParams,
        needed: int,
        stop: Stop | None,
        on_end: OnEnd | None,
    ) -> None:
        until: Any = {"needed": needed, "stop": stop, "on_end": on_end}
        with self.awake():
            if self.episodes is None:
                sample_states(self.engine, states, sampling, **until)
            else:
                journal = self._journals.path
                self.episodes.sample_states(self.engine, states, sampling, **until, journal=journal)


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
