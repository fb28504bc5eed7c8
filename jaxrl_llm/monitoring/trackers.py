"""Trackers by name: TensorBoard, W&B, MLflow, Comet, SwanLab, Trackio; and what they are given.

A tracker function is called with a `TrackedRun`, has keyword settings, and returns a sink of
`TrackedStep`: an object with `name`, `open`, `write` and `close`, which a thread of its own calls.
Nothing begins before `open`.
"""

import contextlib
import hashlib
import importlib
import itertools
import logging
import math
import netrc
import os
import re
import socket
import struct
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError, described_error
from jaxrl_llm.config.functions import FunctionSpec, described_failure, load_function
from jaxrl_llm.config.load import as_tree, dotted_items, without_secrets
from jaxrl_llm.config.programs import RunConfig
from jaxrl_llm.monitoring.writer import Sink
from jaxrl_llm.sharding.distributed import run_on_first

__all__ = ["comet", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]


BINS = 64
LARGEST = 1e38
"""Values beyond it are counted as this one; the range of float32."""

Plain = bool | int | float | str | None


class TrackedRun(NamedTuple):
    """The run that a tracker function is called with.

    Attributes:
        folder: of the run.
        config: the resolved config, as nested mappings, without its secrets.
        first_step: the first one that is written; an earlier run of this folder may have written
            this step and later ones before it was killed.
    """

    folder: Path
    config: Mapping[str, Any]
    first_step: int

    @property
    def id(self) -> str:
        """Return 32 hexadecimal digits that a run has again when its folder is continued."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:32]


class Distribution(NamedTuple):
    """How many values lie where.

    Attributes:
        counts: values in each bin [n].
        edges: of the bins, ascending [n + 1].
        total: sum of the values.
        squares: sum of their squares.
    """

    counts: np.ndarray
    edges: np.ndarray
    total: float
    squares: float

    @property
    def centres(self) -> np.ndarray:
        """Return the middle of each bin [n]."""
        return (self.edges[1:] + self.edges[:-1]) / 2


class TrackedStep(NamedTuple):
    """A step, as a tracker is to write it.

    Attributes:
        step: its number.
        metrics: numbers by name.
        answers: rows of a table, each a mapping of columns to text, numbers or None.
        histograms: distributions by name.
    """

    step: int
    metrics: Mapping[str, float]
    answers: Sequence[Mapping[str, Plain]] = ()
    histograms: Mapping[str, Distribution] = {}


Tracker = Sink[TrackedStep]
"""What a tracker function returns."""

KEY = "log.trackers"


ALWAYS_ON = {
    "console": "the terminal has a line for each step in any case",
    "file": "metrics.jsonl in run_dir has every step in any case",
}
"""Names of verl's that no run here can do without."""


def load_trackers(specs: Sequence[FunctionSpec], run: TrackedRun) -> list[Tracker]:
    """Return a run's trackers, none of which is open.

    It is called before anything is loaded, to see that it works, and when the run begins.

    Args:
        specs: tracker functions, each called with the run.
        run: to be tracked.

    Raises:
        ConfigError: a function can't be found, called or used, or a package is not installed.
    """
    trackers = []
    for spec in specs:
        if spec.given is None and spec.fn in ALWAYS_ON:
            raise ConfigError(f"{KEY}: remove {spec.fn!r}, {ALWAYS_ON[spec.fn]}")
        make = load_function(spec, functions.TRACKERS, passed=None, key=KEY)
        try:
            tracker = make(run)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{KEY}: {spec.fn!r}: {described_failure(error, make)}") from error
        if not isinstance(tracker, Sink):
            raise ConfigError(
                f"{KEY}: expected from {spec.fn!r} an object with name, open, write and close, got "
                f"a {type(tracker).__name__}"
            )
        trackers.append(tracker)
    return trackers


def check_trackers(config: RunConfig) -> None:
    """See that a run's trackers can be used, in the process that will have them.

    Raises:
        ConfigError: a function can't be found, called or used, or a package is not installed.
    """
    run = TrackedRun(Path(config.run_dir), without_secrets(as_tree(config)), first_step=0)
    run_on_first(lambda: load_trackers(config.log.trackers, run) and None)


def distribution(values: np.ndarray) -> Distribution | None:
    """Return the distribution of the finite values in an array, or None where there is none.

    >>> distribution(np.array([1.0, 1.0, 3.0, np.nan])).counts.sum()
    np.int64(3)
    """
    flat = np.asarray(values, np.float64).ravel()
    flat = np.clip(flat[np.isfinite(flat)], -LARGEST, LARGEST)
    if not flat.size:
        return None
    low, high = float(flat.min()), float(flat.max())
    narrowest = max(1e-6 * max(abs(low), abs(high)), 1e-12)  # floats must tell the bins apart
    counts, edges = np.histogram(flat, BINS, range=(low, max(high, low + narrowest)))
    return Distribution(counts, edges, float(flat.sum()), float(np.square(flat).sum()))


def plain_rows(answers: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Plain], ...]:
    """Return rows with their texts and numbers; columns with other values are left out.

    >>> plain_rows([{"answer": "4", "score": np.float32(1), "tokens": [7, 8]}])
    ({'answer': '4', 'score': 1.0},)
    """
    rows = []
    for answer in answers:
        row: dict[str, Plain] = {}
        for name, given in answer.items():
            value = given.item() if isinstance(given, np.generic) else given
            if isinstance(value, str):
                row[str(name)] = value.encode(errors="replace").decode()  # half a character
            elif isinstance(value, float):
                row[str(name)] = value if math.isfinite(value) else None
            elif value is None or isinstance(value, int):
                row[str(name)] = value
        rows.append(row)
    return tuple(rows)


def as_table(rows: Sequence[Mapping[str, Plain]]) -> tuple[list[str], list[list[Plain]]]:
    """Return the columns of rows, and their values; None where a row has no such column.

    >>> as_table([{"answer": "4"}, {"answer": "5", "score": 1.0}])
    (['answer', 'score'], [['4', None], ['5', 1.0]])
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def dotted_keys(tree: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the values of a nested mapping by their dotted keys; lists as text, without nulls.

    >>> dotted_keys({"a": {"b": 1, "c": [2, 3]}, "d": None})
    {'a.b': 1, 'a.c': '[2, 3]'}
    """
    return {
        key: value if isinstance(value, bool | int | float) else str(value)
        for key, value in dotted_items(tree)
        if value is not None
    }


REACHED_S = 10.0
"""Seconds that a service has to answer."""

log = logging.getLogger(__name__)


def import_client(tracker: str, *packages: str) -> Any:
    """Return the first of a tracker's packages.

    Raises:
        ConfigError: one of them is not installed, or broken.
    """
    modules = []
    for name in packages:
        try:
            modules.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"log.trackers: {tracker!r} needs the package {error.name or name}: "
                f"pip install 'jaxrl_llm[{tracker}]'"
            ) from error
        except Exception as error:
            raise ConfigError(
                f"log.trackers: {tracker!r} can't import {name}: {described_error(error)}"
            ) from error
    return modules[0]


def is_reachable(url: str) -> bool:
    """Tell whether a web server answers at all, by the proxy if there is one."""
    try:
        with urllib.request.urlopen(url, timeout=REACHED_S):
            return True
    except urllib.error.HTTPError as error:  # an answer
        error.close()
        return True
    except (OSError, ValueError):
        return False


def has_login(url: str) -> bool:
    """Tell whether the user's netrc has a login for a server, as `wandb login` writes it."""
    host = urllib.parse.urlsplit(url).hostname or ""
    for name in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(Path(name).expanduser())).authenticators(host):
                return True
    return False


class Service:
    """A run of a service, whose package is the client.

    Args:
        client: the package.
        run: to be tracked.
        settings: of the run there.

    Attributes:
        name: of the service, for messages.
    """

    name: str

    def __init__(self, client: Any, run: TrackedRun, settings: dict[str, Any]) -> None:
        """Begin nothing yet."""
        self._client, self._tracked, self._settings = client, run, settings
        self._run: Any = None

    def _can_send(self, url: str, key: Any, login: str, later: str) -> bool:
        """Tell whether there are a key and a network; else say how to send what is kept."""
        if key and is_reachable(url):
            return True
        why = f"{url} can't be reached" if key else f"there is no API key ({login})"
        log.warning("%s is offline, as %s; to send %s", self.name, why, later)
        return False


class LikeWandb(Service):
    """A run of a service whose package has the interface of Weights & Biases."""

    def open(self) -> None:
        """Begin the run, or continue it."""
        self._run = self._client.init(**{**self._settings, **self._found_settings()})

    def write(self, record: TrackedStep, /) -> None:
        """Write a step."""
        values: dict[str, Any] = dict(record.metrics)
        for name, seen in record.histograms.items():
            values[f"histograms/{name}"] = self._histogram(seen)
        if record.answers:
            values["answers"] = self._table(*as_table(record.answers))
        self._run.log(values, step=record.step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()

    def _found_settings(self) -> dict[str, Any]:
        """Return settings that are found out when the run begins, which may take a while."""
        return {}

    def _histogram(self, seen: Distribution) -> Any:
        return self._client.Histogram(np_histogram=(seen.counts, seen.edges))

    def _table(self, columns: list[str], rows: list[list[Plain]]) -> Any:
        return self._client.Table(columns=columns, data=rows)


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
    client = import_client("comet", "comet_ml")
    settings = {
        "name": name or run.folder.name,
        "online": online,
        "project_name": project,
        "workspace": workspace,
        "experiment_key": run.id,
    }
    return Comet(client, run, settings)


class Comet(Service):
    """An experiment at Comet, or in a file that can be sent there."""

    name = "Comet"

    def open(self) -> None:
        """Begin the experiment, or continue it."""
        settings = dict(self._settings)
        title, online = settings.pop("name"), settings.pop("online")
        config = self._client.ExperimentConfig(
            name=title,
            auto_metric_logging=False,
            auto_param_logging=False,
            offline_directory=str(self._tracked.folder / "comet"),
            auto_output_logging=False,  # the terminal's lines are the run's own
            log_code=False,
            log_graph=False,
            parse_args=False,
            display_summary_level=0,  # else the whole config is printed at the end
        )
        known = self._client.get_config()
        if online is None:
            online = self._can_send(
                known["comet.url_override"] or "https://www.comet.com",
                known["comet.api_key"],
                "comet login",
                f"the experiment later: comet upload {self._tracked.folder / 'comet'}/*.zip",
            )
        self._run = self._client.start(**settings, online=online, experiment_config=config)
        self._run.log_parameters(dotted_keys(self._tracked.config))

    def write(self, record: TrackedStep, /) -> None:
        """Send a step."""
        self._run.log_metrics(dict(record.metrics), step=record.step)
        for name, seen in record.histograms.items():
            histogram = self._client.Histogram()
            histogram.add(seen.centres, counts=seen.counts.tolist())
            self._run.log_histogram_3d(histogram, name=f"histograms/{name}", step=record.step)
        if record.answers:
            columns, rows = as_table(record.answers)
            name = f"answers_step_{record.step:06d}.csv"
            self._run.log_table(name, tabular_data=rows, headers=columns)

    def close(self) -> None:
        """Send what is left."""
        self._run.end()


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
    settings = {"uri": uri, "experiment": experiment, "name": name or run.folder.name}
    return Mlflow(client, run, settings)


class Mlflow(Service):
    """A run in an MLflow store."""

    name = "MLflow"

    def open(self) -> None:
        """Begin the run, or continue it."""
        uri, name, artifacts = self._settings["uri"], self._settings["experiment"], None
        if uri is None:
            folder = Path(self._tracked.folder).resolve() / "mlflow"
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder}/mlflow.db", (folder / "artifacts").as_uri()
        self._store = self._client.MlflowClient(tracking_uri=uri)
        known = self._store.get_experiment_by_name(name)
        experiment = (
            known.experiment_id
            if known
            else self._store.create_experiment(name, artifact_location=artifacts)
        )
        mine = f"tags.`{TAG}` = '{self._tracked.id}'"
        runs = self._store.search_runs([experiment], filter_string=mine, max_results=1)
        self._run = runs[0].info.run_id if runs else self._begin(experiment)
        self._store.update_run(self._run, status="RUNNING")

    def write(self, record: TrackedStep, /) -> None:
        """Write a step; answers and distributions become files of the run."""
        entities, now = self._client.entities, int(time.time() * 1000)
        metrics = [
            entities.Metric(metric_name(name), float(value), now, record.step)
            for name, value in record.metrics.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._store.log_batch(self._run, metrics=metrics[start : start + MOST_METRICS])
        if record.answers:
            columns, rows = as_table(record.answers)
            table = {"columns": columns, "data": rows}  # as `mlflow.log_table` writes it
            self._store.log_dict(self._run, table, f"answers/step_{record.step:06d}.json")
        if record.histograms:
            shown = {
                name: {"counts": seen.counts.tolist(), "edges": seen.edges.tolist()}
                for name, seen in record.histograms.items()
            }
            self._store.log_dict(self._run, shown, f"histograms/step_{record.step:06d}.json")

    def close(self) -> None:
        """Mark the run as ended."""
        self._store.set_terminated(self._run)

    def _begin(self, experiment: str) -> str:
        tags = {TAG: self._tracked.id}
        run = self._store.create_run(
            experiment, tags=tags, run_name=self._settings["name"]
        ).info.run_id
        params = [
            self._client.entities.Param(metric_name(key), str(value)[:LONGEST_PARAM])
            for key, value in dotted_keys(self._tracked.config).items()
        ]
        for start in range(0, len(params), MOST_PARAMS):
            self._store.log_batch(run, params=params[start : start + MOST_PARAMS])
        self._store.log_dict(run, dict(self._tracked.config), "config.json")
        return run


def metric_name(name: str) -> str:
    """Return a name that MLflow takes.

    >>> metric_name("val-core/gsm8k/acc/mean@8")
    'val-core/gsm8k/acc/mean_at_8'
    """
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))


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
    return SwanLab(import_client("swanlab", "swanlab"), run, settings)


class SwanLab(LikeWandb):
    """A run at SwanLab, or in a folder that can be sent there."""

    name = "SwanLab"

    def _found_settings(self) -> dict[str, Any]:
        if self._settings["mode"]:
            return {}
        known = self._client.Settings()  # of the environment and `swanlab login`
        later = f"the run later: swanlab sync {self._settings['log_dir']}/run-*"
        if known.mode != "online":
            return {"mode": known.mode}
        is_sent = self._can_send(known.api_host, known.api_key, "swanlab login", later)
        return {"mode": "online" if is_sent else "offline"}

    def _histogram(self, seen: Distribution) -> Any:
        bars = self._client.echarts.Bar()
        bars.add_xaxis([f"{x:.4g}" for x in seen.centres])
        bars.add_yaxis("count", seen.counts.tolist())
        return bars

    def _table(self, columns: list[str], rows: list[list[Plain]]) -> Any:
        table = self._client.echarts.Table()
        table.add(columns, rows)
        return table


HEADLINES = ("critic/score/mean", "train/loss")
"""Metrics beside the hyper-parameters in TensorBoard, where a run has them."""

MARKUP = frozenset("\\`*_{}[]()<>#+-.!|&~:$^=\"'/@")
"""What Markdown or HTML may read as more than itself."""


def tensorboard(run: TrackedRun) -> Tracker:
    """Write event files to `tensorboard` in the run's folder."""
    return TensorBoard(run)


def markdown_table(rows: Sequence[Mapping[str, Plain]]) -> str:
    """Return a Markdown table in which a text stands as it is, whatever it looks like.

    >>> print(markdown_table([{"answer": "<b>|", "score": 0.5}]))
    | answer | score |
    |---|---|
    | &#60;b&#62;&#124; | 0&#46;5 |
    """
    columns, values = as_table(rows)
    lines = [[escaped(name) for name in columns]]
    lines += [["" if value is None else escaped(str(value)) for value in row] for row in values]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def escaped(text: str) -> str:
    """Return a text as one line of Markdown.

    >>> escaped("1.\\n[x](y)")
    '1&#46;<br>&#91;x&#93;&#40;y&#41;'
    """
    lines = ("".join(f"&#{ord(c)};" if c in MARKUP else c for c in x) for x in text.splitlines())
    return "<br>".join(lines)


class TensorBoard:
    """Event files in a folder; a step is one event, which is written at once.

    Readers stop at an event that is broken, so a file that could not be written is cut back to its
    last whole event, and the next event begins a new file. Its name sorts behind the others,
    whatever the clock says by then.

    Args:
        run: whose config is shown as text and as hyper-parameters.
    """

    name = "TensorBoard"

    def __init__(self, run: TrackedRun) -> None:
        """Import the library; nothing is written yet."""
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import histogram_raw, hparams, scalar, text

        keys = dotted_keys(run.config)
        listing = "\n".join(f"    {key}: {value}" for key, value in keys.items())  # as markdown
        self._about: list[Any] = []
        if keys:
            self._about = [text("config", listing), *hparams(keys, dict.fromkeys(HEADLINES))]

        self._protocol: Any = event_pb2
        self._scalar, self._text, self._histogram = scalar, text, histogram_raw
        self._checksum = masked_crc32c
        self._folder, self._step, self._whole = run.folder / "tensorboard", run.first_step, 0
        started = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._names = (f"{started}.{number:06}" for number in itertools.count())
        self._file: FileIO | None = None

    def open(self) -> None:
        """Begin a file, with the mark that hides what an earlier run wrote of these steps."""
        started = self._protocol.SessionLog(status=self._protocol.SessionLog.START)
        self._append(self._protocol.Event(step=self._step, session_log=started))
        for summary in self._about:
            self._append(self._protocol.Event(step=self._step, summary=summary))

    def write(self, record: TrackedStep, /) -> None:
        """Write a step."""
        event = self._protocol.Event(step=record.step)
        for name, value in record.metrics.items():
            event.summary.MergeFrom(self._scalar(name, value))
        for name, seen in record.histograms.items():
            event.summary.MergeFrom(
                self._histogram(
                    f"histograms/{name}",
                    min=seen.edges[0],
                    max=seen.edges[-1],
                    num=seen.counts.sum(),
                    sum=seen.total,
                    sum_squares=seen.squares,
                    bucket_limits=seen.edges[1:].tolist(),
                    bucket_counts=seen.counts.tolist(),
                )
            )
        if record.answers:
            event.summary.MergeFrom(self._text("answers", markdown_table(record.answers)))
        self._append(event)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, event: Any) -> None:
        event.wall_time = time.time()
        content = self._framed(event)
        if self._file is None:
            version = self._protocol.Event(wall_time=event.wall_time, file_version="brain.Event:2")
            content = self._framed(version) + content
            self._file, self._whole = self._new_file(), 0
        try:
            left = memoryview(content)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._leave_file(self._file)
            raise
        self._whole += len(content)

    def _framed(self, event: Any) -> bytes:
        """Return an event as it stands in a file: its length and itself, each with a checksum."""
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        parts = [part + struct.pack("<I", self._checksum(part)) for part in (length, content)]
        return b"".join(parts)

    def _new_file(self) -> FileIO:
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(FileExistsError):
                return (self._folder / next(self._names)).open("xb", buffering=0)

    def _leave_file(self, file: FileIO) -> None:
        """Leave a file with whole events only; the next event begins another one."""
        self._file = None
        with contextlib.suppress(OSError):
            if self._whole:
                file.truncate(self._whole)
            else:
                Path(str(file.name)).unlink()
        with contextlib.suppress(OSError):
            file.close()


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
    return Trackio(import_client("trackio", "trackio"), run, settings)


class Trackio(LikeWandb):
    """A run in a Trackio project."""

    name = "Trackio"


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
    return WeightsAndBiases(import_client("wandb", "wandb"), run, settings)


class WeightsAndBiases(LikeWandb):
    """A run at Weights & Biases, or in a folder that can be sent there."""

    name = "Weights & Biases"

    def _found_settings(self) -> dict[str, Any]:
        if self._settings["mode"] is not None or "WANDB_MODE" in os.environ:
            return {}
        url = self._client.setup().settings.base_url
        keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
        has_key = any(map(os.environ.get, keys)) or has_login(url)
        later = f"the run later: wandb sync {self._tracked.folder / 'wandb' / 'offline-run-*'}"
        # else what the user's settings say, as `wandb offline` writes them
        return {} if self._can_send(url, has_key, "wandb login", later) else {"mode": "offline"}

    def _table(self, columns: list[str], rows: list[list[Plain]]) -> Any:
        return self._client.Table(columns=columns, data=rows, allow_mixed_types=True)
