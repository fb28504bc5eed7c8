"""Weight sync: from the buffer in the host's memory into sidecars, with checksums."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.rollout.vllm.process import RefusedError, Sidecar, SidecarLost
from jaxrl_llm.rollout.vllm.weights import Entry, WeightBuffer


class SidecarGroup:
    """Sidecars that are asked for the same; one that is lost on the way is left out from then on.

    Args:
        members: by number.
    """

    def __init__(self, members: Mapping[int, Sidecar]) -> None:
        """Take all of them."""
        self.members = dict(members)

    def ask(self, op: str, **fields: Any) -> list[Any]:
        """Ask all at once, wait for all, and return their answers.

        Raises:
            RefusedError: one could not do it.
        """
        return self.begin(op, **fields)()

    def begin(
        self, op: str, data: memoryview | None = None, **fields: Any
    ) -> Callable[[], list[Any]]:
        """Ask all at once; return what waits for their answers, and raises as `ask`."""
        waits = {}
        for number, sidecar in list(self.members.items()):
            try:
                waits[number] = sidecar.ask(op, data, **fields)
            except SidecarLost:
                del self.members[number]

        def finish() -> list[Any]:
            answers, refusals = [], []
            for number, wait in waits.items():
                try:
                    answers.append(wait())
                except SidecarLost:
                    self.members.pop(number, None)
                except RefusedError as error:  # raised when all have answered
                    refusals.append(error)
            if refusals:
                raise refusals[0]
            return answers

        return finish


def send_weights(
    group: SidecarGroup,
    buffer: WeightBuffer,
    buckets: Iterable[list[Entry]],
    version: int,
) -> None:
    """Let paused sidecars take new weights, and compare their checksums with those sent.

    Args:
        group: of sidecars.
        buffer: the weights.
        buckets: those of its buckets that are written, as they come.
        version: of the weights.

    Raises:
        EngineError: a sidecar does not take the weights, or got others.
    """
    through = "memory"
    if not all(sidecar.shared for sidecar in group.members.values()):
        through = "connection"
    _check(buffer, group.ask("start", through=through))
    before: Callable[[], list[Any]] = list
    for bucket in buckets:  # each is written while the one before is taken
        _check(buffer, before())
        first, last = bucket[0], bucket[-1]
        data = None
        if through == "connection":
            data = buffer.data(first.offset, last.offset + last.bytes - first.offset)
        before = group.begin("take", data, entries=_as_messages(bucket), offset=first.offset)
    _check(buffer, before())
    entries = _as_messages(buffer.entries)
    _check(buffer, group.ask("finish", entries=entries, version=str(version)))


def _as_messages(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [entry._asdict() for entry in entries]


def _check(buffer: WeightBuffer, answers: Iterable[list[dict[str, Any]]]) -> None:
    for ranks in answers:
        for rank in ranks:
            if "error" in rank:
                raise RefusedError(f"vLLM: {rank['error']}")
            buffer.verify(rank["checksums"])
