"""`jaxrl_llm.evaluate` from its command line to its files."""

import itertools
import json

import numpy as np
import pyarrow.parquet
import pytest

from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.evaluate import main as evaluate_main
from jaxrl_llm.rewards.functions import arithmetic
from tests.e2e.comparing import exported


@pytest.fixture
def call(workshop, one_device, capsys):
    """Evaluates on one device; returns what it printed, metrics and rows."""

    def call(model, *overrides, out):
        words = ["--model", str(model), "--data", str(workshop.data / "validation.parquet")]
        words += [f"out={out}", "max_new_tokens=4", "max_running_sequences=32", "reward.workers=1"]
        assert evaluate_main([*words, *overrides]) == 0
        report = json.loads((out / "metrics.json").read_text())
        rows = pyarrow.parquet.read_table(out / "samples.parquet").to_pylist()
        return capsys.readouterr().out, report, rows

    return call


def test_what_is_written_is_what_the_answers_say(call, workshop, tmp_path):
    words = ("samples=4", "temperature=1")
    printed, report, rows = call(workshop.base, *words, "k=[1,2,4]", out=tmp_path / "a")
    data = read_rows(workshop.data / "validation.parquet")
    places = list(itertools.product(range(len(data)), range(4)))
    assert [(row["row"], row["sample"]) for row in rows] == places
    assert len({row["seed"] for row in rows}) == len(rows)
    (end,) = stop_ids(load_tokenizer(workshop.base), workshop.base)
    for row in rows:
        truth = data[row["row"]]["reward_model"]["ground_truth"]
        expected = arithmetic("", row["answer"], truth, None)
        assert row["score"] == expected.pop("score") and json.loads(row["extra"]) == expected
        assert row["token_count"] == len(row["tokens"]) <= 4
        assert row["finish"] == ("stop" if row["tokens"][-1] == end else "length")
    right = np.array([row["score"] for row in rows]).reshape(-1, 4)
    assert 0 < right.mean() < 1, "the model half knows how to add"
    metrics = report["sources"]["arithmetic"]["metrics"]
    pairs = [right[:, pair].max(1) for pair in itertools.combinations(range(4), 2)]
    expected = {"mean@4": right.mean(), "pass@1": right.mean(), "pass@2": np.mean(pairs)}
    for name, value in {**expected, "pass@4": right.max(1).mean()}.items():
        assert metrics[name]["value"] == pytest.approx(value), name
        assert metrics[name]["low"] <= value <= metrics[name]["high"]
        assert f"{name:<10} {value:.4f}" in printed
    assert metrics["maj@1"] == metrics["mean@4"]
    assert report["all"] == report["sources"]["arithmetic"]
    assert call(workshop.base, *words, out=tmp_path / "b")[2] == rows, "the same seed"


def test_a_runs_newest_checkpoint_has_the_runs_last_validation(call, workshop, finished, tmp_path):
    scorer = f"reward.function={workshop.mine('digit_sum')}"
    _, report, rows = call(finished.run_dir, scorer, out=tmp_path / "run")
    last, everything = finished.metrics[-1], report["all"]
    (name,) = [name for name in last if "mean@1" in name]
    assert name == f"val-core/arithmetic/{everything['quantity']}/mean@1"
    assert everything["metrics"].keys() == {"mean@1"}
    assert everything["metrics"]["mean@1"]["value"] == pytest.approx(last[name])
    assert report["step"] == last["step"]
    model = exported(finished.run_dir, tmp_path / "model")
    assert call(model, scorer, out=tmp_path / "hf")[2] == rows
