"""MLflow."""

import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_llm.monitoring.trackers.records import (
    TrackedRun,
    TrackedStep,
    Tracker,
    as_table,
    dotted_keys,
)
from jaxrl_llm.monitoring.trackers.services import import_client

Item = TypeVar("Item")

MOST_METRICS, MOST_PARAMS = 1000, 100
"""What MLflow takes at once."""
LONGEST_PARAM = 500
"""Characters; MLflow before 2.8 takes no more, and the whole config is a file of the run."""

TAG = "jaxrl_llm.id"


def mlflow(
    run: TrackedRun,
    *,
    tracking_uri: str | None = None,
    experiment: str = "jaxrl_llm",
    name: str | None = None,
) -> Tracker:
    """Log to MLflow; a folder that is continued continues its run there.

    Args:
        run: to be tracked.
        tracking_uri: of the server or database; None: what `MLFLOW_TRACKING_URI` says, else
            `mlflow/mlflow.db` in the run's folder.
        experiment: to which the run belongs.
        name: of the run; None is its folder's.

    Raises:
        ConfigError: a package is not installed.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    client = import_client("mlflow", "mlflow", *([] if uri else ["sqlalchemy", "alembic"]))
    return Mlflow(client, run, uri, experiment, name or run.folder.name)


class Mlflow:
    """A run in an MLflow store.

    Args:
        client: the package.
        run: to be tracked.
        uri: of the store; None for one in the run's folder.
        experiment: its name.
        title: name of the run.
    """

    name = "MLflow"

    def __init__(
        self, client: Any, run: TrackedRun, uri: str | None, experiment: str, title: str
    ) -> None:
        """Begin nothing yet."""
        self._module, self._tracked, self._uri = client, run, uri
        self._experiment, self._title = experiment, title
        self._client: Any = None
        self._id = ""

    def open(self) -> None:
        """Begin the run, or continue it."""
        uri, artifacts = self._uri, None
        if uri is None:
            folder = Path(self._tracked.folder).resolve() / "mlflow"
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder}/mlflow.db", (folder / "artifacts").as_uri()
        self._client = self._module.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            known.experiment_id
            if known
            else self._client.create_experiment(self._experiment, artifact_location=artifacts)
        )
        mine = f"tags.`{TAG}` = '{self._tracked.id}'"
        runs = self._client.search_runs([experiment], filter_string=mine, max_results=1)
        self._id = runs[0].info.run_id if runs else self._begin(experiment)
        self._client.update_run(self._id, status="RUNNING")

    def write(self, record: TrackedStep, /) -> None:
        """Write a step; answers and distributions become files of the run."""
        entities, now = self._module.entities, int(time.time() * 1000)
        metrics = [
            entities.Metric(metric_name(name), float(value), now, record.step)
            for name, value in record.metrics.items()
        ]
        for part in parts(metrics, MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)
        if record.answers:
            columns, rows = as_table(record.answers)
            table = {"columns": columns, "data": rows}  # as `mlflow.log_table` writes it
            self._client.log_dict(self._id, table, f"answers/step_{record.step:06d}.json")
        if record.histograms:
            shown = {
                name: {"counts": seen.counts.tolist(), "edges": seen.edges.tolist()}
                for name, seen in record.histograms.items()
            }
            self._client.log_dict(self._id, shown, f"histograms/step_{record.step:06d}.json")

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id)

    def _begin(self, experiment: str) -> str:
        tags = {TAG: self._tracked.id}
        run = self._client.create_run(experiment, tags=tags, run_name=self._title).info.run_id
        params = [
            self._module.entities.Param(metric_name(key), str(value)[:LONGEST_PARAM])
            for key, value in dotted_keys(self._tracked.config).items()
        ]
        for part in parts(params, MOST_PARAMS):
            self._client.log_batch(run, params=part)
        self._client.log_dict(run, dict(self._tracked.config), "config.json")
        return run


def metric_name(name: str) -> str:
    """Return a name that MLflow takes.

    >>> metric_name("val-core/gsm8k/acc/mean@8")
    'val-core/gsm8k/acc/mean_at_8'
    """
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))


def parts(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    """Yield pieces of a sequence, in order.

    >>> list(parts([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    for number in range(math.ceil(len(items) / most)):
        yield items[number * most : (number + 1) * most]
