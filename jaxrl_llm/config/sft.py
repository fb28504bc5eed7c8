"""A whole run of `jaxrl_llm.sft`: its keys, and the rules between them."""

from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.config.checks import at_least, require
from jaxrl_llm.config.load import key, required, section
from jaxrl_llm.config.sections.batch import SftBatchConfig
from jaxrl_llm.config.sections.checkpoint import CheckpointConfig
from jaxrl_llm.config.sections.data import SftDataConfig
from jaxrl_llm.config.sections.log import LogConfig
from jaxrl_llm.config.sections.mesh import SftMeshConfig
from jaxrl_llm.config.sections.model import ModelConfig
from jaxrl_llm.config.sections.optim import OptimConfig
from jaxrl_llm.config.shared import COMPILATION_CACHE, STALL_TIMEOUT, check_shared


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
        at_least(self, 1, "batch.examples_per_step data.max_tokens")
        require(
            self.mesh.train.context != 1
            or self.batch.max_tokens_per_device >= self.data.max_tokens,
            f"batch.max_tokens_per_device={self.batch.max_tokens_per_device} can't hold the "
            f"longest example: data.max_tokens={self.data.max_tokens}",
        )
        require(
            Path(self.export_to).resolve() != Path(self.run_dir).resolve(),
            f"export_to and run_dir are both {self.run_dir!r}: name two folders",
        )
        check_shared(self)
