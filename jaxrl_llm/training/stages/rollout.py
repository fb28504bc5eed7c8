"""The rollout stage: an engine that samples answers under the policy's newest weights."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.evaluation.policy import Policy
from jaxrl_llm.models.capabilities import QuantizableModel
from jaxrl_llm.models.lora import combine_params, merge_adapter, without_adapter
from jaxrl_llm.models.model import Model, base_model
from jaxrl_llm.models.parameters import compute_dtypes
from jaxrl_llm.models.quantization import quantize_params
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.engine import Engine, EngineError, Stop
from jaxrl_llm.rollout.multi_turn import EpisodeSampler
from jaxrl_llm.rollout.sampling import (
    EpisodeState,
    OnEnd,
    Rollouts,
    as_rollouts,
    begin_episodes,
    sample_states,
)
from jaxrl_llm.rollout.types import SamplingParams
from jaxrl_llm.runs.journals import Journals
from jaxrl_llm.sharding.cast import cast_tree
from jaxrl_llm.sharding.checksum import checksum, checksum_of_leaves
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.offload import on_device
from jaxrl_llm.training.load_model import LoadedModel

TRAINING, VALIDATION, GREEDY, CANARY = range(4)
"""The use of sampled answers, as a part of their seeds."""

CANARIES, CANARY_TOKENS = 8, 8
"""Answers, and tokens of each, by which the engine's weights are checked where a step has none."""


Awake = Callable[[], contextlib.AbstractContextManager[None]]


class PolicyTokens(NamedTuple):
    """A policy's tokenizer, and the tokens that end an answer."""

    tokenizer: Any
    stops: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutStage:
    """The engine of a run, and the ways to sample from it.

    Attributes:
        engine: holds the policy.
        tokenizer: the policy's.
        policy: (trained parameters, step) -> the policy, an adapter merged into it.
        sample: (states, needed, stop, on_end) -> draws answers, until the first `needed` are whole
            or `stop` is set; `on_end` is called with each that has ended.
        gather: states that are whole -> answers.
        examine: a step's answers -> the same, with metrics of how they were sampled.
        sample_greedy: (a step's answers, step) -> one greedy answer to each of their prompts.
        sample_validation: (prompts, step) -> answers to validate.
        sample_canaries: (prompts, step) -> a few short answers, to compare the engine with the
            trainer.
        merge_for_engine: trained parameters -> the model's, with an adapter merged into it.
        engine_checksum: of a model's parameters, as the engine should hold them.
        awake: gives the engine its cache within a `with`; one that overlaps training keeps it.
        episodes: samples episodes of many turns; None where answers are plain.
        overlaps_training: whether the engine may sample while the models are trained, as its
            devices are not theirs.
        keeps_cache: whether answers that go on after a push keep their keys and values.
    """

    engine: Engine
    tokenizer: Any
    policy: Callable[[Any, int], Policy]
    sample: Callable[[Sequence[EpisodeState], int, Stop | None, OnEnd | None], None]
    gather: Callable[[Sequence[EpisodeState]], Rollouts]
    examine: Callable[[Rollouts], Rollouts]
    sample_greedy: Callable[[Rollouts, int], Rollouts]
    sample_validation: Callable[[list[Prompt], int], Rollouts]
    sample_canaries: Callable[[Sequence[Prompt], int], Rollouts]
    merge_for_engine: Callable[[Any], Any]
    engine_checksum: Callable[[Any], Any]
    awake: Awake
    episodes: EpisodeSampler | None = None
    overlaps_training: bool = False
    keeps_cache: bool = False

    @activity("syncing weights")
    def sync_weights(self, params: Any, version: int) -> dict[str, float]:
        """Give the engine the trained parameters, and compare its echo with what was sent.

        Raises:
            EngineError: it does not hold them.
        """
        with on_device(params) as trained:
            merged = self.merge_for_engine(trained)
            options = {"keep": True} if self.keeps_cache else {}
            receipt = self.engine.load(merged, version=version, **options)
            echoed = receipt.checksum  # None: the engine has compared by itself
            sent = None if echoed is None else int(self.engine_checksum(merged))
        if (receipt.version, echoed) != (version, sent):
            raise EngineError(
                f"the engine echoed version {receipt.version} with checksum {echoed}, expected "
                f"version {version} with {sent}: it does not hold the weights that were sent"
            )
        return {"perf/moved_gb": receipt.moved_bytes / 2**30}


def build_rollout(
    config: TrainConfig,
    model: LoadedModel,
    layout: Layout,
    engine: Engine,
    tokens: PolicyTokens,
    episodes: EpisodeSampler | None,
    *,
    overlaps_training: bool = False,
) -> RolloutStage:
    """Build what samples from an engine.

    Args:
        config: of the run.
        model: the policy.
        layout: of training.
        engine: of the run.
        tokens: the policy's tokenizer and stop tokens.
        episodes: samples episodes of many turns; None: answers are plain.
        overlaps_training: whether the engine may sample while the models are trained.
    """
    tokenizer, stops = tokens
    decode = text_decoder(tokenizer)
    opened = contextlib.nullcontext if overlaps_training else functools.partial(awake, engine)
    sampler = plain = plain_sampler(engine, decode, opened)
    if episodes is not None:
        sampler = episode_sampler(engine, episodes, Journals(Path(config.run_dir)), opened)
    merge, base = merge_for_engine(model, config.model.dtype), base_model(model.model)
    return RolloutStage(
        engine=engine,
        tokenizer=tokenizer,
        policy=policy_maker(base, merge, tokens, layout, config.model.dtype),
        sample=training_sampler(config, sampler, stops),
        gather=sampler.gather,
        examine=sampler.examine,
        sample_greedy=greedy_sampler(config, sampler, stops),
        sample_validation=validation_sampler(config, sampler, stops),
        sample_canaries=canary_sampler(config, plain, stops),
        merge_for_engine=merge,
        engine_checksum=engine_checksum(
            base,
            config.model.dtype,
            # vLLM quantizes what its host was sent, of which the checksum is
            quantized=config.rollout.engine == "native" and config.rollout.quantization == "fp8",
        ),
        awake=opened,
        episodes=episodes,
        overlaps_training=overlaps_training,
        keeps_cache=config.rollout.at_push == "keep",
    )


def policy_maker(
    model: Model, merge: Callable[[Any], Any], tokens: PolicyTokens, layout: Layout, dtype: str
) -> Callable[[Any, int], Policy]:
    """Return the function from trained parameters and a step to the policy.

    Args:
        model: without weights.
        merge: trained parameters -> the model's.
        tokens: the policy's tokenizer and stop tokens.
        layout: of training.
        dtype: of computing.
    """

    def policy(params: Any, step: int) -> Policy:
        return Policy(
            model=model,
            params=merge(params),
            tokenizer=tokens.tokenizer,
            stops=tokens.stops,
            layout=layout,
            dtype=dtype,
            step=step,
        )

    return policy


class Sampler(NamedTuple):
    """How a run samples: plain answers, or episodes of many turns.

    Attributes:
        run: (states, sampling, needed, stop, on_end) -> draws them, until the first `needed` are
            whole or `stop` is set; `on_end` is called with each that has ended.
        gather: states that are whole -> answers.
        examine: answers -> the same, with metrics of how they were sampled.
    """

    run: Callable[[Sequence[EpisodeState], SamplingParams, int, Stop | None, OnEnd | None], None]
    gather: Callable[[Sequence[EpisodeState]], Rollouts]
    examine: Callable[[Rollouts], Rollouts]

    def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        samples: int,
        seed: tuple[int, ...],
    ) -> Rollouts:
        """Draw G answers for each prompt."""
        states = begin_episodes(prompts, samples, seed)
        self.run(states, sampling, len(states), None, None)
        return self.examine(self.gather(states))


def plain_sampler(engine: Engine, decode: Callable[[Any], str], awake: Awake) -> Sampler:
    """Return what samples plain answers."""

    def run(
        states: Sequence[EpisodeState],
        sampling: SamplingParams,
        needed: int,
        stop: Stop | None,
        on_end: OnEnd | None,
    ) -> None:
        with awake():
            sample_states(engine, states, sampling, needed=needed, stop=stop, on_end=on_end)

    return Sampler(run, functools.partial(as_rollouts, decode=decode), lambda rollouts: rollouts)


def episode_sampler(
    engine: Engine, episodes: EpisodeSampler, journals: Journals, awake: Awake
) -> Sampler:
    """Return the same for episodes of many turns, which keep a journal of what tools answer."""

    def run(
        states: Sequence[EpisodeState],
        sampling: SamplingParams,
        needed: int,
        stop: Stop | None,
        on_end: OnEnd | None,
    ) -> None:
        with awake():
            episodes.sample_states(
                engine,
                states,
                sampling,
                needed=needed,
                stop=stop,
                on_end=on_end,
                journal=journals.path,
            )

    return Sampler(run, episodes.as_rollouts, episodes.examine)


@contextlib.contextmanager
def awake(engine: Engine) -> Iterator[None]:
    """Let an engine have its cache."""
    engine.wake()
    try:
        yield
    finally:
        engine.sleep()


def training_sampler(
    config: TrainConfig, sampler: Sampler, stops: tuple[int, ...]
) -> Callable[[Sequence[EpisodeState], int, Stop | None, OnEnd | None], None]:
    """Return the function that draws answers to train on, or goes on with them."""
    rollout = config.rollout
    sampling = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_ids=stops,
    )
    return lambda states, *until: sampler.run(states, sampling, *until)


def canary_sampler(
    config: TrainConfig, sampler: Sampler, stops: tuple[int, ...]
) -> Callable[[Sequence[Prompt], int], Rollouts]:
    """Return the function that samples a few short answers to some of a step's prompts."""
    sampling = SamplingParams(
        max_new_tokens=min(CANARY_TOKENS, config.rollout.max_new_tokens),
        temperature=config.rollout.temperature,
        stop_ids=stops,
    )

    def sample_canaries(prompts: Sequence[Prompt], step: int) -> Rollouts:
        seed = (config.seed, step, CANARY)
        return sampler.sample(prompts[:CANARIES], sampling, samples=1, seed=seed)

    return sample_canaries


def greedy_sampler(
    config: TrainConfig, sampler: Sampler, stops: tuple[int, ...]
) -> Callable[[Rollouts, int], Rollouts]:
    """Return the function that samples a greedy answer to each prompt of a step."""
    samples, longest = config.rollout.samples_per_prompt, config.rollout.max_new_tokens
    sampling = SamplingParams(max_new_tokens=longest, temperature=0.0, stop_ids=stops)

    def sample_greedy(rollouts: Rollouts, step: int) -> Rollouts:
        prompts = rollouts.prompts[::samples]
        return sampler.sample(prompts, sampling, samples=1, seed=(config.seed, step, GREEDY))

    return sample_greedy


def validation_sampler(
    config: TrainConfig, sampler: Sampler, stops: tuple[int, ...]
) -> Callable[[list[Prompt], int], Rollouts]:
    """Return the function that samples answers to validation prompts."""
    validation = config.validation
    sampling = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=validation.temperature,
        top_p=validation.top_p,
        stop_ids=stops,
    )

    def sample_validation(prompts: list[Prompt], step: int) -> Rollouts:
        seed = (config.seed, step, VALIDATION)
        return sampler.sample(prompts, sampling, samples=validation.samples, seed=seed)

    return sample_validation


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
    dtypes, declared = model.compute_dtypes(dtype), model.declare()
    if quantized:
        assert isinstance(model, QuantizableModel)  # for pyright; the engine asks
        declared = model.declare_quantized()
    elif all(dtype == jnp.float32 for dtype in jax.tree.leaves(dtypes)):
        return checksum_of_leaves  # the masters are what it holds

    def engines_checksum(params: Any) -> Any:
        return checksum(quantize_params(cast_tree(params, dtypes), declared, dtypes))

    return jax.jit(engines_checksum)
