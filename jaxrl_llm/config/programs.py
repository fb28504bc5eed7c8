"""The whole configs of the programs, each with the rules between its keys."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import load
from jaxrl_llm.config.sections import (
    CACHE_GB,
    KV_CACHE_DTYPES,
    STRICT,
    AgentConfig,
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    CriticConfig,
    DataConfig,
    EngineMeshConfig,
    EvaluateRewardConfig,
    Function,
    ImplicitRewardModelConfig,
    LimitsConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    Number,
    OffloadConfig,
    OptimConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    RowsConfig,
    Section,
    ServeMeshConfig,
    Several,
    SftBatchConfig,
    SftDataConfig,
    SftMeshConfig,
    Table,
    TeacherConfig,
    TrainLogConfig,
    ValidationConfig,
    VisualKeys,
    VllmConfig,
    episodes_have_one_process,
    function_key,
)

# jaxrl_llm.train.


Config = TypeVar("Config", bound=Section)


def check(config: Any, *rules: Callable[[Any], Iterator[str]]) -> None:
    """Apply all rules.

    Raises:
        ConfigError: a line for each contradiction.
    """
    if lines := [line for rule in rules for line in rule(config)]:
        raise ConfigError(*lines)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig(Section):
    """What all runs that train have: how long they are, and what they keep."""

    run_dir: str = Field(min_length=1)
    """directory for everything that the run writes"""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """seed of the data order, of sampling and of random weights"""
    steps: int | None = Field(default=None, ge=1)
    """steps in all; null takes epochs"""
    epochs: int = Field(default=1, ge=1)
    """passes over the rows, where steps is null"""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    compilation_cache: bool = Field(default=True)
    """keep compiled programs in ~/.cache/jaxrl_llm, for later runs, or of several processes in
    run_dir; JAX_COMPILATION_CACHE_DIR names another folder, used in any case"""
    log: LogConfig = Field(default_factory=LogConfig)
    stall_timeout_s: Number | None = Field(default=3600.0, gt=0)
    """seconds without a step until the run counts as hung: it prints its stacks and ends, on a
    cluster it restarts; must be long enough for the first step, with loading; null: never"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExportingRunConfig(RunConfig):
    """What runs have whose model is written at the end."""

    export_to: str
    """Hugging Face directory to write at the end"""
    model: ModelConfig
    optim: OptimConfig = Field(default_factory=OptimConfig)
    mesh: SftMeshConfig = Field(default_factory=SftMeshConfig)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig(RunConfig):
    """A whole run of `jaxrl_llm.train`."""

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
    log: TrainLogConfig = Field(default_factory=TrainLogConfig)
    cluster: ClusterConfig | None = None
    """run on a Ray cluster; null: on this machine"""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def longest_teacher_sequence(self) -> int:
        """Tokens of the longest prompt that a teacher reads with the longest response."""
        longest_prompt = self.teacher.max_prompt_tokens or self.data.max_prompt_tokens
        return longest_prompt + self.rollout.max_new_tokens

    @property
    def sequences_per_minibatch(self) -> int:
        """Responses that an update is on."""
        prompts = self.batch.prompts_per_minibatch or self.batch.prompts_per_step
        return prompts * self.rollout.samples_per_prompt

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        check(
            self,
            step_is_possible,
            run_is_possible,
            images_are_seen,
            engine_is_possible,
            cluster_can_train,
            stale_answers_are_possible,
            pairs_are_possible,
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


def step_is_possible(config: TrainConfig) -> Iterator[str]:
    """Refuse steps that can't be cut, whose rows find no room, or whose number is unknown."""
    batch, validation, algorithm = config.batch, config.validation, config.algorithm
    minibatch = batch.prompts_per_minibatch or batch.prompts_per_step
    if batch.prompts_per_step % minibatch:
        yield (
            f"batch.prompts_per_step={batch.prompts_per_step} is not a multiple of "
            f"batch.prompts_per_minibatch={minibatch}; "
            f"take one of {', '.join(map(str, divisors(batch.prompts_per_step)))}"
        )
    if config.mesh.train.context == 1 and batch.max_tokens_per_device < config.longest_sequence:
        yield (  # else devices share a row
            f"batch.max_tokens_per_device={batch.max_tokens_per_device} can't hold the longest "
            "sequence: data.max_prompt_tokens + rollout.max_new_tokens = "
            f"{config.longest_sequence}"
        )
    if validation.samples > 1 and validation.temperature == 0:
        yield (
            f"validation.samples={validation.samples} at validation.temperature=0 draws the "
            "same answer each time: raise the temperature, or take one sample"
        )
    if validation.every and not config.data.validation:
        yield (
            f"validation.every={validation.every} but data.validation names no file: "
            "name one, or set validation.every to 0"
        )
    if algorithm.kl_loss and algorithm.kl_reward:
        yield "algorithm.kl_loss and algorithm.kl_reward share kl_coef: set one of them to null"
    if algorithm.use_rollout_logprobs and algorithm.correction:
        yield (
            "algorithm.use_rollout_logprobs takes the engine's log-probs as the old ones, so that "
            "algorithm.correction has nothing to correct: remove one of them"
        )
    if algorithm.group_filter is not None and config.steps is None:
        yield (
            "algorithm.group_filter draws as many prompts as it needs, so epochs say no number of "
            "steps: set steps"
        )


def engine_is_possible(config: TrainConfig) -> Iterator[str]:
    """Refuse rewards of nothing, keys of other engines, and devices that don't fit sidecars."""
    rollout, reward, dtype = config.rollout, config.reward, config.model.dtype
    vllm = rollout.vllm
    if config.model.function is not None:
        others = "engine", "quantization", "kv_cache_dtype", "nodes"
        yield from set_beside_own_model(rollout, "rollout", others)
    if reward.function is None and reward.classifier is None:
        yield "reward.function and reward.classifier are both null: nothing scores the answers"
    if reward.function is None and reward.components:
        yield "reward.components are what a reward function reports, but reward.function is null"
    if rollout.engine != "vllm" and vllm != VllmConfig():
        yield (
            "rollout.vllm is set, but rollout.engine is native: set it to vllm, or remove "
            "rollout.vllm"
        )
    if (rollout.engine, rollout.quantization) == ("vllm", "fp8") and dtype != "bfloat16":
        yield f"rollout.quantization=fp8 with vLLM needs model.dtype: bfloat16, got {dtype}"
    if rollout.kv_cache_dtype not in KV_CACHE_DTYPES[rollout.engine]:
        yield (
            f"rollout.kv_cache_dtype: expected {' or '.join(KV_CACHE_DTYPES[rollout.engine])} "
            f"with the {rollout.engine} engine, got {rollout.kv_cache_dtype!r}"
        )
    if rollout.max_running_sequences % vllm.sidecars:
        yield (
            f"rollout.max_running_sequences={rollout.max_running_sequences} can't be shared evenly "
            f"by the {vllm.sidecars} sidecars of rollout.vllm.sidecars"
        )
    if len(vllm.launch) not in (0, 1, vllm.sidecars):
        yield (
            f"rollout.vllm.launch has {len(vllm.launch)} commands: expected one for all sidecars, "
            f"or one for each of the {vllm.sidecars}"
        )
    if rollout.nodes > 0 and config.cluster is None:
        yield (
            f"rollout.nodes={rollout.nodes} needs a cluster: set cluster.nodes to the nodes that "
            "train"
        )
    if rollout.devices is not None and rollout.nodes == 0:
        yield (
            f"rollout.devices={rollout.devices} is of engines on nodes of their own: set "
            "rollout.nodes"
        )
    taken = vllm.sidecars * vllm.tensor_parallel
    if config.cluster and rollout.devices is not None and taken > rollout.devices:
        yield f"rollout.devices={rollout.devices}, but the sidecars of rollout.vllm take {taken}"


def cluster_can_train(config: TrainConfig) -> Iterator[str]:
    """Refuse tasks and processes of a cluster before it is started."""
    if config.cluster:
        processes = config.cluster.nodes * config.cluster.processes_per_node
        tasks = config.cluster.reward_tasks
        if tasks % processes:
            yield (
                f"cluster.reward_tasks: expected a multiple of the {processes} training processes, "
                f"got {tasks}"
            )
        yield from processes_can_train(config, processes)


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


def stale_answers_are_possible(config: TrainConfig) -> Iterator[str]:
    """Refuse tokens of older weights that are taken for new ones, and keys that they alone have."""
    algorithm, rollout = config.algorithm, config.rollout
    staleness = rollout.staleness
    if staleness and algorithm.correction == () and not algorithm.use_rollout_logprobs:
        yield (
            f"rollout.staleness={staleness} with algorithm.correction: [] takes tokens of older "
            "policies for the newest's: leave algorithm.correction out (truncated_token), or name "
            "one"
        )
    if staleness and rollout.nodes and rollout.has_episodes and rollout.order == "free":
        yield (
            f"rollout.staleness={staleness} with rollout.nodes={rollout.nodes} needs "
            "rollout.order: lockstep, got free: turns in flight could not be left"
        )
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


def divisors(n: int) -> list[int]:
    """Return the divisors of n.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, n + 1) if n % d == 0]


# Of all programs that train.


def run_is_possible(config: Any) -> Iterator[str]:
    """Refuse profiles of no step, adapters without a base, and what an own model can't have."""
    for step in config.log.profile_steps:
        if step < 1 or (config.steps is not None and step > config.steps):
            yield (
                f"log.profile_steps: expected numbers from 1 to {config.steps or 'the last step'}, "
                f"got {list(config.log.profile_steps)}, but {step} is not a step of the run"
            )
    model = config.model
    if model.lora and model.adapter:
        yield "model.adapter brings its own rank, alpha and targets: remove model.lora"
    if model.random_init and (model.lora or model.adapter):
        yield (
            "model.random_init draws a model that is not kept, so that no adapter fits it later: "
            "remove model.lora and model.adapter, or name a model that has weights"
        )
    if model.function is None:
        return
    others = ("vision", "lora", "adapter", "attention", "experts")
    others = (*others, "router_loss_coef", "router_bias_rate")
    yield from set_beside_own_model(model, "model", others)
    if model.remat == "full":
        yield (
            "model.remat=full: the layers of model.function are not known; take none or dots, or "
            "compute them again in the model itself, by nnx.remat or jax.checkpoint"
        )
    if config.mesh.train.stage > 1:
        yield (
            f"mesh.train.stage={config.mesh.train.stage}: the layers of model.function are not "
            "known, so they can't be split into stages: take 1"
        )


def export_has_a_folder(config: Any) -> Iterator[str]:
    """Refuse to export into the folder of the run."""
    if Path(config.export_to).resolve() == Path(config.run_dir).resolve():
        yield f"export_to: it and run_dir are both {config.run_dir!r}: name two folders"


def set_beside_own_model(section: Any, prefix: str, names: Sequence[str]) -> Iterator[str]:
    """Refuse keys that are only for models of a Hugging Face directory."""
    for name in names:
        value, default = getattr(section, name), getattr(type(section), name)
        if value != default:
            yield (
                f"{prefix}.{name}={value!r} is for models of a Hugging Face directory, but "
                f"model.function is set: remove {prefix}.{name}"
            )


# Of training on pairs or on some of the answers, and of a reference that is refreshed.


OF_ADVANTAGES = (
    *("advantage", "loss", "reduce", "kl_loss", "kl_reward", "kl_coef", "kl_controller"),
    *("distillation", "entropy_coef", "correction", "use_rollout_logprobs", "high_covariance"),
    "answer_filter",
)
"""Keys of the algorithm that a loss of pairs has no use for."""


def pairs_are_possible(config: Any) -> Iterator[str]:
    """Require a loss and room for pairs where pairs are made, and refuse keys of advantages."""
    algorithm = config.algorithm
    pairs, loss = algorithm.pairs, algorithm.pair_loss
    if pairs is not None and loss is None:
        yield (
            f"algorithm.pairs={pairs.fn} makes pairs, but algorithm.pair_loss is null: name a loss "
            "of pairs, as in algorithm.pair_loss=dpo"
        )
    if pairs is None:
        if loss is not None:
            yield (
                f"algorithm.pair_loss={loss.fn} is of pairs, but algorithm.pairs is null: name "
                "what makes them, as in algorithm.pairs=best_and_worst"
            )
        return
    for name in OF_ADVANTAGES:
        if getattr(algorithm, name) != getattr(type(algorithm), name):
            yield (
                f"algorithm.{name} has no effect on pairs: algorithm.pair_loss takes the place of "
                f"advantages and losses of tokens; remove algorithm.{name}, or algorithm.pairs"
            )
    if config.rollout.samples_per_prompt < 2:
        yield (
            "rollout.samples_per_prompt=1, but algorithm.pairs needs a better and a worse answer "
            "to a prompt: take 2 or more"
        )
    room, longest = config.batch.max_tokens_per_device, 2 * config.longest_sequence
    if config.mesh.train.context == 1 and room < longest:  # else devices share a row
        yield (
            f"batch.max_tokens_per_device={room} can't hold the longest pair of algorithm.pairs: "
            f"twice data.max_prompt_tokens + rollout.max_new_tokens, {longest}"
        )


def mix_is_of_a_refresh(config: Any) -> Iterator[str]:
    """Refuse a mix where nothing is refreshed, and where it is no mean of models."""
    reference, model = config.reference, config.model
    if reference.mix != 1 and reference.refresh_every is None:
        yield (
            f"reference.mix={reference.mix} is of a reference that is refreshed: set "
            "reference.refresh_every"
        )
    if reference.mix != 1 and (model.lora or model.adapter):
        yield (
            f"reference.mix={reference.mix}: expected 1 with an adapter, for the mean of two "
            "adapters' factors is no mean of the models"
        )


# Of models that read images and videos.


def images_are_seen(config: Any) -> Iterator[str]:
    """Refuse what does not go with model.vision: models that see no images, rows that are shared.

    Args:
        config: of RL or supervised training.
    """
    model, tokens = config.model, config.batch.max_tokens_per_device
    room = config.batch.max_visual_tokens_per_device
    if model.vision == "none":
        if room is not None:
            yield (
                f"batch.max_visual_tokens_per_device={room}, but model.vision=none reads no "
                "images: remove it, or set model.vision to frozen"
            )
        return
    for name in ("train", "critic", "reference", "teacher"):
        sizes = getattr(config.mesh, name, None)
        for axis in ("context", "stage"):
            if sizes is not None and getattr(sizes, axis) > 1:
                yield (
                    f"mesh.{name}.{axis}={getattr(sizes, axis)}: expected 1 with model.vision="
                    f"{model.vision}, as rows with images can't be shared yet"
                )
    if room is not None and room > tokens:
        yield (
            f"batch.max_visual_tokens_per_device={room}: expected at most "
            f"batch.max_tokens_per_device={tokens}, of which they are"
        )
    if model.vision == "frozen" and model.random_init:
        yield (
            "model.vision=frozen with model.random_init would keep a vision tower of random "
            "weights: set model.vision to trained, or name a model that has weights"
        )
    if model.vision == "trained" and (model.lora or model.adapter):
        yield (
            "model.vision=trained, but an adapter trains no vision tower: set it to frozen, or "
            "remove model.lora and model.adapter"
        )
    yield from _others_see(config)


def _others_see(config: Any) -> Iterator[str]:
    """Refuse models of other directories, which would read placeholders and see nothing."""
    keys = {
        "teacher.path": config.teacher.path,
        **{
            f"{name}.path": getattr(config, name).path
            for name in ("critic", "implicit_reward_model")
            if hasattr(config, name)
        },
    }
    if hasattr(config, "reward"):
        keys |= {
            "reward.classifier": config.reward.classifier,
            "teacher.url": config.teacher.url,
            "teacher.prompt": config.teacher.prompt,
            "algorithm.pairs": config.algorithm.pairs,
        }
    for key, value in keys.items():
        if value is not None:
            yield (
                f"{key} is set, but with model.vision={config.model.vision} images are read by the "
                "policy and what begins as a copy of it, in whole answers: remove it, or set "
                "model.vision to none"
            )


# jaxrl_llm.sft.


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftTeacherConfig(Section):
    """A teacher whose distributions are learned on the examples' answers."""

    path: str | None = None
    """Hugging Face directory of a teacher with the model's tokens; null: none"""
    divergence: Function = function_key(functions.DIVERGENCES, "forward_kl_divergence")
    """divergence of the model from the teacher, over the whole vocabulary:
    algorithms.divergences"""
    share: Number = Field(default=1.0, gt=0, le=1)
    """share a of the divergence in the loss (1 - a) * -log π + a * divergence"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftConfig(ExportingRunConfig):
    """A whole run of `jaxrl_llm.sft`."""

    teacher: SftTeacherConfig = Field(default_factory=SftTeacherConfig)
    data: SftDataConfig
    batch: SftBatchConfig = Field(default_factory=SftBatchConfig)

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        check(self, examples_are_possible, run_is_possible, images_are_seen)


def examples_are_possible(config: SftConfig) -> Iterator[str]:
    """Require room for the longest example, a folder for the model, and a teacher for its keys."""
    room, longest = config.batch.max_tokens_per_device, config.data.max_tokens
    if config.mesh.train.context == 1 and room < longest:  # else devices share a row
        yield (
            f"batch.max_tokens_per_device={room} can't hold the longest example: "
            f"data.max_tokens={longest}"
        )
    yield from export_has_a_folder(config)
    if config.teacher.path is None and config.teacher != SftTeacherConfig():
        yield "teacher is set, but there is no teacher.path: name one, or remove the section"


# jaxrl_llm.prefer.


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferDataConfig(RowsConfig):
    """Pairs, answers with a label, or answers with labelled steps."""

    train: Several[str] = Field(min_length=1)
    """parquet or jsonl files with columns prompt, chosen and rejected, or prompt, completion and
    label, or prompt, completions and labels"""
    validation: Several[str] = ()
    """held-out files of the same kind"""
    dataset: Function = function_key(functions.DATASETS, "preference_rows")
    """function from files to rows"""
    max_tokens: int = Field(default=1024, ge=1)
    """the longest prompt and answer; a pair is two of them"""
    step_separator: str = Field(default="\n", min_length=1)
    """text that is put behind each of a row's completions, its steps; a process reward model scores
    its last token"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferBatchConfig(Section):
    """How the preferences are cut."""

    pairs_per_step: int = Field(default=64, ge=2)
    """pairs, or answers, in one update"""
    max_tokens_per_device: int = 16384
    """tokens of a micro-batch on each device: bounds memory, never exceeded"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferValidationConfig(Section):
    """Validation on data.validation."""

    before: bool = True
    """validate before the first step"""
    every: int = Field(default=0, ge=0)
    """validate every n steps; 0 only at the end"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PreferConfig(ExportingRunConfig):
    """A whole run of `jaxrl_llm.prefer`."""

    loss: Function = function_key(functions.PREFERENCES, "dpo")
    """loss of pairs, of answers with a label or of labelled steps; one that asks for scores, or
    for logits of steps, trains a reward model"""
    reference: str | None = None
    """Hugging Face directory of the reference, where the loss asks for one; null: the model as the
    run begins with it"""
    data: PreferDataConfig
    batch: PreferBatchConfig = Field(default_factory=PreferBatchConfig)
    validation: PreferValidationConfig = Field(default_factory=PreferValidationConfig)

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        check(self, longest_pair_fits, export_has_a_folder, run_is_possible, text_is_all)


def longest_pair_fits(config: PreferConfig) -> Iterator[str]:
    """Require room for the longest pair, unless devices share a row."""
    room, longest = config.batch.max_tokens_per_device, config.data.max_tokens
    if config.mesh.train.context == 1 and room < 2 * longest:
        yield (
            f"batch.max_tokens_per_device={room} can't hold the longest pair: twice "
            f"data.max_tokens={longest}"
        )


def text_is_all(config: PreferConfig) -> Iterator[str]:
    """Refuse images, which pairs have not got yet."""
    if config.model.vision != "none":
        yield (
            f"model.vision={config.model.vision}: expected none, as preferences are of text alone "
            "(jaxrl_llm.train and jaxrl_llm.sft read images)"
        )


# jaxrl_llm.evaluate.


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationKeys(Section):
    """What an evaluation evaluates, and how it samples and scores."""

    model: str
    """Hugging Face directory or repository, or the run_dir of train or sft"""
    data: Several[str] = Field(min_length=1)
    """parquet or jsonl files with verl's columns"""
    out: str | None = None
    """folder for metrics.json and samples.parquet; null: runs/evaluate/<date and time>"""
    step: int | None = None
    """which checkpoint of a run; null takes the newest"""
    function_from: str | None = None
    """my_file.py or pkg.mod, that has the function which a notebook gave the run as
    model.function"""
    seed: int = Field(default=0, ge=0)
    """seed of sampling"""
    rows: int | None = Field(default=None, ge=1)
    """the first n rows only; null takes all"""
    dataset: Function = function_key(functions.DATASETS, FunctionSpec("verl_rows"))
    """function from files to rows"""
    vision: bool = False
    """load the vision tower of a directory, too; that of a run always is, if it was trained with
    one (docs/images.md)"""
    chat_template_kwargs: Table = Field(default={})
    """keywords for the chat template"""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """drop longer prompts; null drops none, and refuses prompts that the model can't hold"""
    samples: int = Field(default=1, ge=1)
    """n: responses sampled for each prompt"""
    k: Several[int] = ()
    """k of pass@k and maj@k, up to n; none takes 2, 4, 8, … and n"""
    max_new_tokens: int = Field(default=512, ge=1)
    """largest number of tokens of a response; of an episode, all after its prompt"""
    temperature: Number = Field(default=0.0, ge=0)
    """softmax temperature; 0 is greedy"""
    top_p: Number = Field(default=1.0, gt=0, le=1)
    """nucleus: sample from the smallest set with this mass"""
    top_k: int = Field(default=0, ge=0)
    """sample from the k most likely tokens; 0 means all"""
    min_p: Number = Field(default=0.0, ge=0, le=1)
    """sample from tokens at least this share as likely as the most likely one"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of weights, cache and computation: float32 or bfloat16"""
    max_running_sequences: int = Field(default=256, ge=1)
    """sequences that the engine decodes at once"""
    kv_cache_gb: Number | None = Field(default=None, gt=0, description=CACHE_GB)
    reward: EvaluateRewardConfig = Field(default_factory=EvaluateRewardConfig)
    mesh: EngineMeshConfig = Field(default_factory=EngineMeshConfig)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateConfig(AgentConfig, VisualKeys, EvaluationKeys):  # the keys of the last come first
    """A whole evaluation by `jaxrl_llm.evaluate`."""

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        check(self, samples_differ)


def samples_differ(config: EvaluateConfig) -> Iterator[str]:
    """Refuse several samples of the likeliest answer, and a k of more samples than there are."""
    if config.samples > 1 and config.temperature == 0:
        yield (
            f"samples={config.samples} at temperature=0 draws the same answer each time: "
            "raise the temperature, or take one sample"
        )
    if not all(1 <= k <= config.samples for k in config.k):
        yield f"k: expected numbers from 1 to samples={config.samples}, got {list(config.k)}"


# jaxrl_llm.serve.


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServeConfig(Section):
    """All of `jaxrl_llm.serve`."""

    model: str
    """Hugging Face directory, or the run_dir of train or sft"""
    function_from: str | None = None
    """my_file.py or pkg.mod, that has the function which a notebook gave the run as
    model.function"""
    name: str | None = None
    """the model's name for clients; null takes model"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of weights, cache and computation: float32 or bfloat16"""
    max_running_sequences: int = Field(default=64, ge=1)
    """sequences that the engine decodes at once"""
    max_tokens: int | None = Field(default=None, ge=1)
    """largest number of tokens of prompt and completion; null takes the model's own limit"""
    kv_cache_gb: Number | None = Field(default=None, gt=0)
    """GB of each device for the KV cache at most; null takes four fifths of a GPU's memory less the
    weights, or half of the machine's shared by its CPU devices; what all running sequences can't
    fill is not taken"""
    call_format: str | None = None
    """how the model writes calls of tools: hermes, qwen3_coder, llama3_json, pythonic, mistral,
    deepseek or harmony; null: as its chat template does"""
    vision: bool = False
    """load the model's vision tower, too, so that chats may show images (docs/images.md)"""
    max_pixels: int | None = Field(default=None, ge=1)
    """the largest area of an image, to which it is resized; null takes the model's"""
    min_pixels: int | None = Field(default=None, ge=1)
    """the smallest area of an image; null takes the model's"""
    mesh: ServeMeshConfig = Field(default_factory=ServeMeshConfig)
    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 listens to all machines"""
    port: int = Field(default=8000, ge=0, lt=2**16)
    """port to listen on; 0 takes a free one"""
    api_key: str | None = Field(default=None, min_length=1)
    """key that clients must send; null takes JAXRL_LLM_API_KEY of the environment; without that
    variable no key is needed"""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)


# Which program a run's config is of, and by which functions its policy learns.


def program_of(config: Mapping[str, Any]) -> Literal["train", "sft", "prefer"]:
    """Return the program whose run has a resolved config, by a key that it alone has.

    >>> program_of({"run_dir": "runs/a", "reference": None})
    'prefer'
    """
    if "rollout" in config:
        return "train"
    return "prefer" if "reference" in config else "sft"


def learned_by(algorithm: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the functions that a policy learns by, by key of the algorithm.

    A list of functions is their sum. What a run of an earlier version lacks is left out.

    >>> learned_by({"advantage": ["grpo", {"fn": "reverse_kl"}], "loss": {"fn": "ppo_clip"}})
    {'advantage': 'grpo + reverse_kl', 'loss': 'ppo_clip'}
    >>> learned_by({"advantage": "grpo", "loss": None, "distillation": "generalized_jsd"})
    {'distillation': 'generalized_jsd'}
    >>> learned_by({"advantage": "grpo", "pairs": "all_pairs", "pair_loss": {"fn": "dpo"}})
    {'pairs': 'all_pairs', 'pair_loss': 'dpo'}
    """
    keys = ("advantage", "loss", "distillation")
    if algorithm.get("pairs"):
        keys = ("pairs", "pair_loss")
    elif algorithm.get("distillation") and not algorithm.get("loss"):
        keys = ("distillation",)
    given = {key: algorithm.get(key) for key in keys}
    return {key: function_name(value) for key, value in given.items() if value}


def function_name(named: Any) -> str:
    """Return the name of a function of a resolved config, or of the sum of a list of them.

    >>> function_name({"fn": "dpo", "beta": 0.1})
    'dpo'
    """
    if isinstance(named, list):
        return " + ".join(map(function_name, named))
    return named["fn"] if isinstance(named, Mapping) else str(named)
