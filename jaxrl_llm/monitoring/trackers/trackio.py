"""Trackio, whose dashboard is local or a Space at Hugging Face."""

from jaxrl_llm.monitoring.trackers.records import TrackedRun, Tracker
from jaxrl_llm.monitoring.trackers.services import ServiceRun, import_client


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


class Trackio(ServiceRun):
    """A run in a Trackio project."""

    name = "Trackio"
