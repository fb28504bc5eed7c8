"""The benchmark of the training step: packed and padded updates are the same one."""

import json

import numpy as np
import pytest

from benchmarks.training import train_step, workloads


@pytest.mark.slow
@pytest.mark.guards("benchmarks/training/", "jaxrl_llm/training/update.py")
def test_a_case(tmp_path, capsys):
    """Rows of 64 places, two in a micro-batch, for 32 sequences."""
    where = tmp_path / "figures.json"
    words = "--cases test-64-spread --sequences 32 --repeats 1 --peak 1 --json"
    train_step.main([*words.split(), str(where)])
    (figures,) = json.loads(where.read_text())["cases"]
    tokens = sum(workloads.lognormal_lengths(32, 16, 64))
    assert figures["tokens"] == tokens
    assert figures["padding_padded"] == pytest.approx(1 - tokens / (32 * 64))
    rows = 1 / (1 - figures["padding_packed"]) * tokens / 64
    assert rows == pytest.approx(round(rows))
    assert tokens / 64 <= rows <= tokens / 64 + 2
    assert 0 < figures["difference"] < 1e-4
    assert figures["ratio"] == pytest.approx(figures["padded_s"][0] / figures["packed_s"][0])
    assert capsys.readouterr().out.splitlines()[-1].startswith("| test-64-spread | 2,880 | 32 |")


def test_gradients_that_differ_are_an_error():
    case = train_step.case_of("test-64-spread", 4, "float32")
    one = train_step.Run([1.0], 0.5, [np.array([3.0, 4.0])], 0.0)
    other = one._replace(gradients=[np.array([3.0, 4.1])])
    assert train_step.difference(one, other) == pytest.approx(0.02)
    with pytest.raises(SystemExit, match="test-64-spread"):
        train_step.check(case, one, other)
    with pytest.raises(SystemExit, match="losses"):
        train_step.check(case, one, one._replace(loss=0.6))
