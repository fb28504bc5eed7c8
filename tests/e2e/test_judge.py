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


def flaky(answer, content):
    """Return how the server behaves; ratings differ each time, as no real judge's should."""
    kind = KINDS[zlib.crc32(content.encode()) % len(KINDS)]
    return f"rated {random.uniform(0, 10):.3f}" if kind == "any" else kind


@pytest.fixture(scope="module")
def judged(run):
    """A run, the judge's server, and a function that goes on with the run."""
    with JudgeServer(flaky) as server:
        function = {"fn": "judge", "url": server.url, "model": "m"}
        words = (f"reward.function={json.dumps(function)}", "reward.on_error=unscored", "steps=2")
        words += ("reward.max_error_share=0.9", "reward.concurrency=8", "reward.timeout_s=5")
        words += ("reward.retries=1", "rollout.dump_every=1", "validation.every=1")
        words += ("checkpoint.every=1",)
        yield run(*words).ok(), server, lambda folder: run(*words, run_dir=folder).ok()


def test_unscored_answers_are_counted_shown_and_left_out(judged):
    result, server, _ = judged
    errors = 0
    for line in result.metrics[1:]:
        rows = result.rows(line["step"])
        unscored = [row for row in rows if row["score"] is None]
        assert 0 < line["reward/unscored"] == len(unscored) < len(rows)
        failed = [row for row in unscored if not row["error"].startswith("unscored: ")]
        assert line["reward/errors"] == len(failed) < len(unscored)
        errors += len(failed)
        for group in (rows[first : first + 4] for first in range(0, len(rows), 4)):
            shown = [row["advantage"] for row in group if row["advantage"] is not None]
            scores = np.array([row["score"] for row in group if row["score"] is not None])
            if len(scores) < 2:
                assert not shown
            else:
                expected = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
                np.testing.assert_allclose(shown, expected, rtol=1e-3, atol=1e-5)
    assert errors and "unscored" in result.out and 1 < server.most_at_once <= 8
    shown = KeptAnswers(RunFiles(result.run_dir)).read(10**7)["rows"]
    assert any(row["score"] is None and "no verdict" in row["error"] for row in shown)


def test_a_run_goes_on_with_the_same_verdicts_while_the_judge_is_down(judged, copy_of, workshop):
    """As after a kill in step 2, before its checkpoint: its answers had been asked about."""
    result, server, go_on = judged
    folder = copy_of(result)
    shutil.rmtree(folder / "checkpoints/2")
    asked = server.asked.total()
    server.stop()
    try:
        resumed = go_on(folder)
    finally:
        server.start()
    assert server.asked.total() == asked
    for before, after in zip(result.learned, resumed.learned, strict=True):
        assert {**before, "reward/errors": 0} == {**after, "reward/errors": 0}
    before, after = ([row["score"] for row in r.rows(2)] for r in (result, resumed))
    assert before == after and any(score is not None for score in after)
    same(workshop.params(resumed.run_dir), workshop.params(result.run_dir))
