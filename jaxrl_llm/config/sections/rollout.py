"""The keys of sampling from the policy."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Number, Section, Several, Table
from jaxrl_llm.config.sections.agent import AgentConfig

CACHE_GB = (
    "GB of each device for the KV cache at most; null is enough if all "
    "running sequences have the longest length"
)

TOLERANCE, FP8_TOLERANCE, CACHE_TOLERANCE = 0.05, 0.4, 0.1
"""Mean differences of log-probs, in nats, at which a run stops: by default, with fp8 matrices, and
with low precision in the cache, where int8 made 0.026 (docs/performance.md)."""

KV_CACHE_DTYPES = {"native": ("auto", "int8"), "vllm": ("auto", "fp8")}
"""Of keys and values, by engine."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VllmConfig(Section):
    """The vLLM sidecars, where rollout.engine is vllm."""

    python: str | None = Field(
        default=None,
        description="interpreter that has vLLM; null takes the one of jaxrl_llm.rollout.vllm.setup",
    )
    sidecars: int = Field(default=1, ge=1, description="processes, each with a copy of the model")
    tensor_parallel: int = Field(
        default=1, ge=1, description="GPUs that share a copy; on CPUs, processes"
    )
    first_device: int | None = Field(
        default=None,
        ge=0,
        description=(
            "the first GPU of the first sidecar, the others follow; counted among "
            "CUDA_VISIBLE_DEVICES of `env`, else the trainer's; null: 0 for several sidecars "
            "without `launch`, else all see all"
        ),
    )
    sleep: bool = Field(
        default=False,
        description="free the GPUs' memory between rollouts, if training shares them",
    )
    start_timeout_s: Number = Field(
        default=600.0, gt=0, description="seconds for a sidecar to be ready"
    )
    timeout_s: Number = Field(
        default=120.0,
        gt=0,
        description="seconds without a message or a token until a sidecar counts as hung",
    )
    restarts: int = Field(default=3, ge=0, description="restarts of a sidecar before the run stops")
    launch: Several[str] = Field(
        default=(),
        description="command prefix of each sidecar, or one for all, as in [ssh node2]",
    )
    host: str = Field(default="127.0.0.1", description="address at which sidecars find the trainer")
    env: Table = Field(default={}, description="environment variables for the sidecars")
    engine_args: Table = Field(default={}, description="more keywords of vLLM's AsyncEngineArgs")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplingConfig(Section):
    """The engine of a run, and how it samples."""

    engine: Literal["native", "vllm"] = Field(
        default="native", description="native, in this process, or vllm, in sidecars"
    )
    samples_per_prompt: int = Field(
        default=8, ge=1, description="G: responses sampled for each prompt"
    )
    max_new_tokens: int = Field(
        default=512,
        ge=1,
        description="largest number of tokens of a response; of an episode, all after its prompt",
    )
    temperature: Number = Field(
        default=1.0,
        gt=0,
        description="softmax temperature, in the engine and in the trainer's log-probs",
    )
    top_p: Number = Field(
        default=1.0, gt=0, le=1, description="nucleus: sample from the smallest set with this mass"
    )
    top_k: int = Field(
        default=0, ge=0, description="sample from the k most likely tokens; 0 means all"
    )
    max_running_sequences: int = Field(
        default=256, ge=1, description="sequences that the engine decodes at once"
    )
    kv_cache_gb: Number | None = Field(default=None, gt=0, description=CACHE_GB)
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto",
        description=(
            "of keys and values: auto, that of the engine; int8 with a scale for each token and "
            "head (native) or vLLM's fp8 hold about twice the tokens of bfloat16"
        ),
    )
    quantization: Literal["none", "fp8"] = Field(
        default="none",
        description=(
            "of the engine's matrices: none, or fp8, in which both engines hold half of the bytes "
            "of bfloat16 and multiply by float8 tensor cores"
        ),
    )
    logprob_tolerance: Number | None = Field(
        default=None,
        description=(
            "largest mean difference of the engine's and the trainer's log-probs; above it the "
            f"run stops; null: {TOLERANCE}, or {FP8_TOLERANCE} with quantization: fp8, or "
            f"{CACHE_TOLERANCE} with int8 or fp8 in the cache"
        ),
    )
    dump_every: int = Field(
        default=0,
        ge=0,
        description=(
            "write the rollouts of every n-th step to parquet; those of the first and the last "
            "step are always kept, with 0 these alone"
        ),
    )
    staleness: int = Field(
        default=0,
        ge=0,
        description=(
            "K: answers may be begun K steps before the one that trains on them, so that later "
            "prompts fill the places that the longest answers leave empty; no token is more than "
            "K updates old"
        ),
    )
    at_push: Literal["reread", "keep", "finish"] = Field(
        default="reread",
        description=(
            "what becomes of answers in flight when new weights are pushed: reread, they go on "
            "under these, after their tokens are read again; keep, they do so with the keys and "
            "values that the weights before have computed; finish, they end before the push"
        ),
    )
    turns: int | None = Field(
        default=None,
        ge=0,
        description=(
            "of an engine with devices of its own: turns that it takes while a step is trained, "
            "so that no time decides what is drawn; null: as many as it can"
        ),
    )
    schedule: str | None = Field(
        default=None,
        description="schedule.jsonl of a run with staleness, which is replayed; null: none",
    )
    nodes: int = Field(
        default=0,
        ge=0,
        description=(
            "nodes of the cluster that only sample, each with an engine; 0 samples where it trains"
        ),
    )
    devices: int | None = Field(
        default=None, ge=1, description="devices of each of these engines; null: the node's GPUs"
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig(AgentConfig, SamplingConfig):  # the keys of the last come first
    """How the policy is sampled."""
