"""The keys of sampling from the policy."""

from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.load import key, section

CACHE_GB = (
    "GB of each device for the engine's keys and values at most; null is enough for the longest "
    "sequence in every slot"
)


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
    engine_args: dict[str, Any] = key({}, "more keywords of vLLM's AsyncEngineArgs")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How the policy is sampled."""

    engine: str = key("native", "native, in this process, or vllm, in sidecars")
    samples_per_prompt: int = key(8, "G: answers drawn for each prompt")
    max_new_tokens: int = key(512, "the longest answer")
    temperature: float = key(1.0, "softmax temperature, in the sampler and in the trainer's passes")
    top_p: float = key(1.0, "nucleus: sample from the smallest set with this mass")
    top_k: int = key(0, "sample from the k likeliest tokens; 0 means all")
    max_running_sequences: int = key(256, "sequences that the engine decodes at once")
    kv_cache_gb: float | None = key(None, CACHE_GB)
    logprob_tolerance: float = key(
        0.05, "the run stops when the engine's and the trainer's log-probs differ more on average"
    )
    dump_every: int = key(0, "write the rollouts of every n-th step to parquet; 0 never")
    nodes: int = key(
        0, "nodes of the cluster that only sample, each with an engine; 0 samples where it trains"
    )
    devices: int | None = key(None, "devices of each of these engines; null: the node's GPUs")
    vllm: VllmConfig = section(VllmConfig)
