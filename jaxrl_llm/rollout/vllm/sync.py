"""Weights on their way from the parcel into sidecars."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.rollout.vllm.process import RefusedError, Sidecar, SidecarLost
from jaxrl_llm.rollout.vllm.weights import Entry, Parcel


class Group:
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
            found, refusals = [], []
            for number, wait in waits.items():
                try:
                    found.append(wait())
                except SidecarLost:
                    self.members.pop(number, None)
                except RefusedError as error:  # raised when all have answered
                    refusals.append(error)
            if refusals:
                raise refusals[0]
            return found

        return finish


def push(
    group: Group,
    parcel: Parcel,
    buckets: Iterable[list[Entry]],
    version: int,
) -> None:
    """Let paused sidecars take a parcel, and compare what they echo with what was sent.

    Args:
        group: of sidecars.
        parcel: the weights.
        buckets: what of them is there already, as it comes.
        version: of the weights.

    Raises:
        EngineError: a sidecar does not take the weights, or got others.
    """
    through = "memory"
    if not all(sidecar.shared for sidecar in group.members.values()):
        through = "connection"
    _check(parcel, group.ask("start", through=through))
    before: Callable[[], list[Any]] = list
    for bucket in buckets:  # each is written while the one before is taken
        _check(parcel, before())
        first, last = bucket[0], bucket[-1]
        data = None
        if through == "connection":
            data = parcel.data(first.offset, last.offset + last.bytes - first.offset)
        before = group.begin("take", data, entries=_told(bucket), offset=first.offset)
    _check(parcel, before())
    told = _told(parcel.entries)
    _check(parcel, group.ask("finish", entries=told, version=str(version)))


def _told(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [entry._asdict() for entry in entries]


def _check(parcel: Parcel, answers: Iterable[list[dict[str, Any]]]) -> None:
    for ranks in answers:
        for rank in ranks:
            if "error" in rank:
                raise RefusedError(f"vLLM: {rank['error']}")
            parcel.check(rank["found"])
