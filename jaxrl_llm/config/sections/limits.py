"""The keys of what bounds a server's requests."""

from dataclasses import dataclass

from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """What bounds the requests to a server."""

    max_running: int = key(256, "requests at work at once; others wait")
    max_waiting: int = key(1024, "requests that wait; more are refused with status 429")
    max_answers: int = key(128, "answers that one request may ask for")
    max_body_mb: float = key(8.0, "megabytes of a request; more are refused with status 413")
    timeout_s: float = key(600.0, "seconds for one request, its wait included; then status 504")
    shutdown_s: float = key(30.0, "seconds for what is at work when the server is told to end")
