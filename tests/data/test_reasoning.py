import sys

import pytest

from jaxrl_llm.configs.tasks.reasoning_gym import reasoning_gym, task_dataset
from jaxrl_llm.data.rows import sft_rows, verl_rows
from jaxrl_llm.rewards.functions import by_source
from jaxrl_llm.rewards.functions import reasoning_gym as score

MANY = ["chain_sum", "countdown", "mini_sudoku"]
SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 2}}


def answered(row, reply, **options):
    given = row["data_source"], reply, row["reward_model"]["ground_truth"], row["extra_info"]
    return score(*given, **options)


def test_a_missing_package_and_wrong_keywords_are_named(tmp_path, monkeypatch):
    for key, changes in {
        **{"tasks": {"tasks": {}}, "seed": {"seed": 10**6}, "template": {"template": "Calculate"}},
        r"tasks\.chain_sum\.weight": {"tasks": {"chain_sum": {"weight": 0}}},
        **{"response": {"sft_rows": 1, "response": "12"}, "train_rows": {"train_rows": 0}},
    }.items():
        with pytest.raises(ValueError, match=f"^{key}:"):
            reasoning_gym(tmp_path, **{"tasks": SUMS, **changes})
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    task_dataset.cache_clear()
    with pytest.raises(ValueError, match=r"jaxrl_llm\[tasks\]"):
        reasoning_gym(tmp_path, tasks=SUMS)


@pytest.fixture
def package():
    """What the rest needs: `pip install 'jaxrl_llm[tasks]'`."""
    pytest.importorskip("reasoning_gym")
    task_dataset.cache_clear()


def test_the_right_answer_scores_one_after_a_round_trip_through_a_file(tmp_path, package):
    for task in MANY:
        reasoning_gym(tmp_path, tasks={task: {}}, train_rows=3, validation_rows=2)
        task_dataset.cache_clear()  # as in a reward worker
        (row, *_) = rows = verl_rows([str(tmp_path / "train.parquet")])
        assert [row["data_source"] for row in rows] == [f"reasoning_gym/{task}"] * 3
        answer = row["reward_model"]["ground_truth"]
        whole = {"score": 1.0, "acc": 1.0, "pred": answer.strip()}
        assert answered(row, f" {answer}\n") == whole, task
        wrong = answered(row, "no such answer")
        assert wrong["acc"] == 0.0 and wrong["score"] < 0.2, task
        given = row["data_source"], answer, answer, row["extra_info"]
        assert by_source(*given)["score"] == 1.0, task


def test_a_prompt_is_as_the_user_sets_it(tmp_path, package):
    reasoning_gym(
        tmp_path,
        tasks=SUMS,
        **{"train_rows": 4, "validation_rows": 1, "sft_rows": 2},
        system="Be short.",
        template="{question}\nUse {braces}.",
        response="<answer>{answer}</answer>",
    )
    (row, *_) = verl_rows([str(tmp_path / "train.parquet")])
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][1]["content"].endswith("=\nUse {braces}.")
    (example, *_) = sft_rows([str(tmp_path / "sft.parquet")])
    assert example["response"].startswith("<answer>")
    right, tag = row["reward_model"]["ground_truth"], "<answer>(.*?)</answer>"
    reply = f"<answer>?</answer> no, <answer>\n{right}</answer>."
    assert answered(row, reply, pattern=tag) == {"score": 1.0, "acc": 1.0, "pred": right}
    assert answered(row, right, pattern=tag) == {"score": 0.0, "acc": 0.0, "pred": None}
    assert 0 < answered(row, f"It is {right}")["score"] < 1
    assert answered(row, f"It is {right}", exact=True)["score"] == 0.0
    for truth, info, named in (("no", row["extra_info"], "item"), ("1", None, "extra_info")):
        with pytest.raises(ValueError, match=named):
            score("", "1", truth, info)
    for named, tasks in {"sum": {"sum": {}}, "max_term": {"chain_sum": {"max_term": 2}}}.items():
        with pytest.raises(ValueError, match=named):
            reasoning_gym(tmp_path, tasks=tasks)
