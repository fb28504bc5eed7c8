"""A run that a judge scores, whose server is at its worst; and one that goes on without it."""

import json
import random
import shutil
import zlib

import numpy as np
import pytest

from jaxrl_llm.reporting.page import KeptAnswers
from jaxrl_llm.training.run_files import RunFiles
from tests.e2e.comparing import same
from tests.guarded import EVALUATION, RUN
from tests.judge_server import JudgeServer

pytestmark = [pytest.mark.slow, pytest.mark.guards(*RUN, *EVALUATION, "jaxrl_llm/rewards/")]

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


def test_unscored_answers_are_counted_shown_and_left_out(judged, server):
    errors = 0
    for line in judged.metrics[1:]:
        rows = judged.rows(line["step"])
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


def test_a_run_goes_on_with_the_same_verdicts_while_the_judge_is_down(
    judged, run, copy_of, server, words, workshop
):
    """As after a kill in step 2, before its checkpoint: its answers had been asked about."""
    folder = copy_of(judged)
    shutil.rmtree(folder / "checkpoints/2")
    asked = server.asked.total()
    server.stop()
    try:
        every = ("validation.every=1", "rollout.dump_every=1")
        resumed = run("steps=2", *every, *words, run_dir=folder).ok()
    finally:
        server.start()
    assert server.asked.total() == asked
    for before, after in zip(judged.learned, resumed.learned, strict=True):
        assert {**before, "reward/errors": 0} == {**after, "reward/errors": 0}
    before, after = ([row["score"] for row in r.rows(2)] for r in (judged, resumed))
    assert before == after and any(score is not None for score in after)
    same(workshop.params(resumed.run_dir), workshop.params(judged.run_dir))
