"""A whole run of `jaxrl_llm.train`: its keys, and the rules between them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.files import load
from jaxrl_llm.config.keys import STRICT, Number, Section
from jaxrl_llm.config.rules import check
from jaxrl_llm.config.sections.agent import episodes_have_one_process
from jaxrl_llm.config.sections.algorithm import AlgorithmConfig
from jaxrl_llm.config.sections.batch import BatchConfig
from jaxrl_llm.config.sections.checkpoint import CheckpointConfig
from jaxrl_llm.config.sections.cluster import ClusterConfig
from jaxrl_llm.config.sections.critic import CriticConfig
from jaxrl_llm.config.sections.data import DataConfig
from jaxrl_llm.config.sections.implicit_reward_model import ImplicitRewardModelConfig
from jaxrl_llm.config.sections.log import TrainLogConfig
from jaxrl_llm.config.sections.mesh import MeshConfig
from jaxrl_llm.config.sections.model import PolicyConfig
from jaxrl_llm.config.sections.offload import OffloadConfig
from jaxrl_llm.config.sections.optim import OptimConfig
from jaxrl_llm.config.sections.reference import ReferenceConfig
from jaxrl_llm.config.sections.reward import RewardConfig
from jaxrl_llm.config.sections.rollout import KV_CACHE_DTYPES, RolloutConfig, VllmConfig
from jaxrl_llm.config.sections.teacher import TeacherConfig
from jaxrl_llm.config.sections.validation import ValidationConfig
from jaxrl_llm.config.selections import (
    longest_pair_of_answers_fits,
    mix_is_of_a_refresh,
    pairs_have_a_loss,
    pairs_stand_alone,
)
from jaxrl_llm.config.shared import (
    COMPILATION_CACHE,
    STALL_TIMEOUT,
    adapter_has_a_kept_base,
    adapter_is_new_or_given,
    own_model_is_plain,
    profiled_steps_are_steps,
    set_beside_own_model,
)
from jaxrl_llm.config.vision import images_are_seen

Config = TypeVar("Config", bound=Section)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig(Section):
    """A whole run of `jaxrl_llm.train`."""

    run_dir: str = Field(min_length=1, description="directory for everything that the run writes")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="seed of the data order and of sampling"
    )
    steps: int | None = Field(default=None, ge=1, description="steps in all; null takes epochs")
    epochs: int = Field(default=1, ge=1, description="passes over the prompts, where steps is null")
    model: PolicyConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    implicit_reward_model: ImplicitRewardModelConfig = Field(
        default_factory=ImplicitRewardModelConfig
    )
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    compilation_cache: bool = Field(default=True, description=COMPILATION_CACHE)
    log: TrainLogConfig = Field(default_factory=TrainLogConfig)
    stall_timeout_s: Number | None = Field(default=3600.0, gt=0, description=STALL_TIMEOUT)
    cluster: ClusterConfig | None = Field(
        default=None, description="run on a Ray cluster; null: on this machine"
    )

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        check(
            self,
            minibatches_divide_the_step,
            longest_sequence_fits,
            validation_samples_differ,
            validation_has_data,
            kl_is_in_loss_or_reward,
            correction_has_something_to_correct,
            filtered_runs_have_steps,
            profiled_steps_are_steps,
            adapter_is_new_or_given,
            adapter_has_a_kept_base,
            own_model_is_plain,
            images_are_seen,
            own_model_has_the_native_engine,
            something_scores,
            components_are_reported,
            vllm_keys_have_vllm,
            float8_of_vllm_has_bfloat16,
            cache_is_of_the_engine,
            sidecars_share_evenly,
            launch_commands_fit,
            engines_have_nodes,
            devices_are_of_engines,
            sidecars_fit_devices,
            reward_tasks_divide,
            cluster_can_train,
            stale_answers_are_corrected,
            stale_answers_have_their_engine,
            schedules_are_of_stale_answers,
            pairs_have_a_loss,
            pairs_stand_alone,
            longest_pair_of_answers_fits,
            mix_is_of_a_refresh,
        )


def load_config(
    path: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    cls: type[Config] = TrainConfig,  # pyright: ignore[reportArgumentType]
) -> Config:
    """Read a config by its file or its packaged name, with overrides.

    Args:
        path: of a YAML file, or the name of a packaged config as `recipes/dapo`.
        overrides: `{"a.b.c": value}`, where a value may be a mapping of keys, and a function may
            stand where a config names one; or `a.b.c=value` as on the command line.
        cls: `TrainConfig`; `SftConfig` for supervised training.

    Raises:
        ConfigError: no such file, or a key or value that is wrong; a line for each.

    >>> load_config("quickstart", {"steps": 20, "algorithm.loss.clip_high": 0.28}).steps
    20
    """
    return load(cls, path, overrides)


def minibatches_divide_the_step(config: TrainConfig) -> Iterator[str]:
    """Require equal mini-batches."""
    prompts = config.batch.prompts_per_step
    minibatch = config.batch.prompts_per_minibatch or prompts
    if prompts % minibatch:
        yield (
            f"batch.prompts_per_step={prompts} is not a multiple of "
            f"batch.prompts_per_minibatch={minibatch}; "
            f"take one of {', '.join(map(str, divisors(prompts)))}"
        )


def longest_sequence_fits(config: TrainConfig) -> Iterator[str]:
    """Require room for the longest sequence, unless devices share a row."""
    room = config.batch.max_tokens_per_device
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.mesh.train.context == 1 and room < longest:
        yield (
            f"batch.max_tokens_per_device={room} can't hold the longest "
            f"sequence: data.max_prompt_tokens + rollout.max_new_tokens = {longest}"
        )


def validation_samples_differ(config: TrainConfig) -> Iterator[str]:
    """Refuse several samples of the likeliest answer."""
    if config.validation.samples > 1 and config.validation.temperature == 0:
        yield (
            f"validation.samples={config.validation.samples} at validation.temperature=0 draws the "
            "same answer each time: raise the temperature, or take one sample"
        )


def validation_has_data(config: TrainConfig) -> Iterator[str]:
    """Require data where validation is asked for."""
    if config.validation.every and not config.data.validation:
        yield (
            f"validation.every={config.validation.every} but data.validation names no file: "
            "name one, or set validation.every to 0"
        )


def kl_is_in_loss_or_reward(config: TrainConfig) -> Iterator[str]:
    """Refuse two KL terms, which would share a weight."""
    if config.algorithm.kl_loss and config.algorithm.kl_reward:
        yield "algorithm.kl_loss and algorithm.kl_reward share kl_coef: set one of them to null"


def correction_has_something_to_correct(config: TrainConfig) -> Iterator[str]:
    """Refuse a correction between log-probs that are the same."""
    if config.algorithm.use_rollout_logprobs and config.algorithm.correction:
        yield (
            "algorithm.use_rollout_logprobs takes the engine's log-probs as the old ones, so that "
            "algorithm.correction has nothing to correct: remove one of them"
        )


def filtered_runs_have_steps(config: TrainConfig) -> Iterator[str]:
    """Require a number of steps where a filter makes that of an epoch's unknown."""
    if config.algorithm.group_filter is not None and config.steps is None:
        yield (
            "algorithm.group_filter draws as many prompts as it needs, so epochs say no number of "
            "steps: set steps"
        )


def something_scores(config: TrainConfig) -> Iterator[str]:
    """Require a reward function or a classifier."""
    if config.reward.function is None and config.reward.classifier is None:
        yield "reward.function and reward.classifier are both null: nothing scores the answers"


def components_are_reported(config: TrainConfig) -> Iterator[str]:
    """Require a reward function where there are components."""
    if config.reward.function is None and config.reward.components:
        yield "reward.components are what a reward function reports, but reward.function is null"


def vllm_keys_have_vllm(config: TrainConfig) -> Iterator[str]:
    """Refuse keys of vLLM where another engine samples."""
    if config.rollout.engine != "vllm" and config.rollout.vllm != VllmConfig():
        yield (
            "rollout.vllm is set, but rollout.engine is native: set it to vllm, or remove "
            "rollout.vllm"
        )


def float8_of_vllm_has_bfloat16(config: TrainConfig) -> Iterator[str]:
    """Refuse a dtype that vLLM does not compute in beside float8."""
    rollout, dtype = config.rollout, config.model.dtype
    if (rollout.engine, rollout.quantization) == ("vllm", "fp8") and dtype != "bfloat16":
        yield f"rollout.quantization=fp8 with vLLM needs model.dtype: bfloat16, got {dtype}"


def cache_is_of_the_engine(config: TrainConfig) -> Iterator[str]:
    """Refuse a dtype of keys and values that the engine does not have."""
    engine, dtype = config.rollout.engine, config.rollout.kv_cache_dtype
    if dtype not in KV_CACHE_DTYPES[engine]:
        expected = " or ".join(KV_CACHE_DTYPES[engine])
        yield f"rollout.kv_cache_dtype: expected {expected} with the {engine} engine, got {dtype!r}"


def sidecars_share_evenly(config: TrainConfig) -> Iterator[str]:
    """Require as many sequences for each sidecar."""
    sequences, sidecars = config.rollout.max_running_sequences, config.rollout.vllm.sidecars
    if sequences % sidecars:
        yield (
            f"rollout.max_running_sequences={sequences} can't be shared evenly by "
            f"the {sidecars} sidecars of rollout.vllm.sidecars"
        )


def launch_commands_fit(config: TrainConfig) -> Iterator[str]:
    """Require one command for all sidecars, or one for each."""
    commands, sidecars = len(config.rollout.vllm.launch), config.rollout.vllm.sidecars
    if commands not in (0, 1, sidecars):
        yield (
            f"rollout.vllm.launch has {commands} commands: expected one for all sidecars, or one "
            f"for each of the {sidecars}"
        )


def engines_have_nodes(config: TrainConfig) -> Iterator[str]:
    """Require a cluster where engines have nodes of their own."""
    if config.rollout.nodes > 0 and config.cluster is None:
        yield (
            f"rollout.nodes={config.rollout.nodes} needs a cluster: set cluster.nodes to the nodes "
            "that train"
        )


def own_model_has_the_native_engine(config: TrainConfig) -> Iterator[str]:
    """Refuse engines, and precisions of theirs, that know only models of Hugging Face."""
    if config.model.function is not None:
        others = "engine", "quantization", "kv_cache_dtype", "nodes"
        yield from set_beside_own_model(config.rollout, "rollout", others)


def devices_are_of_engines(config: TrainConfig) -> Iterator[str]:
    """Refuse devices of engines that have no nodes."""
    if config.rollout.devices is not None and config.rollout.nodes == 0:
        yield (
            f"rollout.devices={config.rollout.devices} is of engines on nodes of their own: set "
            "rollout.nodes"
        )


def sidecars_fit_devices(config: TrainConfig) -> Iterator[str]:
    """Require as many devices as the sidecars of an engine take."""
    rollout = config.rollout
    taken = rollout.vllm.sidecars * rollout.vllm.tensor_parallel
    if config.cluster and rollout.devices is not None and taken > rollout.devices:
        yield (f"rollout.devices={rollout.devices}, but the sidecars of rollout.vllm take {taken}")


def reward_tasks_divide(config: TrainConfig) -> Iterator[str]:
    """Require as many tasks for each training process."""
    cluster = config.cluster
    if cluster and cluster.reward_tasks % training_processes(cluster):
        yield (
            f"cluster.reward_tasks: expected a multiple of the {training_processes(cluster)} "
            f"training processes, got {cluster.reward_tasks}"
        )


def cluster_can_train(config: TrainConfig) -> Iterator[str]:
    """Refuse a cluster's processes before it is started."""
    if config.cluster:
        yield from processes_can_train(config, training_processes(config.cluster))


def processes_can_train(config: TrainConfig, processes: int) -> Iterator[str]:
    """Refuse several training processes where each would do what only one may.

    Args:
        config: of the run.
        processes: that train, of a cluster or not.
    """
    rollout = config.rollout
    yield from episodes_have_one_process(rollout, processes, "rollout.")
    if rollout.engine == "vllm" and rollout.nodes == 0 and processes > 1:
        yield (
            f"rollout.engine is vllm, but there are {processes} training processes: give vLLM "
            "nodes of its own (rollout.nodes), or train by one process"
        )
    if rollout.staleness and rollout.nodes and processes > 1:
        yield (
            f"rollout.staleness={rollout.staleness} with rollout.nodes={rollout.nodes} needs one "
            f"training process, got {processes}"
        )


def stale_answers_are_corrected(config: TrainConfig) -> Iterator[str]:
    """Require that ratios know the policy that drew a token, where that is not the newest."""
    algorithm, staleness = config.algorithm, config.rollout.staleness
    if staleness and algorithm.correction == () and not algorithm.use_rollout_logprobs:
        yield (
            f"rollout.staleness={staleness} with algorithm.correction: [] takes tokens of older "
            "policies for the newest's: leave algorithm.correction out (truncated_token), or name "
            "one"
        )


def stale_answers_have_their_engine(config: TrainConfig) -> Iterator[str]:
    """Refuse engines on nodes of their own where they could not leave answers before their end."""
    rollout = config.rollout
    stale = rollout.staleness and rollout.nodes
    if stale and rollout.has_episodes and rollout.order == "free":
        yield (
            f"rollout.staleness={rollout.staleness} with rollout.nodes={rollout.nodes} needs "
            "rollout.order: lockstep, got free: turns in flight could not be left"
        )


def schedules_are_of_stale_answers(config: TrainConfig) -> Iterator[str]:
    """Refuse keys of stale answers where there are none, or where nothing can be repeated."""
    rollout = config.rollout
    given = {"turns": rollout.turns, "schedule": rollout.schedule}
    names = [name for name, value in given.items() if value is not None]
    for name in [*names, *(["at_push"] if rollout.at_push != "reread" else [])]:
        if not rollout.staleness:
            yield f"rollout.{name} needs rollout.staleness of at least 1, got 0"
    for name in names:
        if rollout.engine != "native" or (rollout.has_episodes and rollout.order == "free"):
            yield (
                f"rollout.{name} needs an engine that draws the same tokens again: rollout.engine: "
                f"native and rollout.order: lockstep, got {rollout.engine} and {rollout.order}"
            )
    if rollout.turns is not None and rollout.nodes:
        yield f"rollout.turns needs rollout.nodes: 0, got {rollout.nodes}"
    if rollout.at_push == "keep" and (rollout.engine != "native" or rollout.nodes):
        yield (
            f"rollout.at_push: keep needs rollout.engine: native and rollout.nodes: 0, got "
            f"{rollout.engine} and {rollout.nodes}"
        )
    if rollout.at_push == "keep" and rollout.schedule is not None:
        yield "rollout.schedule: expected null with rollout.at_push: keep, which a cache decides"
    if rollout.turns is not None and rollout.at_push == "finish":
        yield "rollout.turns: expected null with rollout.at_push: finish, which takes all turns"


def training_processes(cluster: ClusterConfig) -> int:
    """Return how many processes train."""
    return cluster.nodes * cluster.processes_per_node


def divisors(n: int) -> list[int]:
    """Return the divisors of n.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, n + 1) if n % d == 0]
