"""The keys of checkpoints."""

from dataclasses import dataclass

from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints in run_dir/checkpoints."""

    every: int = key(0, "save every n steps; 0 only at the end")
    keep: int = key(2, "newest checkpoints to keep, besides the best by validation")
    grace_s: float = key(
        120.0, "seconds in which a run that gets SIGTERM comes to the end of its step and saves"
    )
    resume: str = key("auto", "auto continues from the newest checkpoint; never refuses to")
