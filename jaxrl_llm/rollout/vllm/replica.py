"""The place of one sidecar among several: its process, its weights and its requests."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

from jaxrl_llm.rollout.vllm.pending import PendingRequest
from jaxrl_llm.rollout.vllm.process import Sidecar, SidecarLost


class VllmStats(NamedTuple):
    """What the engine does now, and has done since it was made.

    Attributes:
        outstanding: requests without an answer.
        restarts: how often a sidecar was started again.
    """

    outstanding: int
    restarts: int

    @property
    def in_flight(self) -> int:
        """Return how many requests have no answer yet."""
        return self.outstanding


@dataclasses.dataclass(eq=False)
class Replica:
    """A copy of the model: a sidecar, and after it the next. Its engine locks what it does here.

    Attributes:
        number: among the replicas of an engine.
        process: the sidecar that runs or begins to.
        sidecar: the same, once it is ready.
        version: of its weights; None while it has none that are whole.
        pending: requests that are to be answered here.
        sent: those of them that the sidecar has, by number.
    """

    number: int
    process: Sidecar | None = None
    sidecar: Sidecar | None = None
    version: int | None = None
    pending: dict[PendingRequest, None] = dataclasses.field(default_factory=dict)
    sent: dict[int, PendingRequest] = dataclasses.field(default_factory=dict)

    def add(self, request: PendingRequest) -> None:
        """Take a request, and send it if the sidecar can answer now."""
        self.pending[request] = None
        self._send(request)

    def send_pending(self) -> None:
        """Send the requests that wait for a sidecar with weights."""
        for request in self.pending:
            if request.number is None:
                self._send(request)

    def remove(self, request: PendingRequest) -> bool:
        """Forget a request; return whether the sidecar is at it."""
        self.pending.pop(request, None)
        return request.number is not None and self.sent.pop(request.number, None) is not None

    def lose_sidecar(self) -> None:
        """Forget the sidecar; what it had not answered waits for the next."""
        self.sidecar = self.version = None
        for request in self.sent.values():
            request.number = None
        self.sent = {}

    def clear(self) -> list[PendingRequest]:
        """Forget all requests, and return them."""
        requests = list(self.pending)
        self.pending, self.sent = {}, {}
        return requests

    def _send(self, request: PendingRequest) -> None:
        if self.sidecar is None or self.version is None:
            return
        with contextlib.suppress(SidecarLost):  # it is sent again to the next
            message: dict[str, Any] = request.message()
            number = self.sidecar.send("generate", request.data(), **message)
            self.sent[number], request.number = request, number
