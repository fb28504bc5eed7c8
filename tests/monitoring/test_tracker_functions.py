"""What trackers tell the packages that they are for, and what TensorBoard's files hold."""

import html
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.monitoring import trackers
from jaxrl_llm.monitoring.trackers import (
    TrackedRun,
    TrackedStep,
    distribution,
    is_reachable,
    markdown_table,
)
from tests.listening import listening
from tests.monitoring.test_trackers import events

CONFIG = {"seed": 1, "model": {"path": "m", "lora": None}}
ANSWERS = ({"prompt": "2+2|", "answer": "4\n<b>", "score": 1.0},)
SEEN = distribution(np.array([0.0, 1.0, 1.0]))
STEP = TrackedStep(3, {"loss": 0.5, "val-core/a/mean@1": 1.0}, ANSWERS, {"score": SEEN})
COLUMNS, ROWS = ["prompt", "answer", "score"], [["2+2|", "4\n<b>", 1.0]]
NOWHERE = "http://127.0.0.1:9"


class Client:
    """Stands in for a package: `call(name)` is one of its functions, whose calls are kept."""

    def __init__(self):
        self.calls = []

    def call(self, name, returns=None):
        def function(*positional, **keywords):
            self.calls.append((name, (*positional, keywords)))
            given = SimpleNamespace(args=positional, **keywords)
            return given if returns is None else returns

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
    monkeypatch.setenv("no_proxy", "*")

    def install(package, **contents):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(**contents))

    return install


def track(tracker):
    """Write one step with a tracker."""
    tracker.open()
    tracker.write(STEP)
    tracker.close()


def run(folder):
    return TrackedRun(folder, CONFIG, 0)


def test_tensorboard_shows_the_config_distributions_and_answers(tmp_path):
    track(trackers.tensorboard(run(tmp_path)))
    seen = events(tmp_path / "tensorboard")
    values = {value.tag: value for event in seen for value in event.summary.value}
    assert values["config/text_summary"].tensor.string_val == [b"    seed: 1\n    model.path: m"]
    content = values["_hparams_/session_start_info"].metadata.plugin_data.content
    keys = HParamsPluginData.FromString(content).session_start_info.hparams
    assert (keys["seed"].number_value, keys["model.path"].string_value) == (1, "m")
    (event,) = (event for event in seen if event.step == 3)
    values = {value.tag: value for value in event.summary.value}
    assert {"loss", "val-core/a/mean_1", "histograms/score", "answers/text_summary"} == set(values)
    histogram = values["histograms/score"].histo
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 1, 3, 2)
    assert histogram.sum_squares == 2 and sum(histogram.bucket) == 3
    assert histogram.bucket[-1] == 2 and histogram.bucket_limit[-1] == 1
    text = values["answers/text_summary"]
    assert text.metadata.plugin_data.plugin_name == "text"
    assert "4<br>" in text.tensor.string_val[0].decode()


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
        seen = html.unescape(re.sub(r"<br ?/?>", "\n", cell))
        assert seen.split() == text.split()


@pytest.fixture
def wandb(installed):
    """Stands in for wandb, whose server is at `setup.settings.base_url`."""
    client = Client()
    session = client.made("log", "finish")
    setup = SimpleNamespace(settings=SimpleNamespace(base_url=NOWHERE))
    rest = vars(client.made("Table", "Histogram", init=session))
    installed("wandb", setup=lambda: setup, **rest)
    return SimpleNamespace(client=client, setup=setup)


def test_weights_and_biases(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    track(trackers.wandb(run(tmp_path), project="p"))
    ((settings,),) = wandb.client.of("init")
    expected = {"project": "p", "name": tmp_path.name, "config": CONFIG, "resume": "allow"}
    assert settings.items() >= expected.items()
    assert settings["mode"] is None, "WANDB_MODE has a say"
    ((data, more),) = wandb.client.of("log")
    assert more["step"] == 3 and data.items() >= STEP.metrics.items()
    assert (data["answers"].columns, data["answers"].data) == (COLUMNS, ROWS)
    assert data["histograms/score"].np_histogram[0].sum() == 3
    assert wandb.client.calls[-1][0] == "finish"


def test_a_server_that_refuses_everything_can_be_reached():
    with listening(PlainTextResponse("no", 403)) as address:
        assert is_reachable(address)
    assert not is_reachable(NOWHERE) and not is_reachable("no address")


def test_weights_and_biases_without_key_or_network(tmp_path, wandb, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(trackers, "is_reachable", lambda url: url != NOWHERE)

    def mode_of(url):
        wandb.setup.settings.base_url = url
        track(trackers.wandb(run(tmp_path)))
        return wandb.client.of("init")[-1][-1]["mode"]

    server = "http://127.0.0.1:8080"
    assert mode_of(server) == "offline" and "wandb login" in caplog.text
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert mode_of(NOWHERE) == "offline" and mode_of(server) is None
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login user password k\n")
    netrc.chmod(0o600)
    assert mode_of(server) is None and len(caplog.messages) == 2


def test_mlflow(tmp_path, installed, monkeypatch):
    client = Client()
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
    track(trackers.mlflow(run(tmp_path), tracking_uri="http://mine"))
    params, metrics = client.of("log_batch")
    assert [one.args for one in params[-1]["params"]] == [("seed", "1"), ("model.path", "m")]
    shown = [(one.args[0], one.args[1], one.args[-1]) for one in metrics[-1]["metrics"]]
    assert shown == [("loss", 0.5, 3), ("val-core/a/mean_at_1", 1.0, 3)]
    files = {name: content for _, content, name, _ in client.of("log_dict")}
    assert files["config.json"] == CONFIG
    assert files["answers/step_000003.json"] == {"columns": COLUMNS, "data": ROWS}
    assert sum(files["histograms/step_000003.json"]["score"]["counts"]) == 3
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(ConfigError, match="sqlalchemy"):  # which a folder needs
        trackers.mlflow(run(tmp_path))


def test_trackio_and_a_package_that_is_broken(tmp_path, installed, monkeypatch):
    client = Client()
    session = client.made("log", "finish")
    installed("trackio", **vars(client.made("Table", "Histogram", init=session)))
    track(trackers.trackio(run(tmp_path), project="p"))
    ((settings,),), ((metrics, more),) = client.of("init"), client.of("log")
    assert settings["project"] == "p" and settings["name"].startswith(f"{tmp_path.name}-")
    assert more["step"] == 3 and metrics.items() >= STEP.metrics.items()
    (tmp_path / "trackio.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        trackers.trackio(run(tmp_path))


@pytest.mark.parametrize(("chosen", "mode"), [("online", "offline"), ("local", "local")])
def test_swanlab(tmp_path, installed, caplog, chosen, mode):
    """Without a network; SWANLAB_MODE chooses."""
    client = Client()
    known = SimpleNamespace(api_key="k", api_host=NOWHERE, mode=chosen)
    bar = client.made("add_xaxis", "add_yaxis")
    echarts = SimpleNamespace(Table=lambda: client.made("add"), Bar=lambda: bar)
    made = vars(client.made(init=client.made("log", "finish")))
    installed("swanlab", Settings=lambda: known, echarts=echarts, **made)
    track(trackers.swanlab(run(tmp_path)))
    ((settings,),), ((data, more),) = client.of("init"), client.of("log")
    assert settings["mode"] == mode and settings["id"] == run(tmp_path).id
    assert more["step"] == 3 and data.items() >= STEP.metrics.items()
    assert client.of("add")[0][:2] == (COLUMNS, ROWS)
    assert sum(client.of("add_yaxis")[0][1]) == 3
    assert len(caplog.messages) == (mode == "offline")


def test_comet(tmp_path, installed, caplog):
    client = Client()
    session = client.made("log_parameters", "log_metrics", "log_histogram_3d", "log_table", "end")
    installed(
        "comet_ml",
        Histogram=lambda: client.made("add"),
        get_config=lambda: {"comet.api_key": None, "comet.url_override": None},
        **vars(client.made("ExperimentConfig", start=session)),
    )
    track(trackers.comet(run(tmp_path), project="p"))
    ((started,),) = client.of("start")
    assert started["online"] is False and started["project_name"] == "p"
    assert client.of("log_parameters")[0][0] == {"seed": 1, "model.path": "m"}
    assert client.of("log_metrics") == [(STEP.metrics, {"step": 3})]
    ((_, table),) = client.of("log_table")
    assert (table["headers"], table["tabular_data"]) == (COLUMNS, ROWS)
    assert "comet login" in caplog.messages[0]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
def test_any_values_have_a_distribution(values):
    finite = [value for value in values if np.isfinite(value)]
    seen = distribution(np.array(values))
    if not finite:
        assert seen is None
        return
    assert seen.counts.sum() == len(finite)
    if max(map(abs, finite)) < 1e37:
        np.testing.assert_array_equal(seen.counts, np.histogram(finite, seen.edges)[0])
    assert (np.diff(seen.edges) > 0).all() and np.isfinite(seen.edges).all()
