"""SwanLab."""

import logging
from typing import Any

from jaxrl_llm.monitoring.trackers.records import (
    Distribution,
    TrackedRun,
    TrackedStep,
    Tracker,
    as_table,
)
from jaxrl_llm.monitoring.trackers.services import import_client, is_reachable

log = logging.getLogger(__name__)


def swanlab(
    run: TrackedRun,
    *,
    project: str = "jaxrl_llm",
    workspace: str | None = None,
    group: str | None = None,
    name: str | None = None,
    mode: str | None = None,
) -> Tracker:
    """Log to SwanLab; a folder that is continued continues its run there.

    Args:
        run: to be tracked.
        project: its project.
        workspace: user or organization; None is the user's own.
        group: of runs that belong together.
        name: of the run; None is its folder's.
        mode: `online`, `local`, `offline` or `disabled`; None: what `SWANLAB_MODE` says, else
            online where there are a key and a network, and offline where not.

    Raises:
        ConfigError: the package is not installed.
    """
    settings = {
        "project": project,
        "workspace": workspace,
        "group": group,
        "name": name or run.folder.name,
        "id": run.id,
        "resume": "allow",
        "config": dict(run.config),
        "log_dir": str(run.folder / "swanlab"),
        "mode": mode,
    }
    return SwanLab(import_client("swanlab", "swanlab"), settings)


class SwanLab:
    """A run at SwanLab, or in a folder that can be sent there.

    Args:
        client: the package.
        settings: arguments of its `init`.
    """

    name = "SwanLab"

    def __init__(self, client: Any, settings: dict[str, Any]) -> None:
        """Begin nothing yet."""
        self._client, self._settings, self._run = client, settings, None

    def open(self) -> None:
        """Begin the run, or continue it."""
        mode = self._settings["mode"] or self._mode()
        self._run = self._client.init(**{**self._settings, "mode": mode})

    def write(self, record: TrackedStep, /) -> None:
        """Send a step."""
        values: dict[str, Any] = dict(record.metrics)
        for name, seen in record.histograms.items():
            values[f"histograms/{name}"] = self._bars(seen)
        if record.answers:
            table = self._client.echarts.Table()
            table.add(*as_table(record.answers))
            values["answers"] = table
        assert self._run is not None
        self._run.log(values, step=record.step)

    def close(self) -> None:
        """Send what is left."""
        assert self._run is not None
        self._run.finish()

    def _bars(self, seen: Distribution) -> Any:
        bars = self._client.echarts.Bar()
        bars.add_xaxis([f"{x:.4g}" for x in seen.centres])
        bars.add_yaxis("count", seen.counts.tolist())
        return bars

    def _mode(self) -> str:
        known = self._client.Settings()  # of the environment and `swanlab login`
        if known.mode != "online":
            return known.mode
        if not known.api_key:
            why = "there is no API key (swanlab login)"
        elif not is_reachable(known.api_host):
            why = f"{known.api_host} can't be reached"
        else:
            return "online"
        log.warning(
            "SwanLab is offline, as %s; to send the run later: swanlab sync %s/run-*",
            why,
            self._settings["log_dir"],
        )
        return "offline"
