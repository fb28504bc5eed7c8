"""Weights & Biases."""

import logging
import os
from typing import Any

from jaxrl_llm.monitoring.trackers.records import TrackedRun, TrackedStep, Tracker, as_table
from jaxrl_llm.monitoring.trackers.services import has_login, import_client, is_reachable

log = logging.getLogger(__name__)


def wandb(
    run: TrackedRun,
    *,
    project: str = "jaxrl_llm",
    entity: str | None = None,
    group: str | None = None,
    name: str | None = None,
    mode: str | None = None,
) -> Tracker:
    """Log to Weights & Biases; a folder that is continued continues its run there.

    Args:
        run: to be tracked.
        project: its project.
        entity: user or team; None is the user's default.
        group: of runs that belong together.
        name: of the run; None is its folder's.
        mode: `online`, `offline` or `disabled`; None: what `WANDB_MODE` says; where it is
            not set, offline without a key or a network, and else what wandb's settings say.

    Raises:
        ConfigError: the package is not installed.
    """
    settings = {
        "project": project,
        "entity": entity,
        "group": group,
        "id": run.id[:16],
        "name": name or run.folder.name,
        "dir": run.folder,
        "config": dict(run.config),
        "resume": "allow",  # the folder's own run, when it is continued
        "mode": mode,
    }
    return WeightsAndBiases(import_client("wandb", "wandb"), settings)


class WeightsAndBiases:
    """A run at Weights & Biases, or in a folder that can be sent there.

    Args:
        client: the package.
        settings: arguments of its `init`.
    """

    name = "Weights & Biases"

    def __init__(self, client: Any, settings: dict[str, Any]) -> None:
        """Begin nothing yet."""
        self._client, self._settings, self._run = client, settings, None

    def open(self) -> None:
        """Begin the run, or continue it."""
        settings = dict(self._settings)
        if settings["mode"] is None and "WANDB_MODE" not in os.environ:
            settings["mode"] = self._mode()
        self._run = self._client.init(**settings)

    def write(self, record: TrackedStep, /) -> None:
        """Send a step."""
        values: dict[str, Any] = dict(record.metrics)
        for name, seen in record.histograms.items():
            bins = (seen.counts, seen.edges)
            values[f"histograms/{name}"] = self._client.Histogram(np_histogram=bins)
        if record.answers:
            columns, rows = as_table(record.answers)
            table = self._client.Table(columns=columns, data=rows, allow_mixed_types=True)
            values["answers"] = table
        assert self._run is not None
        self._run.log(values, step=record.step)

    def close(self) -> None:
        """Send what is left."""
        assert self._run is not None
        self._run.finish()

    def _mode(self) -> str | None:
        url = self._client.setup().settings.base_url
        keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
        if not (any(map(os.environ.get, keys)) or has_login(url)):
            why = "there is no API key (wandb login)"
        elif not is_reachable(url):
            why = f"{url} can't be reached"
        else:
            return None  # what the user's settings say, as `wandb offline` writes them
        folder = self._settings["dir"] / "wandb"
        log.warning(
            "Weights & Biases is offline, as %s; to send the run later: wandb sync %s",
            why,
            folder / "offline-run-*",
        )
        return "offline"
