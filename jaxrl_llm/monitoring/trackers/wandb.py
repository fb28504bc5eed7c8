"""Weights & Biases."""

import logging
import os
from typing import Any

from jaxrl_llm.monitoring.trackers.records import Plain, TrackedRun, Tracker
from jaxrl_llm.monitoring.trackers.services import (
    ServiceRun,
    has_login,
    import_client,
    is_reachable,
)

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


class WeightsAndBiases(ServiceRun):
    """A run at Weights & Biases, or in a folder that can be sent there."""

    name = "Weights & Biases"

    def _found_settings(self) -> dict[str, Any]:
        if self._settings["mode"] is None and "WANDB_MODE" not in os.environ:
            return {"mode": self._mode()}
        return {}

    def _table(self, columns: list[str], rows: list[list[Plain]]) -> Any:
        return self._client.Table(columns=columns, data=rows, allow_mixed_types=True)

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
