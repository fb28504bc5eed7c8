"""SwanLab."""

import logging
from typing import Any

from jaxrl_llm.monitoring.trackers.records import Distribution, Plain, TrackedRun, Tracker
from jaxrl_llm.monitoring.trackers.services import ServiceRun, import_client, is_reachable

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


class SwanLab(ServiceRun):
    """A run at SwanLab, or in a folder that can be sent there."""

    name = "SwanLab"

    def _found_settings(self) -> dict[str, Any]:
        return {"mode": self._settings["mode"] or self._mode()}

    def _histogram(self, seen: Distribution) -> Any:
        bars = self._client.echarts.Bar()
        bars.add_xaxis([f"{x:.4g}" for x in seen.centres])
        bars.add_yaxis("count", seen.counts.tolist())
        return bars

    def _table(self, columns: list[str], rows: list[list[Plain]]) -> Any:
        table = self._client.echarts.Table()
        table.add(columns, rows)
        return table

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
