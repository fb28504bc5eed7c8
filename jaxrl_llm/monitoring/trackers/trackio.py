"""Trackio, whose dashboard is local or a Space at Hugging Face."""

from typing import Any

from jaxrl_llm.monitoring.trackers.records import TrackedRun, TrackedStep, Tracker, as_table
from jaxrl_llm.monitoring.trackers.services import import_client


def trackio(
    run: TrackedRun,
    *,
    project: str = "jaxrl_llm",
    group: str | None = None,
    name: str | None = None,
    space_id: str | None = None,
) -> Tracker:
    """Log to Trackio; a folder that is continued continues its run there.

    Args:
        run: to be tracked.
        project: its project.
        group: of runs that belong together.
        name: of the run, by which it is continued; None is its folder's, with a few digits that
            other folders of that name don't have.
        space_id: `user/space` at Hugging Face; None: what `TRACKIO_SPACE_ID` says, else a database
            on this machine.

    Raises:
        ConfigError: the package is not installed.
    """
    settings = {
        "project": project,
        "group": group,
        "name": name or f"{run.folder.name}-{run.id[:6]}",
        "config": dict(run.config),
        "resume": "allow",
        "space_id": space_id,
        "embed": False,
    }
    return Trackio(import_client("trackio", "trackio"), settings)


class Trackio:
    """A run in a Trackio project.

    Args:
        client: the package.
        settings: arguments of its `init`.
    """

    name = "Trackio"

    def __init__(self, client: Any, settings: dict[str, Any]) -> None:
        """Begin nothing yet."""
        self._client, self._settings, self._run = client, settings, None

    def open(self) -> None:
        """Begin the run, or continue it."""
        self._run = self._client.init(**self._settings)

    def write(self, record: TrackedStep, /) -> None:
        """Write a step."""
        values: dict[str, Any] = dict(record.metrics)
        for name, seen in record.histograms.items():
            bins = (seen.counts, seen.edges)
            values[f"histograms/{name}"] = self._client.Histogram(np_histogram=bins)
        if record.answers:
            columns, rows = as_table(record.answers)
            values["answers"] = self._client.Table(columns=columns, data=rows)
        assert self._run is not None
        self._run.log(values, step=record.step)

    def close(self) -> None:
        """Write what is left."""
        assert self._run is not None
        self._run.finish()
