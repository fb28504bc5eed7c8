"""`jaxrl_llm.evaluate` from its command line to its files."""

import contextlib
import io
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from jaxrl_llm import export
from jaxrl_llm.config.load import describe
from jaxrl_llm.config.programs import EvaluateConfig
from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.data.rows import read_rows, write_rows
from jaxrl_llm.evaluate import main as evaluate_main
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.rewards.functions import arithmetic
from tests.guarded import EVALUATION, NATIVE

VISION = Path(__file__).parents[2] / "configs/vision/model"


@pytest.fixture(scope="module")
def call(workshop):
    """Evaluates on one device; returns the exit status, what it printed, and metrics and rows."""

    def call(model, *overrides, out, data="validation"):
        words = ["--model", str(model), "--data", str(workshop.data / f"{data}.parquet")]
        words += [
            f"out={out}",
            "max_new_tokens=4",
            "max_running_sequences=32",
            "reward.workers=1",
            *overrides,
        ]
        screen, errors = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(screen),
            contextlib.redirect_stderr(errors),
        ):
            one = jax.devices()[:1]
            patch.setattr("jax.devices", lambda: one)
            status = evaluate_main(words)
        if status:
            return status, errors.getvalue(), None, None
        report = json.loads((out / "metrics.json").read_text())
        rows = pyarrow.parquet.read_table(out / "samples.parquet").to_pylist()
        return status, screen.getvalue(), report, rows

    return call


def test_what_is_written_is_what_the_answers_say(call, workshop, tmp_path):
    status, printed, report, rows = call(
        workshop.base, "samples=4", "temperature=1", "k=[1,2,4]", out=tmp_path / "a"
    )
    assert status == 0
    data = read_rows(workshop.data / "validation.parquet")
    assert [(row["row"], row["sample"]) for row in rows] == [
        (i, j) for i in range(len(data)) for j in range(4)
    ]
    assert len({row["seed"] for row in rows}) == len(rows)
    (end,) = stop_ids(load_tokenizer(workshop.base), workshop.base)
    for row in rows:
        truth = data[row["row"]]["reward_model"]["ground_truth"]
        expected = arithmetic("", row["answer"], truth, None)
        assert (row["score"], json.loads(row["extra"])) == (
            expected["score"],
            {"acc": expected["acc"], "pred": expected["pred"]},
        )
        assert row["token_count"] == len(row["tokens"]) <= 4
        assert row["finish"] == ("stop" if row["tokens"][-1] == end else "length")
    right = np.array([row["score"] for row in rows]).reshape(-1, 4)
    assert 0 < right.mean() < 1, "the model half knows how to add"
    metrics = report["sources"]["arithmetic"]["metrics"]
    pairs = [right[:, pair].max(1) for pair in itertools.combinations(range(4), 2)]
    for name, value in {
        "mean@4": right.mean(),
        "pass@1": right.mean(),
        "pass@2": np.mean(pairs),
        "pass@4": right.max(1).mean(),
    }.items():
        assert metrics[name]["value"] == pytest.approx(value), name
        assert metrics[name]["low"] <= value <= metrics[name]["high"]
        assert f"{name:<10} {value:.4f}" in printed
    assert metrics["maj@1"] == metrics["mean@4"]
    assert report["all"] == report["sources"]["arithmetic"]
    *_, again = call(workshop.base, "samples=4", "temperature=1", out=tmp_path / "b")
    assert again == rows, "the same seed gives the same answers"


def test_a_runs_newest_checkpoint_has_the_runs_last_validation(call, workshop, finished, tmp_path):
    scorer = f"reward.function={workshop.mine('digit_sum')}"
    _, _, report, rows = call(finished.run_dir, scorer, out=tmp_path / "run")
    last = finished.metrics[-1]
    (name,) = [name for name in last if "mean@1" in name]
    everything = report["all"]
    assert name == f"val-core/arithmetic/{everything['quantity']}/mean@1"
    assert everything["metrics"].keys() == {"mean@1"}
    assert everything["metrics"]["mean@1"]["value"] == pytest.approx(last[name])
    assert report["step"] == last["step"]
    assert export.main([str(finished.run_dir), str(tmp_path / "model")]) == 0
    assert call(tmp_path / "model", scorer, out=tmp_path / "hf")[3] == rows


def test_reward_functions_that_fail_are_counted(call, workshop, tmp_path):
    scorer = f"reward.function={workshop.mine('reward_often_fails')}"
    words = ["reward.timeout_s=1", "reward.on_error=-1", "rows=4"]
    status, printed, report, rows = call(workshop.base, scorer, *words, out=tmp_path / "a")
    assert status == 0
    assert report["all"]["reward_errors"] == {"exception": 1, "timeout": 1, "invalid": 1}
    assert [row["score"] for row in rows[:3]] == [-1.0] * 3
    assert [row["error"] is None for row in rows] == [False, False, False, True]
    assert "the reward function failed: 1 exception, 1 timeout, 1 invalid" in printed


@pytest.mark.slow
@pytest.mark.guards(*EVALUATION, "jaxrl_llm/data/visuals/", "models/vision/", *NATIVE)
def test_answers_depend_on_what_images_show(call, tmp_path):
    """Of three rows with the same text, two with one image and one with another."""
    model = tmp_path / "model"
    spec = read_spec(VISION, vision=True)
    params = init_params(spec, key=jax.random.key(0))
    save_params(model, params, spec, source=VISION, dtype="float32")
    noise = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    files = [io.BytesIO() for _ in noise]
    for file, pixels in zip(files, noise, strict=True):
        Image.fromarray(pixels).save(file, "PNG")
    row = {
        "prompt": [{"role": "user", "content": "<image>?"}],
        "data_source": "arithmetic",
        "reward_model": {"ground_truth": "1"},
    }
    shown = [files[0], files[1], files[0]]
    write_rows(tmp_path / "a.parquet", [row | {"images": [{"bytes": f.getvalue()}]} for f in shown])
    words = [f"data={tmp_path / 'a.parquet'}", "max_new_tokens=24"]
    status, printed, _, _ = call(model, *words, out=tmp_path / "blind")
    assert status == 2 and "the model is loaded for text alone" in printed
    answers = [r["answer"] for r in call(model, *words, "vision=true", out=tmp_path / "seen")[3]]
    assert answers[0] == answers[2] != answers[1]
    words += ["max_pixels=256", "vision=true"]
    few = [r["answer"] for r in call(model, *words, out=tmp_path / "few")[3]]
    assert few[0] == few[2] and few != answers


def test_what_can_not_be_run_is_refused_in_one_line(call, workshop, tmp_path):
    out = tmp_path / "done"
    out.mkdir()
    (out / "metrics.json").write_text("{}")
    for words, model, message in (
        (["sample=2"], workshop.base, "unknown key 'sample'; did you mean 'samples'?"),
        (["samples=2"], workshop.base, "samples=2 at temperature=0 draws the same answer"),
        (["k=[3]"], workshop.base, "k: expected numbers from 1 to samples=1, got [3]"),
        ([f"out={out}"], workshop.base, "holds results; remove it or name another one"),
        (["reward.function=arithmetics"], workshop.base, "did you mean 'arithmetic'?"),
        (["step=2"], workshop.base, "is not a run: it has no checkpoints"),
        (["max_new_tokens=256"], workshop.base, "leaves no room for a prompt"),
        (["max_new_tokens=250"], workshop.base, ", row 0: expected at most"),
        (["max_prompt_tokens=1"], workshop.base, "none of 16 rows is left"),
        ([], tmp_path / "nowhere", "model: "),
        (["max_pixels=9999"], workshop.base, "max_pixels: expected no bounds of images without"),
        (["vision=true"], workshop.base, "Qwen3 models have no vision tower"),
        (["data=no.parquet"], workshop.base, "data: no.parquet: no such file"),
    ):
        status, printed, _, _ = call(model, *words, out=tmp_path / "new")
        lines = 11 if ", row 0: " in message else 1  # ten rows, and how many more
        assert (status, printed.count("\n")) == (2, lines), (words, printed)
        assert message in printed, (words, printed)


def test_help_names_every_key(capsys):
    with pytest.raises(SystemExit):
        evaluate_main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n  {key}  " in printed for key, _, _ in describe(EvaluateConfig))
    assert {"--model", "--data", "--config"} <= set(printed.replace(",", " ").split())
