"""Every key of a training run, with its default and its meaning.

`python -m jaxrl_llm.train --help` prints this file's contents; `docs/coming_from_verl.md` maps
verl's keys to these.
"""

import math
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import key, required, section
from jaxrl_llm.models.remat import POLICIES

ADVANTAGES = "jaxrl_llm.algorithms.advantages"
LOSSES = "jaxrl_llm.algorithms.losses"
REDUCTIONS = "jaxrl_llm.algorithms.reduce"
KLS = "jaxrl_llm.algorithms.kl"
CORRECTIONS = "jaxrl_llm.algorithms.correction"
SHAPING = "jaxrl_llm.algorithms.shaping"
VALUES = "jaxrl_llm.algorithms.values"
SCORERS = "jaxrl_llm.rewards.scorers"
DATASETS = "jaxrl_llm.data.dataset"
PREPARATIONS = "jaxrl_llm.data.prepare"
OPTIMIZERS = SCHEDULES = "optax"

CACHE_GB = (
    "GB of each device for the engine's keys and values at most; null is enough for the longest "
    "sequence in every slot"
)
STALL_TIMEOUT = (
    "seconds without a step until the run counts as hung: stacks are printed and it ends, on a "
    "cluster it is started again; the first step has to fit, with loading; null never"
)
COMPILATION_CACHE = (
    "keep compiled programs in run_dir/cache/compilation, for when the run is continued; another "
    "folder that JAX_COMPILATION_CACHE_DIR names is used in any case"
)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter, trained while the model's own weights are frozen."""

    rank: int = key(16, "r: inner width of the adapter")
    alpha: float = key(32.0, "what the adapter adds is scaled by alpha / rank")
    targets: tuple[str, ...] = key(
        ("all-linear",), "adapted matrices: all-linear, or names or patterns such as q_proj, *_proj"
    )
    rslora: bool = key(False, "scale by alpha / sqrt(rank) instead")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy's model."""

    path: str = required("Hugging Face directory: config.json, safetensors, tokenizer")
    random_init: bool = key(False, "draw the weights at random; the directory then needs none")
    dtype: str = key("float32", "compute dtype, float32 or bfloat16; master weights are float32")
    remat: str = key(
        "none", "what of a layer is stored for the backward pass: none (all), dots or full (least)"
    )
    logprob_chunk: int = key(1024, "tokens whose logits are alive at once")
    attention: str = key(
        "auto",
        "what attends to packed rows in training: xla, cudnn (Hopper GPUs and later), or auto, "
        "which takes cudnn where it is possible and agrees with xla",
    )
    router_loss_coef: float = key(
        0.0,
        "weight of the load-balance loss of a mixture of experts, 0.001 in many families; it takes "
        "one more forward pass in each update",
    )
    router_bias_rate: float = key(
        0.001,
        "how far each update moves the bias of sigmoid routers against the load; 0 freezes it",
    )
    lora: LoraConfig | None = key(
        None,
        "train a low-rank adapter {rank: 16, alpha: 32, targets: all-linear, rslora: false} over "
        "the frozen model; null trains every weight",
    )
    adapter: str | None = key(
        None, "directory of an adapter in PEFT's format to train on, in place of a new one"
    )


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(ModelConfig):
    """The policy's model in RL."""

    warm_start: str | None = key(
        None, "config for jaxrl_llm.sft that makes model.path when there is nothing there"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts to train and validate on."""

    train: tuple[str, ...] = required("parquet or jsonl files with verl's columns")
    validation: tuple[str, ...] = key((), "held-out files of the same kind")
    prepare: FunctionSpec | None = key(
        None, "preparation that writes the files when they are missing (jaxrl_llm.data.prepare)"
    )
    dataset: FunctionSpec = key(FunctionSpec("verl_rows"), "function from files to rows")
    max_prompt_tokens: int = key(512, "the longest prompt, in tokens of the chat template's text")
    filter_overlong: bool = key(False, "drop longer prompts; false makes them an error")
    shuffle: bool = key(True, "a new order in every epoch, from the seed")
    template: dict[str, Any] = key({}, "keywords for the chat template")


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """The vLLM sidecars, where rollout.engine is vllm."""

    python: str | None = key(
        None, "interpreter that has vLLM; null takes the one of jaxrl_llm.rollout.vllm.setup"
    )
    sidecars: int = key(1, "processes, each with a copy of the model")
    tensor_parallel: int = key(1, "GPUs that share a copy; on CPUs, processes")
    first_device: int | None = key(
        None,
        "the first GPU of the first sidecar, the others follow; counted among CUDA_VISIBLE_DEVICES "
        "of `env`, else the trainer's; null: 0 for several sidecars without `launch`, else all see "
        "all",
    )
    sleep: bool = key(False, "free the GPUs' memory between rollouts, where training shares them")
    start_timeout_s: float = key(600.0, "seconds for a sidecar to be ready")
    timeout_s: float = key(120.0, "seconds without an answer or a token until one counts as hung")
    restarts: int = key(3, "times that a sidecar is started again before the run stops")
    launch: tuple[str, ...] = key(
        (), "what stands before the command of each sidecar, or of all, as in [ssh node2]"
    )
    host: str = key("127.0.0.1", "address at which sidecars find the trainer")
    env: dict[str, Any] = key({}, "environment variables for the sidecars")
    options: dict[str, Any] = key({}, "more keywords of vLLM's AsyncEngineArgs")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How the policy is sampled."""

    engine: str = key("native", "native, in this process, or vllm, in sidecars")
    samples_per_prompt: int = key(8, "G: answers drawn for each prompt")
    max_new_tokens: int = key(512, "the longest answer")
    temperature: float = key(1.0, "softmax temperature, in the sampler and in the trainer's passes")
    top_p: float = key(1.0, "nucleus: sample from the smallest set with this mass")
    top_k: int = key(0, "sample from the k likeliest tokens; 0 means all")
    slots: int = key(256, "sequences that the engine decodes at once")
    cache_gb: float | None = key(None, CACHE_GB)
    logprob_tolerance: float = key(
        0.05, "the run stops when the engine's and the trainer's log-probs differ more on average"
    )
    dump_every: int = key(0, "write the rollouts of every n-th step to parquet; 0 never")
    nodes: int = key(
        0, "nodes of the cluster that only sample, each with an engine; 0 samples where it trains"
    )
    devices: int | None = key(None, "devices of each of these engines; null: the node's GPUs")
    vllm: VllmConfig = section(VllmConfig)


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """The processes in which a scorer runs."""

    workers: int = key(2, "scoring processes; 0 scores in this process, without a time limit")
    timeout_s: float = key(10.0, "seconds for one answer")
    on_error: float | None = key(
        0.0,
        "score of an answer whose scorer raises or hangs, or whose score is not finite; null "
        "stops the run",
    )
    memory_gb: float | None = key(
        4.0, "GB of memory of each process of a scorer; null sets no limit"
    )
    max_processes: int | None = key(
        64, "processes that a scorer may have started at once; null sets no limit"
    )
    pass_env: tuple[str, ...] = key(
        (),
        "environment variables that a scorer gets beside the usual ones, such as OPENAI_API_KEY; "
        "* stands for any letters",
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(ScoringConfig):
    """How answers are scored."""

    scorer: FunctionSpec | None = key(
        FunctionSpec("by_source"),
        "function (data_source, solution_str, ground_truth, extra_info) -> float or dict; null "
        "where reward.model alone scores",
    )
    model: str | None = key(
        None,
        "Hugging Face directory of a sequence classifier with one label and the policy's "
        "tokenizer: its score of prompt and answer is the score; null takes the scorer's",
    )
    components: tuple[str, ...] = key(
        (), "numbers in the scorer's dict that are the field score_components, in this order"
    )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What is optimised. Each function's keyword arguments are its keys."""

    advantage: FunctionSpec = key(FunctionSpec("grpo"), "function in algorithms.advantages")
    loss: FunctionSpec = key(FunctionSpec("ppo_clip"), "function in algorithms.losses")
    reduce: FunctionSpec = key(FunctionSpec("token_mean"), "function in algorithms.reduce")
    kl_loss: FunctionSpec | None = key(None, "KL to the reference in the loss: algorithms.kl")
    kl_reward: FunctionSpec | None = key(None, "KL to the reference in the reward: algorithms.kl")
    kl_coef: float = key(0.001, "weight of the KL term")
    kl_controller: FunctionSpec = key(
        FunctionSpec("fixed"), "how kl_coef moves from step to step: algorithms.kl"
    )
    entropy_coef: float = key(0.0, "weight of the entropy bonus")
    correction: tuple[FunctionSpec, ...] | None = key(
        None,
        "functions in algorithms.correction; their weights multiply those of the loss; null takes "
        "truncated_token where vLLM samples, and none else",
    )
    bypass: bool = key(False, "take the engine's log-probs as the old ones, without a second pass")
    high_covariance: FunctionSpec | None = key(
        None, "what marks tokens for clip_cov and kl_cov: select_clip_cov, select_kl_cov"
    )
    penalty: FunctionSpec | None = key(
        None, "function in algorithms.shaping; what it returns [B] is added to the scores"
    )
    keep: FunctionSpec | None = key(
        None, "which groups to train on, in algorithms.shaping; more are drawn for the others"
    )
    max_draws: int = key(10, "batches of prompts that a step may draw to keep enough groups")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer."""

    optimizer: FunctionSpec = key(
        FunctionSpec("adamw"),
        "optax optimizer; mu_dtype: bfloat16 is a keyword of adamw's that halves its first moment",
    )
    schedule: FunctionSpec = key(
        FunctionSpec("constant_schedule", {"value": 1e-6}),
        "optax schedule: learning rate by update",
    )
    grad_clip: float | None = key(1.0, "largest global gradient norm; null does not clip")
    max_skipped: int = key(
        3, "stop when more updates in a row had a non-finite gradient and were skipped"
    )


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic, where a function asks for values or returns."""

    path: str | None = key(
        None, "Hugging Face directory, with a value head or without; null takes model.path"
    )
    loss: FunctionSpec = key(FunctionSpec("clipped_value_loss"), "function in algorithms.values")
    reduce: FunctionSpec = key(FunctionSpec("token_mean"), "function in algorithms.reduce")
    warmup_steps: int = key(0, "steps in which the critic alone is updated")
    optim: OptimConfig = section(OptimConfig)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """The implicit reward model, where a function asks for reward_logprobs."""

    path: str | None = key(None, "Hugging Face directory; null takes model.path")
    loss: FunctionSpec = key(FunctionSpec("implicit_reward_loss"), "function in algorithms.values")
    reduce: FunctionSpec = key(
        FunctionSpec("sequence_mean_token_mean"), "function in algorithms.reduce"
    )
    optim: OptimConfig = section(OptimConfig)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a step's data are cut."""

    prompts_per_step: int = key(64, "P: prompts sampled in a step")
    prompts_per_minibatch: int | None = key(None, "prompts in one update; null takes all of them")
    epochs_per_step: int = key(1, "passes over a step's data")
    max_tokens_per_device: int = key(
        16384, "tokens in one forward and backward pass: a limit of memory, never exceeded"
    )


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Validation on data.validation."""

    before: bool = key(True, "validate before the first step")
    every: int = key(0, "validate every n steps; 0 only at the end")
    samples: int = key(1, "k: answers per prompt, for mean@k, best@k, maj@k")
    temperature: float = key(0.0, "0 takes the likeliest token")
    top_p: float = key(1.0, "nucleus mass")
    rows: int | None = key(None, "the first n rows only; null takes all")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints in run_dir/checkpoints."""

    every: int = key(0, "save every n steps; 0 only at the end")
    keep: int = key(2, "newest checkpoints to keep, besides the best by validation")
    grace_s: float = key(
        120.0, "seconds in which a run that gets SIGTERM comes to the end of its step and saves"
    )
    resume: str = key("auto", "auto continues from the newest checkpoint; never refuses to")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run says of itself, besides run_dir/metrics.jsonl."""

    tensorboard: bool = key(True, "write run_dir/tensorboard")
    wandb: str | None = key(None, "project at Weights & Biases; null does not log there")
    profile_steps: tuple[int, ...] = key(
        (), "steps whose trace and a summary of it go to run_dir/profile/step_<n>, as in [5]"
    )


MESH_AXES = ("stage", "expert", "data", "fsdp", "context", "tensor")
"""As `sharding.mesh.AXES`, here so that a config can be checked without jax."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """A device mesh: devices along each axis, of which one may be -1 and takes what is left."""

    stage: int = key(1, "stages of layers, one after another")
    expert: int = key(1, "parts of the experts; they split the batch, too")
    data: int = key(1, "copies of the model that share the batch")
    fsdp: int = key(-1, "parts of the batch that split parameters among them")
    context: int = key(1, "parts of each row of tokens")
    tensor: int = key(1, "parts of heads, feed-forward and vocabulary")
    first_device: int = key(0, "index of the first device")
    devices: int | None = key(None, "devices in all; null takes those that are left")


@dataclass(frozen=True, kw_only=True)
class RolloutSizes(MeshSizes):
    """The mesh of the engine: by default every device holds the whole model."""

    data: int = key(-1, "copies of the model that share the sequences")
    fsdp: int = key(1, "parts of the sequences that split parameters among them")


@dataclass(frozen=True, kw_only=True)
class SftMeshConfig:
    """The device mesh, and how arrays lie on it."""

    train: MeshSizes = section(MeshSizes)
    context_by: str = key("heads", "how attention sees rows that devices share: heads or keys")
    rules: dict[str, Any] = key({}, "mesh axes by logical axis, in place of the default rules")


@dataclass(frozen=True, kw_only=True)
class MeshConfig(SftMeshConfig):
    """The device meshes, and how arrays lie on them."""

    rollout: RolloutSizes = section(RolloutSizes)
    critic: MeshSizes | None = key(None, "of the critic; null: as train")
    reference: MeshSizes | None = key(None, "of the reference; null: as train")
    reward_model: MeshSizes | None = key(None, "of reward models; null: as train")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What waits in the host's memory while it is not used."""

    params: bool = key(False, "weights of the models that are trained")
    optimizer: bool = key(False, "the optimizers' states")
    reference: bool = key(False, "weights of the reference")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The nodes of a Ray cluster, and what happens when one is lost."""

    address: str | None = key(
        None, "host:port, ray://host:port or auto; null: RAY_ADDRESS, else this machine alone"
    )
    nodes: int = key(1, "nodes that train")
    processes_per_node: int = key(1, "training processes on each of them")
    devices: int | None = key(
        None, "devices of each training process; null: its part of the node's GPUs"
    )
    cpus: int = key(1, "CPUs that Ray sets aside for each process and engine")
    reward_tasks: int = key(
        0, "answers scored at once, in tasks on all nodes; 0: reward.workers of each process do it"
    )
    env: dict[str, Any] = key({}, "environment variables for all processes")
    start_timeout_s: float = key(300.0, "seconds for Ray and all nodes to be there")
    restarts: int = key(3, "times that the job, or an engine, is started again when one is lost")
    backoff_s: float = key(10.0, "seconds before the first new start; each further one waits twice")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run of `jaxrl_llm.train`."""

    run_dir: str = required("directory for everything that the run writes")
    seed: int = key(0, "seed of the data order and of sampling")
    steps: int | None = key(None, "steps in all; null takes epochs")
    epochs: int = key(1, "passes over the prompts, where steps is null")
    model: PolicyConfig = section(PolicyConfig)
    data: DataConfig = section(DataConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    optim: OptimConfig = section(OptimConfig)
    critic: CriticConfig = section(CriticConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    batch: BatchConfig = section(BatchConfig)
    mesh: MeshConfig = section(MeshConfig)
    offload: OffloadConfig = section(OffloadConfig)
    validation: ValidationConfig = section(ValidationConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    compilation_cache: bool = key(True, COMPILATION_CACHE)
    log: LogConfig = section(LogConfig)
    stall_timeout_s: float | None = key(3600.0, STALL_TIMEOUT)
    cluster: ClusterConfig | None = key(None, "run on a Ray cluster; null: on this machine")

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        batch, rollout = self.batch, self.rollout
        _at_least(self, 1, "rollout.samples_per_prompt rollout.max_new_tokens rollout.slots")
        _at_least(self, 1, "batch.prompts_per_step batch.epochs_per_step data.max_prompt_tokens")
        _at_least(self, 1, "batch.prompts_per_minibatch validation.samples validation.rows")
        _at_least(self, 0, "reward.workers validation.every rollout.dump_every")
        _at_least(self, 0, "validation.temperature rollout.top_k algorithm.kl_coef")
        _at_least(self, 0, "critic.warmup_steps critic.optim.max_skipped")
        _at_least(self, 0, "reward_model.optim.max_skipped")
        _at_least(self, 1, "algorithm.max_draws")
        minibatch = batch.prompts_per_minibatch or batch.prompts_per_step
        _require(
            batch.prompts_per_step % minibatch == 0,
            f"batch.prompts_per_step={batch.prompts_per_step} is not a multiple of "
            f"batch.prompts_per_minibatch={minibatch}; "
            f"take one of {', '.join(map(str, divisors(batch.prompts_per_step)))}",
        )
        _require(
            rollout.cache_gb is None or rollout.cache_gb > 0,
            f"rollout.cache_gb={rollout.cache_gb}, wanted a number above 0 or null",
        )
        longest = self.data.max_prompt_tokens + rollout.max_new_tokens
        _require(
            self.mesh.train.context != 1 or batch.max_tokens_per_device >= longest,
            f"batch.max_tokens_per_device={batch.max_tokens_per_device} can't hold the longest "
            f"sequence: data.max_prompt_tokens + rollout.max_new_tokens = {longest}",
        )
        _require(
            self.validation.samples == 1 or self.validation.temperature > 0,
            f"validation.samples={self.validation.samples} at validation.temperature=0 draws the "
            "same answer each time: raise the temperature, or take one sample",
        )
        _require(
            rollout.temperature > 0,
            f"rollout.temperature={rollout.temperature}, wanted a number above 0, to explore",
        )
        check_reward(self.reward)
        for name, top_p in (("rollout", rollout.top_p), ("validation", self.validation.top_p)):
            _require(0 < top_p <= 1, f"{name}.top_p={top_p}, wanted a number in (0, 1]")
        _require(
            not (self.validation.every and not self.data.validation),
            f"validation.every={self.validation.every} but data.validation names no file: "
            "name one, or set validation.every to 0",
        )
        _require(
            not (self.algorithm.kl_loss and self.algorithm.kl_reward),
            "algorithm.kl_loss and algorithm.kl_reward share kl_coef: set one of them to null",
        )
        _require(
            not (self.algorithm.bypass and self.algorithm.correction),
            "algorithm.bypass takes the engine's log-probs as the old ones, so that "
            "algorithm.correction has nothing to correct: remove one of them",
        )
        _require(
            self.algorithm.keep is None or self.steps is not None,
            "algorithm.keep draws as many prompts as it needs, so epochs say no number of steps: "
            "set steps",
        )
        check_engine(self)
        check_cluster(self)
        for name in ("critic", "reward_model"):
            _check_clip(f"{name}.optim.grad_clip", getattr(self, name).optim.grad_clip)
        check_shared(self)


@dataclass(frozen=True, kw_only=True)
class SftDataConfig:
    """Examples to imitate."""

    train: tuple[str, ...] = required("parquet or jsonl files with columns prompt and response")
    prepare: FunctionSpec | None = key(
        None, "preparation that writes the files when they are missing (jaxrl_llm.data.prepare)"
    )
    dataset: FunctionSpec = key(FunctionSpec("sft_rows"), "function from files to rows")
    max_tokens: int = key(1024, "the longest example, prompt and response")
    filter_overlong: bool = key(False, "drop longer examples; false makes them an error")
    shuffle: bool = key(True, "a new order in every epoch, from the seed")
    template: dict[str, Any] = key({}, "keywords for the chat template")


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig:
    """How the examples are cut."""

    examples_per_step: int = key(64, "examples in one update")
    max_tokens_per_device: int = key(
        16384, "tokens in one forward and backward pass: a limit of memory, never exceeded"
    )


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """A whole run of `jaxrl_llm.sft`."""

    run_dir: str = required("directory for everything that the run writes")
    export_to: str = required("Hugging Face directory to write at the end")
    seed: int = key(0, "seed of the data order and of random weights")
    steps: int | None = key(None, "updates in all; null takes epochs")
    epochs: int = key(1, "passes over the examples, where steps is null")
    model: ModelConfig = section(ModelConfig)
    data: SftDataConfig = section(SftDataConfig)
    optim: OptimConfig = section(OptimConfig)
    batch: SftBatchConfig = section(SftBatchConfig)
    mesh: SftMeshConfig = section(SftMeshConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    compilation_cache: bool = key(True, COMPILATION_CACHE)
    log: LogConfig = section(LogConfig)
    stall_timeout_s: float | None = key(3600.0, STALL_TIMEOUT)

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        _at_least(self, 1, "batch.examples_per_step data.max_tokens")
        _require(
            self.mesh.train.context != 1
            or self.batch.max_tokens_per_device >= self.data.max_tokens,
            f"batch.max_tokens_per_device={self.batch.max_tokens_per_device} can't hold the "
            f"longest example: data.max_tokens={self.data.max_tokens}",
        )
        _require(
            Path(self.export_to).resolve() != Path(self.run_dir).resolve(),
            f"export_to and run_dir are both {self.run_dir!r}: name two folders",
        )
        check_shared(self)


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """What bounds the requests to a server."""

    max_running: int = key(256, "requests at work at once; others wait")
    max_waiting: int = key(1024, "requests that wait; more are refused with status 429")
    max_answers: int = key(128, "answers that one request may ask for")
    max_body_mb: float = key(8.0, "megabytes of a request; more are refused with status 413")
    timeout_s: float = key(600.0, "seconds for one request, its wait included; then status 504")
    shutdown_s: float = key(30.0, "seconds for what is at work when the server is told to end")


@dataclass(frozen=True, kw_only=True)
class ServeMeshConfig:
    """The device mesh of a server, and how arrays lie on it."""

    rollout: RolloutSizes = section(RolloutSizes)
    rules: dict[str, Any] = key({}, "mesh axes by logical axis, in place of the default rules")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All of `jaxrl_llm.serve`."""

    model: str = required("Hugging Face directory: config.json, safetensors, tokenizer")
    name: str | None = key(None, "the model's name for clients; null takes model")
    dtype: str = key("float32", "of weights, cache and computation: float32 or bfloat16")
    slots: int = key(64, "sequences that the engine decodes at once")
    max_tokens: int | None = key(
        None, "the longest sequence, prompt and answer; null takes the model's own limit"
    )
    cache_gb: float | None = key(None, CACHE_GB)
    mesh: ServeMeshConfig = section(ServeMeshConfig)
    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0 listens to all machines")
    port: int = key(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = key(
        None,
        "what clients must send; null takes JAXRL_LLM_API_KEY of the environment, and asks for "
        "none where there is no such variable",
    )
    limits: LimitsConfig = section(LimitsConfig)

    def __post_init__(self) -> None:
        """Refuse what can't be served."""
        _at_least(self, 1, "slots max_tokens limits.max_running limits.max_answers")
        _at_least(self, 0, "limits.max_waiting limits.shutdown_s")
        _above_zero(self, "limits.max_body_mb limits.timeout_s cache_gb")
        check_dtype("dtype", self.dtype)
        _require(0 <= self.port < 2**16, f"port={self.port}, wanted 0 to {2**16 - 1}")
        _require(self.api_key != "", "api_key is empty, wanted a text or null")
        check_mesh(MeshConfig(rollout=self.mesh.rollout))


@dataclass(frozen=True, kw_only=True)
class EvaluateRewardConfig(ScoringConfig):
    """How answers are scored in an evaluation."""

    scorer: FunctionSpec = key(
        FunctionSpec("by_source"),
        "function (data_source, solution_str, ground_truth, extra_info) -> float or dict",
    )


@dataclass(frozen=True, kw_only=True)
class EngineMeshConfig:
    """The device mesh of an engine that stands alone."""

    rollout: RolloutSizes = section(RolloutSizes)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """A whole evaluation by `jaxrl_llm.evaluate`."""

    model: str = required(
        "Hugging Face directory or repository, or the folder of a run of train or sft"
    )
    data: tuple[str, ...] = required("parquet or jsonl files with verl's columns")
    out: str | None = key(
        None, "folder for metrics.json and samples.parquet; null: runs/evaluate/<date and time>"
    )
    step: int | None = key(None, "which checkpoint of a run; null takes the newest")
    seed: int = key(0, "seed of sampling")
    rows: int | None = key(None, "the first n rows only; null takes all")
    dataset: FunctionSpec = key(FunctionSpec("verl_rows"), "function from files to rows")
    template: dict[str, Any] = key({}, "keywords for the chat template")
    max_prompt_tokens: int | None = key(
        None, "drop prompts of more tokens; null takes all, and refuses what the model can't hold"
    )
    samples: int = key(1, "n: answers drawn for each prompt")
    k: tuple[int, ...] = key((), "k of pass@k and maj@k, up to n; none takes 2, 4, 8, … and n")
    max_new_tokens: int = key(512, "the longest answer")
    temperature: float = key(0.0, "softmax temperature; 0 takes the likeliest token")
    top_p: float = key(1.0, "nucleus: sample from the smallest set with this mass")
    top_k: int = key(0, "sample from the k likeliest tokens; 0 means all")
    min_p: float = key(0.0, "sample from tokens at least this share as likely as the likeliest")
    dtype: str = key("float32", "of weights, cache and computation: float32 or bfloat16")
    slots: int = key(256, "sequences that the engine decodes at once")
    cache_gb: float | None = key(None, CACHE_GB)
    reward: EvaluateRewardConfig = section(EvaluateRewardConfig)
    mesh: EngineMeshConfig = section(EngineMeshConfig)

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        _at_least(self, 1, "rows max_prompt_tokens samples max_new_tokens slots")
        _at_least(self, 0, "seed temperature top_k reward.workers")
        _require(len(self.data) > 0, "data names no file")
        _require(
            self.samples == 1 or self.temperature > 0,
            f"samples={self.samples} at temperature=0 draws the same answer each time: "
            "raise the temperature, or take one sample",
        )
        _require(
            all(1 <= k <= self.samples for k in self.k),
            f"k={list(self.k)}, wanted numbers from 1 to samples={self.samples}",
        )
        _require(0 < self.top_p <= 1, f"top_p={self.top_p}, wanted a number in (0, 1]")
        _require(0 <= self.min_p <= 1, f"min_p={self.min_p}, wanted a number in [0, 1]")
        _require(
            self.cache_gb is None or self.cache_gb > 0,
            f"cache_gb={self.cache_gb}, wanted a number above 0, or null",
        )
        check_dtype("dtype", self.dtype)
        check_scoring(self.reward)
        check_sizes("rollout", self.mesh.rollout)


def check_shared(config: TrainConfig | SftConfig) -> None:
    """Refuse contradictions in the groups that training and SFT share."""
    _at_least(config, 1, "steps epochs model.logprob_chunk checkpoint.keep")
    _at_least(config, 0, "seed checkpoint.every optim.max_skipped")
    _at_least(config, 0, "model.router_loss_coef model.router_bias_rate")
    _above_zero(config, "stall_timeout_s checkpoint.grace_s")
    _require(config.seed < 2**32, f"seed={config.seed}, wanted a number below 2**32")
    _require(len(config.data.train) > 0, "data.train names no file")
    check_dtype("model.dtype", config.model.dtype)
    check_adapter(config.model)
    _require(
        config.model.remat in POLICIES,
        f"model.remat={config.model.remat!r}, wanted one of {', '.join(POLICIES)}",
    )
    _require(
        config.model.attention in ("auto", "xla", "cudnn"),
        f"model.attention={config.model.attention!r}, wanted auto, xla or cudnn",
    )
    _require(
        config.checkpoint.resume in ("auto", "never"),
        f"checkpoint.resume={config.checkpoint.resume!r}, wanted auto or never",
    )
    _check_clip("optim.grad_clip", config.optim.grad_clip)
    for step in config.log.profile_steps:
        _require(
            step >= 1 and (config.steps is None or step <= config.steps),
            f"log.profile_steps={list(config.log.profile_steps)}, but {step} is not a step of the "
            f"run: wanted numbers from 1 to {config.steps or 'the last step'}",
        )
    check_mesh(config.mesh)


def check_mesh(mesh: SftMeshConfig) -> None:
    """Refuse sizes that are none."""
    _require(
        mesh.context_by in ("heads", "keys"),
        f"mesh.context_by={mesh.context_by!r}, wanted heads or keys",
    )
    for name, sizes in vars(mesh).items():
        if isinstance(sizes, MeshSizes):
            check_sizes(name, sizes)


def check_sizes(name: str, sizes: MeshSizes) -> None:
    """Refuse sizes of a mesh that are none."""
    of = {axis: getattr(sizes, axis) for axis in MESH_AXES}
    _require(
        list(of.values()).count(-1) <= 1 and all(s >= 1 or s == -1 for s in of.values()),
        f"mesh.{name}: {', '.join(f'{axis}={size}' for axis, size in of.items())}; "
        "wanted sizes of 1 or more, at most one of them -1",
    )
    _require(
        sizes.first_device >= 0 and (sizes.devices is None or sizes.devices > 0),
        f"mesh.{name}: first_device={sizes.first_device} and devices={sizes.devices}, "
        "wanted the index of a device, and a number of them or null",
    )


def check_dtype(name: str, dtype: str) -> None:
    """Refuse a compute dtype that is none."""
    fits = dtype in ("float32", "bfloat16")
    _require(fits, f"{name}={dtype!r}, wanted float32 or bfloat16")


def check_engine(config: TrainConfig) -> None:
    """Refuse an engine that there is not, and contradictions in its keys."""
    rollout = config.rollout
    _require(
        rollout.engine in ("native", "vllm"),
        f"rollout.engine={rollout.engine!r}, wanted native or vllm",
    )
    how = rollout.vllm
    _require(
        rollout.engine == "vllm" or how == VllmConfig(),
        "rollout.vllm is set, but rollout.engine is native: set it to vllm, or remove rollout.vllm",
    )
    _at_least(config, 1, "rollout.vllm.sidecars rollout.vllm.tensor_parallel")
    _at_least(config, 0, "rollout.vllm.restarts rollout.vllm.first_device")
    _above_zero(config, "rollout.vllm.start_timeout_s rollout.vllm.timeout_s")
    _require(
        rollout.slots % how.sidecars == 0,
        f"rollout.slots={rollout.slots} can't be shared evenly by the {how.sidecars} sidecars of "
        "rollout.vllm.sidecars",
    )
    _require(
        len(how.launch) in (0, 1, how.sidecars),
        f"rollout.vllm.launch has {len(how.launch)} commands, wanted one for all sidecars, or one "
        f"for each of the {how.sidecars}",
    )


def check_cluster(config: TrainConfig) -> None:
    """Refuse a cluster that can't be, and keys that need one."""
    cluster, rollout = config.cluster, config.rollout
    _at_least(config, 0, "rollout.nodes")
    _at_least(config, 1, "rollout.devices")
    _require(
        rollout.nodes == 0 or cluster is not None,
        f"rollout.nodes={rollout.nodes} needs a cluster: set cluster.nodes to the nodes that train",
    )
    _require(
        rollout.devices is None or rollout.nodes > 0,
        f"rollout.devices={rollout.devices} is of engines on nodes of their own: set rollout.nodes",
    )
    if cluster is None:
        return
    _at_least(config, 1, "cluster.nodes cluster.processes_per_node cluster.devices cluster.cpus")
    _at_least(config, 0, "cluster.restarts cluster.reward_tasks cluster.backoff_s")
    _above_zero(config, "cluster.start_timeout_s")
    processes = cluster.nodes * cluster.processes_per_node
    _require(
        cluster.reward_tasks % processes == 0,
        f"cluster.reward_tasks={cluster.reward_tasks}, wanted a multiple of the {processes} "
        "training processes",
    )
    sidecars = rollout.vllm.sidecars * rollout.vllm.tensor_parallel
    _require(
        rollout.engine == "native" or rollout.nodes > 0 or processes == 1,
        f"rollout.engine is vllm, but there are {processes} training processes: give vLLM nodes of "
        "its own (rollout.nodes), or train by one process",
    )
    _require(
        rollout.devices is None or sidecars <= rollout.devices,
        f"rollout.devices={rollout.devices}, but the sidecars of rollout.vllm take {sidecars}",
    )


def check_scoring(reward: ScoringConfig) -> None:
    """Refuse limits that allow nothing."""
    _require(reward.timeout_s > 0, f"reward.timeout_s={reward.timeout_s}, wanted a number above 0")
    for name in ("memory_gb", "max_processes"):
        limit = getattr(reward, name)
        wanted = "wanted a number above 0, or null"
        _require(limit is None or 0 < limit < math.inf, f"reward.{name}={limit}, {wanted}")


def check_reward(reward: RewardConfig) -> None:
    """Refuse contradictions between the keys of scoring."""
    check_scoring(reward)
    _require(
        reward.scorer is not None or reward.model is not None,
        "reward.scorer and reward.model are both null: nothing scores the answers",
    )
    _require(
        reward.scorer is not None or not reward.components,
        "reward.components are what a scorer reports, but reward.scorer is null",
    )


def check_adapter(model: ModelConfig) -> None:
    """Refuse contradictions between a model's adapter and its other keys."""
    if model.lora is not None:
        _require(model.lora.rank >= 1, f"model.lora.rank={model.lora.rank}, wanted 1 or more")
        alpha = model.lora.alpha
        _require(alpha > 0, f"model.lora.alpha={alpha}, wanted a number above 0")
        _require(len(model.lora.targets) > 0, "model.lora.targets names no matrix")
    _require(
        not (model.lora and model.adapter),
        "model.adapter brings its own rank, alpha and targets: remove model.lora",
    )
    _require(
        not (model.random_init and (model.lora or model.adapter)),
        "model.random_init draws a model that is not kept, so that no adapter fits it later: "
        "remove model.lora and model.adapter, or name a model that has weights",
    )


def divisors(n: int) -> list[int]:
    """Return the divisors of n.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, n + 1) if n % d == 0]


def _check_clip(name: str, clip: float | None) -> None:
    _require(clip is None or clip > 0, f"{name}={clip}, wanted a number above 0 or null")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _at_least(config: Any, least: int, names: str) -> None:
    for name, value in _values(config, names):
        fits = value is None or value >= least
        _require(fits, f"{name}={value}, wanted {least} or more")


def _above_zero(config: Any, names: str) -> None:
    for name, value in _values(config, names):
        _require(value is None or value > 0, f"{name}={value}, wanted a number above 0")


def _values(config: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, operator.attrgetter(name)(config)) for name in names.split()]
