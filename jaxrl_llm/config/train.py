"""A whole run of `jaxrl_llm.train`: its keys, and the rules between them."""

from dataclasses import dataclass

from jaxrl_llm.config.checks import above_zero, at_least, require
from jaxrl_llm.config.load import key, required, section
from jaxrl_llm.config.sections.algorithm import AlgorithmConfig
from jaxrl_llm.config.sections.batch import BatchConfig
from jaxrl_llm.config.sections.checkpoint import CheckpointConfig
from jaxrl_llm.config.sections.cluster import ClusterConfig
from jaxrl_llm.config.sections.critic import CriticConfig
from jaxrl_llm.config.sections.data import DataConfig
from jaxrl_llm.config.sections.implicit_reward_model import ImplicitRewardModelConfig
from jaxrl_llm.config.sections.log import LogConfig
from jaxrl_llm.config.sections.mesh import MeshConfig
from jaxrl_llm.config.sections.model import PolicyConfig
from jaxrl_llm.config.sections.offload import OffloadConfig
from jaxrl_llm.config.sections.optim import OptimConfig, check_clip
from jaxrl_llm.config.sections.reward import RewardConfig, check_reward
from jaxrl_llm.config.sections.rollout import RolloutConfig, VllmConfig
from jaxrl_llm.config.sections.validation import ValidationConfig
from jaxrl_llm.config.shared import COMPILATION_CACHE, STALL_TIMEOUT, check_shared


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
    implicit_reward_model: ImplicitRewardModelConfig = section(ImplicitRewardModelConfig)
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
        at_least(
            self,
            1,
            "rollout.samples_per_prompt rollout.max_new_tokens rollout.max_running_sequences",
        )
        at_least(self, 1, "batch.prompts_per_step batch.epochs_per_step data.max_prompt_tokens")
        at_least(self, 1, "batch.prompts_per_minibatch validation.samples validation.rows")
        at_least(self, 0, "reward.workers validation.every rollout.dump_every")
        at_least(self, 0, "validation.temperature rollout.top_k algorithm.kl_coef")
        at_least(self, 0, "critic.warmup_steps critic.optim.max_skipped")
        at_least(self, 0, "implicit_reward_model.optim.max_skipped")
        at_least(self, 1, "algorithm.max_generation_batches")
        minibatch = batch.prompts_per_minibatch or batch.prompts_per_step
        require(
            batch.prompts_per_step % minibatch == 0,
            f"batch.prompts_per_step={batch.prompts_per_step} is not a multiple of "
            f"batch.prompts_per_minibatch={minibatch}; "
            f"take one of {', '.join(map(str, divisors(batch.prompts_per_step)))}",
        )
        require(
            rollout.kv_cache_gb is None or rollout.kv_cache_gb > 0,
            f"rollout.kv_cache_gb={rollout.kv_cache_gb}, wanted a number above 0 or null",
        )
        longest = self.data.max_prompt_tokens + rollout.max_new_tokens
        require(
            self.mesh.train.context != 1 or batch.max_tokens_per_device >= longest,
            f"batch.max_tokens_per_device={batch.max_tokens_per_device} can't hold the longest "
            f"sequence: data.max_prompt_tokens + rollout.max_new_tokens = {longest}",
        )
        require(
            self.validation.samples == 1 or self.validation.temperature > 0,
            f"validation.samples={self.validation.samples} at validation.temperature=0 draws the "
            "same answer each time: raise the temperature, or take one sample",
        )
        require(
            rollout.temperature > 0,
            f"rollout.temperature={rollout.temperature}, wanted a number above 0, to explore",
        )
        check_reward(self.reward)
        for name, top_p in (("rollout", rollout.top_p), ("validation", self.validation.top_p)):
            require(0 < top_p <= 1, f"{name}.top_p={top_p}, wanted a number in (0, 1]")
        require(
            not (self.validation.every and not self.data.validation),
            f"validation.every={self.validation.every} but data.validation names no file: "
            "name one, or set validation.every to 0",
        )
        require(
            not (self.algorithm.kl_loss and self.algorithm.kl_reward),
            "algorithm.kl_loss and algorithm.kl_reward share kl_coef: set one of them to null",
        )
        require(
            not (self.algorithm.use_rollout_logprobs and self.algorithm.correction),
            "algorithm.use_rollout_logprobs takes the engine's log-probs as the old ones, so that "
            "algorithm.correction has nothing to correct: remove one of them",
        )
        require(
            self.algorithm.group_filter is None or self.steps is not None,
            "algorithm.group_filter draws as many prompts as it needs, so epochs say no number of "
            "steps: set steps",
        )
        check_engine(self)
        check_cluster(self)
        for name in ("critic", "implicit_reward_model"):
            check_clip(f"{name}.optim.grad_clip", getattr(self, name).optim.grad_clip)
        check_shared(self)


def check_engine(config: TrainConfig) -> None:
    """Refuse an engine that there is not, and contradictions in its keys."""
    rollout = config.rollout
    require(
        rollout.engine in ("native", "vllm"),
        f"rollout.engine={rollout.engine!r}, wanted native or vllm",
    )
    how = rollout.vllm
    require(
        rollout.engine == "vllm" or how == VllmConfig(),
        "rollout.vllm is set, but rollout.engine is native: set it to vllm, or remove rollout.vllm",
    )
    at_least(config, 1, "rollout.vllm.sidecars rollout.vllm.tensor_parallel")
    at_least(config, 0, "rollout.vllm.restarts rollout.vllm.first_device")
    above_zero(config, "rollout.vllm.start_timeout_s rollout.vllm.timeout_s")
    require(
        rollout.max_running_sequences % how.sidecars == 0,
        f"rollout.max_running_sequences={rollout.max_running_sequences} can't be shared evenly by "
        f"the {how.sidecars} sidecars of rollout.vllm.sidecars",
    )
    require(
        len(how.launch) in (0, 1, how.sidecars),
        f"rollout.vllm.launch has {len(how.launch)} commands, wanted one for all sidecars, or one "
        f"for each of the {how.sidecars}",
    )


def check_cluster(config: TrainConfig) -> None:
    """Refuse a cluster that can't be, and keys that need one."""
    cluster, rollout = config.cluster, config.rollout
    at_least(config, 0, "rollout.nodes")
    at_least(config, 1, "rollout.devices")
    require(
        rollout.nodes == 0 or cluster is not None,
        f"rollout.nodes={rollout.nodes} needs a cluster: set cluster.nodes to the nodes that train",
    )
    require(
        rollout.devices is None or rollout.nodes > 0,
        f"rollout.devices={rollout.devices} is of engines on nodes of their own: set rollout.nodes",
    )
    if cluster is None:
        return
    at_least(config, 1, "cluster.nodes cluster.processes_per_node cluster.devices cluster.cpus")
    at_least(config, 0, "cluster.restarts cluster.reward_tasks cluster.backoff_s")
    above_zero(config, "cluster.start_timeout_s")
    processes = cluster.nodes * cluster.processes_per_node
    require(
        cluster.reward_tasks % processes == 0,
        f"cluster.reward_tasks={cluster.reward_tasks}, wanted a multiple of the {processes} "
        "training processes",
    )
    sidecars = rollout.vllm.sidecars * rollout.vllm.tensor_parallel
    require(
        rollout.engine == "native" or rollout.nodes > 0 or processes == 1,
        f"rollout.engine is vllm, but there are {processes} training processes: give vLLM nodes of "
        "its own (rollout.nodes), or train by one process",
    )
    require(
        rollout.devices is None or sidecars <= rollout.devices,
        f"rollout.devices={rollout.devices}, but the sidecars of rollout.vllm take {sidecars}",
    )


def divisors(n: int) -> list[int]:
    """Return the divisors of n.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, n + 1) if n % d == 0]
