"""A run that a judge scores, whose server is at its worst; and one that goes on without it."""

import json
import random
import shutil
import zlib

import numpy as np
import pyarrow.parquet
import pytest

from jaxrl_llm.evaluate import main as evaluate_main
from jaxrl_llm.reporting.page import KeptAnswers
from jaxrl_llm.training.run_files import RunFiles
from tests.guarded import EVALUATION, RUN
from tests.judge_server import JudgeServer

pytestmark = pytest.mark.guards(*RUN, "jaxrl_llm/rewards/")

KINDS = ("mute", "once503 4", "400", "garbage", "any", "any", "any", "any", "any")
"""How the server behaves, by question and answer."""


def flaky(answer, content):
    """Return what stands for an answer; ratings differ each time, as no real judge's should."""
    kind = KINDS[zlib.crc32(content.encode()) % len(KINDS)]
    return f"rated {random.uniform(0, 10):.3f}" if kind == "any" else kind


@pytest.fixture(scope="module")
def server():
    with JudgeServer(flaky) as judge_server:
        yield judge_server


@pytest.fixture(scope="module")
def words(server):
    function = {"fn": "judge", "url": server.url, "model": "m"}
    return (
        f"reward.function={json.dumps(function)}",
        *("reward.on_error=unscored", "reward.max_error_share=0.9", "reward.concurrency=8"),
        *("reward.timeout_s=5", "reward.retries=1"),
    )


@pytest.fixture(scope="module")
def judged(run, server, words):
    every = ("checkpoint.every=1", "rollout.dump_every=1", "validation.every=1")
    return run("steps=2", *every, *words).ok()


def dumped(result, step):
    path = result.run_dir / f"rollouts/step_{step:06d}.parquet"
    return pyarrow.parquet.read_table(path).to_pylist()


def test_unscored_answers_are_counted_shown_and_left_out(judged, server):
    errors = 0
    for step, line in enumerate(judged.metrics[1:], start=1):
        rows = dumped(judged, step)
        unscored = [row for row in rows if row["score"] is None]
        assert 0 < line["reward/unscored"] == len(unscored) < len(rows)
        failed = [row for row in unscored if not row["error"].startswith("unscored: ")]
        assert line["reward/errors"] == len(failed) < len(unscored)
        errors += len(failed)
        given = [row["score"] for row in rows if row["advantage"] is not None]
        assert line["critic/score/mean"] == pytest.approx(np.mean(given))
        for first in range(0, len(rows), 4):
            check_group(rows[first : first + 4])
    assert errors
    assert any("val-aux/arithmetic/unscored" in line for line in judged.metrics)
    assert "unscored" in judged.out and 1 < server.most_at_once <= 8
    shown = KeptAnswers(RunFiles(judged.run_dir)).read(10**7)["rows"]
    assert any(row["score"] is None and "no verdict" in row["error"] for row in shown)


def check_group(rows):
    """Assert that the advantages are those of the group without its unscored answers."""
    scores = np.array([row["score"] for row in rows if row["score"] is not None])
    if len(scores) < 2:
        assert all(row["advantage"] is None for row in rows)
        return
    expected = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    advantages = [row["advantage"] for row in rows if row["score"] is not None]
    np.testing.assert_allclose(advantages, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_verdicts_while_the_judge_is_down(
    judged, run, copy_of, server, words, workshop, same
):
    """As after a kill in step 2, before its checkpoint: its answers had been asked about."""
    folder = copy_of(judged)
    shutil.rmtree(folder / "checkpoints/2")
    asked = server.asked.total()
    server.stop()
    try:
        resumed = run(
            "steps=2", "validation.every=1", "rollout.dump_every=1", *words, run_dir=folder
        )
    finally:
        server.start()
    resumed.ok()
    assert server.asked.total() == asked
    for before, after in zip(judged.learned, resumed.learned, strict=True):
        assert {**before, "reward/errors": 0} == {**after, "reward/errors": 0}
    before, after = ([row["score"] for row in dumped(r, 2)] for r in (judged, resumed))
    assert before == after and any(score is not None for score in after)
    same(workshop.params(resumed.run_dir), workshop.params(judged.run_dir))


@pytest.mark.slow
def test_a_run_stops_where_too_few_answers_have_a_score(run, words, server):
    server.behaviour = lambda answer, content: "mute"
    try:
        result = run("steps=1", *words, "validation.before=false", "reward.max_error_share=0.5")
    finally:
        server.behaviour = flaky
    assert result.status == 1
    assert "failed on 32 of 32 answers, more than reward.max_error_share=0.5" in result.err
    assert "unscored: no verdict in" in result.err and "(32 are unscored)" in result.err


@pytest.mark.slow
@pytest.mark.guards(*EVALUATION)
def test_an_evaluation_leaves_unscored_answers_out(run, words, workshop, tmp_path):
    words = [word for word in words if "max_error_share" not in word]
    overrides = [f"model={workshop.base}", f"data={workshop.data}/validation.parquet", *words]
    (workshop.root / "judge_evaluate.yaml").write_text("max_new_tokens: 4\n")
    result = run(
        *(f"out={tmp_path / 'results'}", "temperature=1.0", "samples=2", *overrides),
        main=lambda given: evaluate_main([w for w in given if not w.startswith("run_dir=")]),
        config="judge_evaluate.yaml",
    ).ok()
    report = json.loads((tmp_path / "results/metrics.json").read_text())["all"]
    rows = pyarrow.parquet.read_table(tmp_path / "results/samples.parquet").to_pylist()
    scores = [row["score"] for row in rows]
    assert 0 < report["unscored"] == scores.count(None) < len(scores)
    pairs = [[s for s in scores[i : i + 2] if s is not None] for i in range(0, len(scores), 2)]
    assert report["metrics"]["mean@2"]["value"] == pytest.approx(
        np.mean([np.mean(pair) for pair in pairs if pair])
    )
    best = np.mean([max(pair) for pair in pairs if len(pair) == 2])
    assert report["metrics"]["best@2"]["value"] == pytest.approx(best)
    assert f"{report['unscored']} of {len(scores)} answers are unscored, and left out" in result.out
