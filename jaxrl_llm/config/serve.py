"""All of `jaxrl_llm.serve`: its keys, and the rules between them."""

from dataclasses import dataclass

from jaxrl_llm.config.checks import above_zero, at_least, require
from jaxrl_llm.config.load import key, required, section
from jaxrl_llm.config.sections.limits import LimitsConfig
from jaxrl_llm.config.sections.mesh import MeshConfig, ServeMeshConfig, check_mesh
from jaxrl_llm.config.sections.model import check_dtype
from jaxrl_llm.config.sections.rollout import CACHE_GB


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All of `jaxrl_llm.serve`."""

    model: str = required("Hugging Face directory: config.json, safetensors, tokenizer")
    name: str | None = key(None, "the model's name for clients; null takes model")
    dtype: str = key("float32", "of weights, cache and computation: float32 or bfloat16")
    max_running_sequences: int = key(64, "sequences that the engine decodes at once")
    max_tokens: int | None = key(
        None, "the longest sequence, prompt and answer; null takes the model's own limit"
    )
    kv_cache_gb: float | None = key(None, CACHE_GB)
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
        at_least(self, 1, "max_running_sequences max_tokens limits.max_running limits.max_answers")
        at_least(self, 0, "limits.max_waiting limits.shutdown_s")
        above_zero(self, "limits.max_body_mb limits.timeout_s kv_cache_gb")
        check_dtype("dtype", self.dtype)
        require(0 <= self.port < 2**16, f"port={self.port}, wanted 0 to {2**16 - 1}")
        require(self.api_key != "", "api_key is empty, wanted a text or null")
        check_mesh(MeshConfig(rollout=self.mesh.rollout))
