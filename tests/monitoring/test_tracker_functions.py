"""What trackers tell the packages that they are for, and what TensorBoard's files hold.

The packages are stood in for by objects that record calls, with the parameters that the real ones
have: wandb 0.31, mlflow 3.17, trackio 0.43, swanlab 0.10 and comet_ml 3.58.
"""

import html
import http.server
import inspect
import logging
import re
import socket
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.monitoring import trackers
from jaxrl_llm.monitoring.trackers import (
    TrackedRun,
    TrackedStep,
    as_table,
    distribution,
    is_reachable,
    markdown_table,
    plain_rows,
)
from tests.monitoring.test_trackers import events

CONFIG = {"seed": 1, "model": {"path": "m", "lora": None}}
ANSWERS = ({"prompt": "2+2|", "answer": "4\n<b>", "score": 1.0},)
SEEN = distribution(np.array([0.0, 1.0, 1.0]))
STEP = TrackedStep(3, {"loss": 0.5, "val-core/a/mean@1": 1.0}, ANSWERS, {"score": SEEN})
COLUMNS, ROWS = ["prompt", "answer", "score"], [["2+2|", "4\n<b>", 1.0]]

SIGNATURES = {
    "wandb.init": "entity=0, project=0, dir=0, id=0, name=0, notes=0, tags=0, config=0, "
    "config_exclude_keys=0, config_include_keys=0, allow_val_change=0, group=0, job_type=0, "
    "mode=0, force=0, reinit=0, resume=0, resume_from=0, fork_from=0, save_code=0, settings=0",
    "wandb.log": "data, step=0, commit=0",
    "wandb.finish": "exit_code=0",
    "wandb.Table": "columns=0, data=0, rows=0, dataframe=0, dtype=0, optional=0, "
    "allow_mixed_types=0, log_mode=0",
    "wandb.Histogram": "sequence=0, np_histogram=0, num_bins=0",
    "trackio.init": "project, name=0, group=0, space_id=0, server_url=0, dataset_id=0, "
    "bucket_id=0, config=0, resume=0, settings=0, private=0, embed=0, auto_log_gpu=0, "
    "gpu_log_interval=0, auto_log_cpu=0, cpu_log_interval=0, webhook_url=0, webhook_min_level=0",
    "trackio.log": "metrics, step=0",
    "trackio.finish": "",
    "trackio.Table": "columns=0, data=0, dataframe=0, rows=0, optional=0, allow_mixed_types=0, "
    "log_mode=0",
    "trackio.Histogram": "sequence=0, np_histogram=0, num_bins=0",
    "swanlab.init": "*, reinit=0, log_dir=0, mode=0, workspace=0, project=0, public=0, name=0, "
    "color=0, description=0, job_type=0, group=0, tags=0, id=0, resume=0, parallel=0, config=0, "
    "settings=0, callbacks=0",
    "swanlab.log": "data, step=0",
    "swanlab.finish": "state=0, error=0, async_log_timeout=0",
    "swanlab.add": "headers, rows, attributes=0",
    "swanlab.add_xaxis": "xaxis_data",
    "swanlab.add_yaxis": "series_name, y_axis",
    "mlflow.MlflowClient": "tracking_uri=0, registry_uri=0, workspace_store_uri=0",
    "mlflow.get_experiment_by_name": "name",
    "mlflow.create_experiment": "name, artifact_location=0, tags=0",
    "mlflow.search_runs": "experiment_ids, filter_string=0, run_view_type=0, max_results=0, "
    "order_by=0, page_token=0",
    "mlflow.create_run": "experiment_id, start_time=0, tags=0, run_name=0",
    "mlflow.update_run": "run_id, status=0, name=0",
    "mlflow.log_batch": "run_id, metrics=0, params=0, tags=0, synchronous=0",
    "mlflow.log_dict": "run_id, dictionary, artifact_file",
    "mlflow.set_terminated": "run_id, status=0, end_time=0",
    "mlflow.Metric": "key, value, timestamp, step, model_id=0, dataset_name=0, "
    "dataset_digest=0, run_id=0",
    "mlflow.Param": "key, value",
    "comet.start": "api_key=0, workspace=0, project=0, project_name=0, experiment_key=0, mode=0, "
    "online=0, source=0, experiment_config=0",
    "comet.ExperimentConfig": "disabled=0, log_code=0, log_graph=0, parse_args=0, "
    "display_summary_level=0, "
    "auto_output_logging=0, auto_param_logging=0, auto_metric_logging=0, offline_directory=0, "
    "name=0, tags=0",
    "comet.add": "values, counts=0, max_skip_count=0",
    "comet.log_parameters": "parameters, prefix=0, step=0, nested_support=0",
    "comet.log_metrics": "dic, prefix=0, step=0, epoch=0, include_context=0",
    "comet.log_histogram_3d": "values, name=0, step=0, epoch=0, metadata=0",
    "comet.log_table": "filename, tabular_data=0, headers=0",
    "comet.end": "",
}
"""Parameters of the real functions; those with 0 have a default."""


class Client:
    """Stands in for a package: `call(name)` is one of its functions, whose calls are kept."""

    def __init__(self, package):
        self.package, self.calls = package, []

    def call(self, name, returns=None):
        full = f"{self.package}.{name}"
        signature = inspect.signature(eval(f"lambda {SIGNATURES[full]}: None"))

        def function(*positional, **keywords):
            arguments = signature.bind(*positional, **keywords).arguments
            self.calls.append((name, arguments))
            return SimpleNamespace(of=name, **arguments) if returns is None else returns

        return function

    def made(self, *names, **results):
        """Return an object that has such functions, each with what it returns."""
        calls = {name: self.call(name) for name in names}
        return SimpleNamespace(**calls, **{n: self.call(n, x) for n, x in results.items()})

    def of(self, name):
        """Return the arguments of all calls of a function."""
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def installed(monkeypatch):
    """Returns a function that stands in for a package."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "NETRC"):
        monkeypatch.delenv(name, raising=False)

    def install(package, **contents):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(**contents))

    return install


@pytest.fixture
def tracked(tmp_path):
    """Returns a function that writes one step with a tracker."""

    def track(tracker):
        tracker.open()
        tracker.write(STEP)
        tracker.close()

    return track


def run(folder):
    return TrackedRun(folder, CONFIG, 0)


# ------------------------------------------------------------------------------------ TensorBoard


def test_tensorboard_shows_distributions_and_answers(tmp_path, tracked):
    tracked(trackers.tensorboard(run(tmp_path)))
    (event,) = (event for event in events(tmp_path / "tensorboard") if event.step == 3)
    values = {value.tag: value for value in event.summary.value}
    assert {"loss", "val-core/a/mean_1", "histograms/score", "answers/text_summary"} == set(values)
    histogram = values["histograms/score"].histo
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 1, 3, 2)
    assert histogram.sum_squares == 2 and sum(histogram.bucket) == 3
    assert histogram.bucket[-1] == 2 and histogram.bucket_limit[-1] == 1
    text = values["answers/text_summary"]
    assert text.metadata.plugin_data.plugin_name == "text"
    assert text.tensor.string_val[0].decode().splitlines()[2] == (
        "| 2&#43;2&#124; | 4<br>&#60;b&#62; | 1&#46;0 |"
    )


@given(st.lists(st.text("*_`<>[](){}!|&#;\\~^=-+.:/$ab1 \n", max_size=30), min_size=1, max_size=3))
@example(["**b** __c__ `d`", "<img src=x> &amp; &#60;", "![a](http://x) [b](c) <http://d.e>"])
@example(["a | b \\| c", "| - | - |", "# 1\n- 2\n3. 4\n\n    five"])
def test_a_text_in_a_table_is_what_a_reader_sees(texts):
    """Whatever Markdown makes of a table, its cells hold the texts, without any markup."""
    markdown = pytest.importorskip("markdown")
    rows = [{"answer": text, "n": 1} for text in texts]
    shown = markdown.markdown(markdown_table(rows), extensions=["tables"])
    cells = re.findall(r"<td>(.*?)</td>", shown, re.DOTALL)[::2]
    assert len(cells) == len(texts)
    assert not re.search(r"<(?!/?(table|thead|tbody|tr|th|td|br)\b)", shown)
    for cell, text in zip(cells, texts, strict=True):
        assert unescaped(cell).split() == text.split()


def unescaped(cell):
    return html.unescape(re.sub(r"<br ?/?>", "\n", cell))


# ------------------------------------------------------------------------------- Weights & Biases


@pytest.fixture
def wandb(installed):
    """Stands in for wandb, whose server is at `url`."""
    client = Client("wandb")
    state = SimpleNamespace(client=client, url="http://127.0.0.1:9")  # where nothing listens
    session = client.made("log", "finish")
    setup = SimpleNamespace(settings=SimpleNamespace(base_url=state.url))
    rest = vars(client.made("Table", "Histogram", init=session))
    installed("wandb", setup=lambda: setup, **rest)
    state.setup = setup
    return state


def test_weights_and_biases(tmp_path, tracked, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    tracked(trackers.wandb(run(tmp_path), project="p", entity="e"))
    (settings,) = wandb.client.of("init")
    assert {k: settings[k] for k in ("project", "entity", "name", "dir", "config", "resume")} == {
        "project": "p",
        "entity": "e",
        "name": tmp_path.name,
        "dir": tmp_path,
        "config": CONFIG,
        "resume": "allow",
    }
    assert settings["mode"] is None, "WANDB_MODE has a say"
    ((step, data),) = [(call["step"], call["data"]) for call in wandb.client.of("log")]
    assert step == 3 and data.items() >= STEP.metrics.items()
    assert (data["answers"].columns, data["answers"].data) == (COLUMNS, ROWS)
    counts, edges = data["histograms/score"].np_histogram
    assert counts.sum() == 3 and len(edges) == len(counts) + 1
    assert [name for name, _ in wandb.client.calls][-1] == "finish"


@pytest.fixture
def server():
    """The address of a server that refuses everything, which is an answer."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(403)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuse) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("key", "is_up", "mode", "why"),
    [
        (None, True, "offline", "there is no API key (wandb login)"),
        ("variable", False, "offline", "http://127.0.0.1:9 can't be reached"),
        ("variable", True, None, None),
        ("netrc", True, None, None),
        ("netrc", False, "offline", "http://127.0.0.1:9 can't be reached"),
    ],
)
def test_weights_and_biases_without_key_or_network(
    tmp_path, tracked, wandb, server, monkeypatch, caplog, key, is_up, mode, why
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    if key == "variable":
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    elif key == "netrc":
        netrc = tmp_path / ".netrc"
        netrc.write_text("machine 127.0.0.1 login user password k\n")
        netrc.chmod(0o600)
    if is_up:
        wandb.setup.settings.base_url = server
    caplog.set_level(logging.WARNING)
    tracked(trackers.wandb(run(tmp_path)))
    assert [call["mode"] for call in wandb.client.of("init")] == [mode]
    later = f"to send the run later: wandb sync {tmp_path}/wandb/offline-run-*"
    expected = [f"Weights & Biases is offline, as {why}; {later}"] if why else []
    assert caplog.messages == expected


def test_a_mode_that_is_asked_for_is_taken(tmp_path, tracked, wandb, caplog):
    tracked(trackers.wandb(run(tmp_path), mode="offline"))
    assert [call["mode"] for call in wandb.client.of("init")] == ["offline"]
    assert caplog.messages == []


def test_what_can_be_reached(server, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    assert is_reachable(server)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert not is_reachable(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert not is_reachable("no address")


# ---------------------------------------------------------------------------------------- others


def test_mlflow(tmp_path, tracked, installed):
    client = Client("mlflow")
    created = SimpleNamespace(info=SimpleNamespace(run_id="r"))
    store = client.made(
        *("update_run", "log_batch", "log_dict", "set_terminated"),
        get_experiment_by_name=False,
        create_experiment="e",
        search_runs=[],
        create_run=created,
    )
    entities = client.made("Metric", "Param")
    installed("mlflow", entities=entities, MlflowClient=client.call("MlflowClient", store))
    tracked(trackers.mlflow(run(tmp_path), tracking_uri="http://mine"))
    assert client.of("MlflowClient") == [{"tracking_uri": "http://mine"}]
    params, metrics = client.of("log_batch")
    assert [(one.key, one.value) for one in params["params"]] == [
        ("seed", "1"),
        ("model.path", "m"),
    ]
    assert [(one.key, one.value, one.step) for one in metrics["metrics"]] == [
        ("loss", 0.5, 3),
        ("val-core/a/mean_at_1", 1.0, 3),
    ]
    files = {call["artifact_file"]: call["dictionary"] for call in client.of("log_dict")}
    assert files["config.json"] == CONFIG
    assert files["answers/step_000003.json"] == {"columns": COLUMNS, "data": ROWS}
    assert sum(files["histograms/step_000003.json"]["score"]["counts"]) == 3


def test_mlflow_in_the_folder_needs_a_database(tmp_path, installed, monkeypatch):
    installed("mlflow")
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(ConfigError, match=r"'mlflow' needs the package sqlalchemy: .*\[mlflow\]'"):
        trackers.mlflow(run(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mine")
    trackers.mlflow(run(tmp_path))


def test_a_tracker_whose_package_is_broken(tmp_path, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("broken")
    (folder / "trackio.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ConfigError, match=r"'trackio' can't import trackio: .*ZeroDivisionError"):
        trackers.trackio(run(tmp_path))


def test_trackio(tmp_path, tracked, installed):
    client = Client("trackio")
    session = client.made("log", "finish")
    installed("trackio", **vars(client.made("Table", "Histogram", init=session)))
    tracked(trackers.trackio(run(tmp_path), project="p"))
    (settings,), (logged,) = client.of("init"), client.of("log")
    assert settings["project"] == "p" and settings["resume"] == "allow"
    assert settings["name"].startswith(f"{tmp_path.name}-")
    assert logged["step"] == 3 and logged["metrics"].items() >= STEP.metrics.items()
    assert logged["metrics"]["answers"].data == ROWS
    assert client.calls[-1][0] == "finish"


@pytest.mark.parametrize(("key", "mode"), [(None, "offline"), ("k", "offline"), ("k", "local")])
def test_swanlab(tmp_path, tracked, installed, monkeypatch, caplog, key, mode):
    monkeypatch.setenv("no_proxy", "*")
    client = Client("swanlab")
    session = client.made("log", "finish")
    chosen = "local" if mode == "local" else "online"  # by SWANLAB_MODE
    known = SimpleNamespace(api_key=key, api_host="http://127.0.0.1:9", mode=chosen)
    echarts = SimpleNamespace(
        Table=lambda: client.made("add"), Bar=lambda: client.made("add_xaxis", "add_yaxis")
    )
    made = vars(client.made(init=session))
    installed("swanlab", Settings=lambda: known, echarts=echarts, **made)
    tracked(trackers.swanlab(run(tmp_path)))
    (settings,), (logged,) = client.of("init"), client.of("log")
    assert settings["mode"] == mode and settings["id"] == run(tmp_path).id
    assert logged["step"] == 3 and logged["data"].items() >= STEP.metrics.items()
    assert client.of("add") == [{"headers": COLUMNS, "rows": ROWS}]
    assert sum(client.of("add_yaxis")[0]["y_axis"]) == 3
    assert len(caplog.messages) == (mode == "offline")


def test_comet(tmp_path, tracked, installed, caplog):
    client = Client("comet")
    session = client.made("log_parameters", "log_metrics", "log_histogram_3d", "log_table", "end")
    made = client.made("ExperimentConfig", start=session)
    installed(
        "comet_ml",
        Histogram=lambda: client.made("add"),
        get_config=lambda: {"comet.api_key": None, "comet.url_override": None},
        **vars(made),
    )
    tracked(trackers.comet(run(tmp_path), project="p"))
    (started,) = client.of("start")
    assert started["online"] is False and started["project_name"] == "p"
    assert started["experiment_config"].offline_directory == str(tmp_path / "comet")
    assert client.of("log_parameters") == [{"parameters": {"seed": 1, "model.path": "m"}}]
    assert client.of("log_metrics") == [{"dic": STEP.metrics, "step": 3}]
    (table,) = client.of("log_table")
    assert (table["headers"], table["tabular_data"]) == (COLUMNS, ROWS)
    assert sum(client.of("add")[0]["counts"]) == 3
    assert "Comet is offline, as there is no API key (comet login)" in caplog.messages[0]


# ---------------------------------------------------------------------------------------- records


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
def test_any_values_have_a_distribution(values):
    finite = [value for value in values if np.isfinite(value)]
    seen = distribution(np.array(values))
    if not finite:
        assert seen is None
        return
    assert seen.counts.sum() == len(finite)
    assert (np.diff(seen.edges) > 0).all() and np.isfinite(seen.edges).all()


def test_a_distribution_is_numpys():
    values = np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32)
    seen = distribution(values)
    counts, edges = np.histogram(values.astype(float), len(seen.counts))
    np.testing.assert_array_equal(seen.counts, counts)
    np.testing.assert_allclose(seen.edges, edges)
    np.testing.assert_allclose([seen.total, seen.squares], [values.sum(), (values**2).sum()], 1e-4)


def test_half_a_character_does_not_stop_a_table():
    (row,) = plain_rows([{"answer": "a\ud800b"}])
    assert row == {"answer": "a?b"}
    assert as_table([row]) == (["answer"], [["a?b"]])


def test_a_folder_has_one_id_and_another_folder_another(tmp_path):
    assert run(tmp_path / "a").id == run(tmp_path / "b" / ".." / "a").id
    assert run(tmp_path / "a").id != run(tmp_path / "b").id
