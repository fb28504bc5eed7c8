"""The keys of what bounds a server's requests."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Number, Section


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LimitsConfig(Section):
    """What bounds the requests to a server."""

    max_running: int = Field(
        default=256, ge=1, description="requests that run at once; others wait"
    )
    max_waiting: int = Field(
        default=1024, ge=0, description="requests that wait; more are refused with status 429"
    )
    max_answers: int = Field(
        default=128, ge=1, description="completions that one request may ask for"
    )
    max_body_mb: Number = Field(
        default=8.0,
        gt=0,
        description="megabytes of a request's body; larger ones are refused with status 413",
    )
    timeout_s: Number = Field(
        default=600.0,
        gt=0,
        description="seconds for one request, waiting included; then status 504",
    )
    shutdown_s: Number = Field(
        default=30.0,
        ge=0,
        description="seconds for running requests to finish when the server gets SIGTERM",
    )
