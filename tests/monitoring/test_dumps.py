"""The answers of a training step as rows of a parquet file."""

import dataclasses

import numpy as np
import pyarrow.parquet
import pytest

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts
from jaxrl_llm.training.dumps import dump_rollouts
from jaxrl_llm.types import Batch


def drawn(*tokens):
    ids, count = np.array(tokens, np.int32), len(tokens)
    return Completion(ids, np.zeros(count, np.float32), np.zeros(count, np.int32), "")


@pytest.fixture
def step():
    """Two episodes after a prompt of two tokens: drawn, told, drawn; and one that is broken."""
    whole = Episode((1, 2), (drawn(3), Completion.told([4]), drawn(5, 6)), "stop")
    broken = dataclasses.replace(whole, error="no disk")
    mask = np.array([[False, False, True, False, True, True], [False] * 6])
    fields = {"mask": mask}
    for number, name in enumerate(("advantages", "old_logprobs", "rollout_logprobs", "entropy")):
        fields[name] = np.arange(12, dtype=np.float32).reshape(2, 6) + 10 * number
    batch = Batch(np.zeros((2, 6), np.int32), np.array([6, 6], np.int32), fields)
    prompt = Prompt(0, (1, 2), "sums", "4")
    return batch, Rollouts([prompt] * 2, [whole, broken], ["a", "b"]), [Score(1.0, {}, None)] * 2


def test_each_drawn_token_has_its_numbers(step, tmp_path):
    dump_rollouts(tmp_path / "rollouts", 3, *step)
    path = tmp_path / "rollouts" / "step_000003.parquet"
    whole, broken = pyarrow.parquet.read_table(path).to_pylist()
    assert whole["advantage"] == pytest.approx(11 / 3)
    assert whole["advantages"] == [2, 4, 5] and whole["logprobs"] == [12, 14, 15]
    assert whole["rollout_logprobs"] == [22, 24, 25] and whole["entropies"] == [32, 34, 35]
    assert whole["turn_ids"] == [0, -1, 1, 1]
    names = ("advantage", "advantages", "logprobs", "rollout_logprobs", "entropies")
    assert {broken[name] for name in names} == {None}
    assert broken["error"] == "broken: no disk"
    batch, *others = step
    fields = {n: v for n, v in batch.fields.items() if n not in ("entropy", "old_logprobs")}
    dump_rollouts(tmp_path / "fewer", 3, dataclasses.replace(batch, fields=fields), *others)
    whole, _ = pyarrow.parquet.read_table(tmp_path / "fewer").to_pylist()
    assert whole["entropies"] is None and whole["logprobs"] is None, "what was not computed"
    assert whole["advantages"] == [2, 4, 5]
