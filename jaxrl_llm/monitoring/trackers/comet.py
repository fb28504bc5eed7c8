"""Comet."""

import logging
from typing import Any

from jaxrl_llm.monitoring.trackers.records import (
    TrackedRun,
    TrackedStep,
    Tracker,
    as_table,
    dotted_keys,
)
from jaxrl_llm.monitoring.trackers.services import import_client, is_reachable

log = logging.getLogger(__name__)

SERVER = "https://www.comet.com"


def comet(
    run: TrackedRun,
    *,
    project: str = "jaxrl_llm",
    workspace: str | None = None,
    name: str | None = None,
    online: bool | None = None,
) -> Tracker:
    """Log to Comet; a folder that is continued continues its experiment there.

    Args:
        run: to be tracked.
        project: its project.
        workspace: user or team; None is the user's default.
        name: of the experiment; None is the folder's.
        online: whether to send it at once, or to keep it in the run's folder; None: online where
            there are a key and a network.

    Raises:
        ConfigError: the package is not installed.
    """
    settings = {"project_name": project, "workspace": workspace, "experiment_key": run.id}
    client = import_client("comet", "comet_ml")
    return Comet(client, run, settings, name or run.folder.name, online)


class Comet:
    """An experiment at Comet, or in a file that can be sent there.

    Args:
        client: the package.
        run: to be tracked.
        settings: arguments of its `start`.
        title: name of the experiment.
        online: whether to send it at once; None: where that is possible.
    """

    name = "Comet"

    def __init__(
        self,
        client: Any,
        run: TrackedRun,
        settings: dict[str, Any],
        title: str,
        online: bool | None,
    ) -> None:
        """Begin nothing yet."""
        self._client, self._tracked, self._settings = client, run, settings
        self._title, self._online = title, online
        self._experiment: Any = None

    def open(self) -> None:
        """Begin the experiment, or continue it."""
        own = {f"auto_{what}_logging": False for what in ("metric", "param")}
        config = self._client.ExperimentConfig(
            name=self._title,
            offline_directory=str(self._tracked.folder / "comet"),
            auto_output_logging=False,  # the terminal's lines are the run's own
            log_code=False,
            log_graph=False,
            parse_args=False,
            display_summary_level=0,  # else the whole config is printed at the end
            **own,
        )
        online = self._can_send() if self._online is None else self._online
        self._experiment = self._client.start(
            **self._settings, online=online, experiment_config=config
        )
        self._experiment.log_parameters(dotted_keys(self._tracked.config))

    def write(self, record: TrackedStep, /) -> None:
        """Send a step."""
        self._experiment.log_metrics(dict(record.metrics), step=record.step)
        for name, seen in record.histograms.items():
            histogram = self._client.Histogram()
            histogram.add(seen.centres, counts=seen.counts.tolist())
            self._experiment.log_histogram_3d(
                histogram, name=f"histograms/{name}", step=record.step
            )
        if record.answers:
            columns, rows = as_table(record.answers)
            name = f"answers_step_{record.step:06d}.csv"
            self._experiment.log_table(name, tabular_data=rows, headers=columns)

    def close(self) -> None:
        """Send what is left."""
        self._experiment.end()

    def _can_send(self) -> bool:
        config = self._client.get_config()
        url = config["comet.url_override"] or SERVER
        if not config["comet.api_key"]:
            why = "there is no API key (comet login)"
        elif not is_reachable(url):
            why = f"{url} can't be reached"
        else:
            return True
        log.warning(
            "Comet is offline, as %s; to send the experiment later: comet upload %s/*.zip",
            why,
            self._tracked.folder / "comet",
        )
        return False
