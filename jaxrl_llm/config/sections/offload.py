"""The keys of what waits in the host's memory."""

from dataclasses import dataclass

from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What waits in the host's memory while it is not used."""

    params: bool = key(False, "weights of the models that are trained")
    optimizer: bool = key(False, "the optimizers' states")
    reference: bool = key(False, "weights of the reference")
