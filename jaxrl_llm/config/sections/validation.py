"""The keys of validation."""

from dataclasses import dataclass

from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Validation on data.validation."""

    before: bool = key(True, "validate before the first step")
    every: int = key(0, "validate every n steps; 0 only at the end")
    samples: int = key(1, "k: answers per prompt, for mean@k, best@k, maj@k")
    temperature: float = key(0.0, "0 takes the likeliest token")
    top_p: float = key(1.0, "nucleus mass")
    rows: int | None = key(None, "the first n rows only; null takes all")
