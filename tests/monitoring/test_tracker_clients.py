"""Trackers with the packages that they are for; each is skipped where its package is missing.

A process without keys or a network writes two steps, and continues the run with two more.
"""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import zipfile

import pytest

PROGRAM = """
import logging, sys
from pathlib import Path
import numpy as np
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.training.loop import MetricsLog

logging.basicConfig()
name, folder = sys.argv[1:]
config = {"seed": 1, "model": {"path": "m", "lora": None}}
answers = [{"prompt": "2+2|", "answer": "4\\n<b>", "score": 1.0, "advantage": None}]
for done in (0, 2):
    spec = [FunctionSpec(name)]
    log = MetricsLog(Path(folder), step=done, position=0, trackers=spec, config=config)
    for step in (done + 1, done + 2):
        metrics = {"loss": step / 2, "val-core/a b/acc/mean@1": 1.0}
        log.write(step, metrics, answers, {"score": np.array([0.0, 1.0, 1.0])})
    log.close()
    assert log._trackers[0].dropped == 0, name
"""

WANDB_READER = """
import json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record

content, at, whole = open(sys.argv[1], "rb").read(), 7, b""
while at + 7 <= len(content):  # LevelDB's log: blocks of 32 KB with pieces of records
    left = 32768 - at % 32768
    if left < 7:
        at += left
        continue
    size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
    whole, at = whole + content[at + 7 : at + 7 + size], at + 7 + size
    if kind in (1, 4):
        record, whole = Record.FromString(whole), b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            print(json.dumps({i.key or "/".join(i.nested_key): i.value_json for i in items}))
"""

SECRETS = ("API_KEY", "TOKEN", "TRACKING_URI", "WANDB", "COMET", "SWANLAB", "TRACKIO", "MLFLOW")


@pytest.fixture
def logged(tmp_path):
    """Returns a function that logs a run with a tracker, and returns folder and stderr."""
    inherited = {k: v for k, v in os.environ.items() if not any(s in k for s in SECRETS)}
    environment = inherited | {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}

    def log(name, package):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        folder = tmp_path / "my run"
        command = [sys.executable, "-c", PROGRAM, name, str(folder)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "can't write to" not in done.stderr
        return folder, done.stderr

    return log


def test_mlflow(logged):
    folder, _ = logged("mlflow", "mlflow")
    with sqlite3.connect(folder / "mlflow" / "mlflow.db") as database:
        losses = database.execute("SELECT step, value FROM metrics WHERE key = 'loss'").fetchall()
        names = {name for (name,) in database.execute("SELECT key FROM metrics")}
        params = dict(database.execute("SELECT key, value FROM params"))
        runs = database.execute("SELECT name, status FROM runs").fetchall()
    assert sorted(losses) == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    assert "val-core/a b/acc/mean_at_1" in names
    assert params == {"seed": "1", "model.path": "m"}
    assert runs == [("my run", "FINISHED")]
    (artifacts,) = (folder / "mlflow" / "artifacts").glob("*/artifacts")
    assert json.loads((artifacts / "answers" / "step_000003.json").read_text()) == {
        "columns": ["prompt", "answer", "score", "advantage"],
        "data": [["2+2|", "4\n<b>", 1.0, None]],
    }
    shown = json.loads((artifacts / "histograms" / "step_000004.json").read_text())["score"]
    assert sum(shown["counts"]) == 3 and (shown["edges"][0], shown["edges"][-1]) == (0.0, 1.0)


def test_trackio(logged, tmp_path):
    logged("trackio", "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "jaxrl_llm.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        (config,) = database.execute("SELECT config FROM configs").fetchone()
    assert len({name for name, _, _ in rows}) == 1 and rows[0][0].startswith("my run-")
    assert sorted(step for _, step, _ in rows) == [1, 2, 3, 4]
    metrics = json.loads(rows[0][2])
    assert metrics["val-core/a b/acc/mean@1"] == 1.0
    assert metrics["answers"]["_value"][0]["answer"] == "4\n<b>"
    assert sum(metrics["histograms/score"]["values"]) == 3
    assert json.loads(config)["model"] == {"path": "m", "lora": None}


def test_weights_and_biases(logged):
    folder, stderr = logged("wandb", "wandb")
    why = "Weights & Biases is offline, as there is no API key (wandb login); to send the run later"
    assert f"{why}: wandb sync {folder}/wandb/offline-run-*" in stderr
    first, second = sorted((folder / "wandb").glob("offline-run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]  # one run's id
    history = []
    for path in (first, second):
        (log,) = path.glob("*.wandb")
        command = [sys.executable, "-c", WANDB_READER, str(log)]
        read = subprocess.run(command, capture_output=True, text=True, check=True)
        history += [json.loads(line) for line in read.stdout.splitlines()]
    assert [json.loads(line["_step"]) for line in history] == [1, 2, 3, 4]
    assert [json.loads(line["loss"]) for line in history] == [0.5, 1.0, 1.5, 2.0]
    assert sum(json.loads(history[0]["histograms/score/values"])) == 3
    (table, *_) = first.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["2+2|", "4\n<b>", 1.0, None]]


def test_swanlab(logged):
    folder, stderr = logged("swanlab", "swanlab")
    assert f"to send the run later: swanlab sync {folder}/swanlab/run-*" in stderr
    first, second = sorted((folder / "swanlab").glob("run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    (log,) = first.glob("*.swanlab")
    assert b"val-core/a b/acc/mean@1" in log.read_bytes()
    charts = [path.read_text() for path in first.rglob("001-*.json")]
    assert len(charts) == 2 and any("2+2|" in chart for chart in charts)


def test_comet(logged):
    folder, stderr = logged("comet", "comet_ml")
    assert f"to send the experiment later: comet upload {folder}/comet/*.zip" in stderr
    parts = sorted((folder / "comet").glob("*.zip"))
    assert len(parts) == 2
    assert len({path.name.partition("-")[0] for path in parts}) == 1
    logged_steps = set()
    for path in parts:
        with zipfile.ZipFile(path) as archive:
            messages = archive.read("messages.json").decode()
            tables = [name for name in archive.namelist() if b"2+2|" in archive.read(name)]
        assert tables and "model.path" in messages and "histograms/score" in messages
        payloads = [json.loads(line)["payload"] for line in messages.splitlines()]
        for payload in payloads:
            metric = payload.get("metric") or {}
            if metric.get("metricName") == "loss":
                logged_steps.add((metric["step"], float(metric["metricValue"])))
    assert logged_steps == {(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)}
