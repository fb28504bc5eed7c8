"""Tasks of reasoning-gym as data, and their own rules as the reward function."""

import json
import os
import subprocess
import sys

import pytest

from jaxrl_llm.configs.tasks.reasoning_gym import reasoning_gym, task_dataset
from jaxrl_llm.data.prepare import main
from jaxrl_llm.data.rows import read_rows, sft_rows, verl_rows
from jaxrl_llm.rewards.functions import by_source
from jaxrl_llm.rewards.functions import reasoning_gym as score

MANY = [
    "aiw",
    "acre",
    "basic_arithmetic",
    "bitwise_arithmetic",
    "chain_sum",
    "circuit_logic",
    "countdown",
    "family_relationships",
    "gsm_symbolic",
    "knights_knaves",
    "leg_counting",
    "letter_counting",
    "mini_sudoku",
    "rearc",
    "rotten_oranges",
    "spell_backward",
    "syllogism",
    "word_sorting",
    "zebra_puzzles",
]
SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 2}}


def questions(path):
    return [row["prompt"][-1]["content"] for row in read_rows(path)]


def answered(row, reply, **options):
    given = row["data_source"], reply, row["reward_model"]["ground_truth"], row["extra_info"]
    return score(*given, **options)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    task_dataset.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'jaxrl_llm\[tasks\]'"):
        reasoning_gym(tmp_path, tasks=SUMS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": {}}, "tasks: expected at least one"),
        ({"tasks": {"chain_sum": {"weight": 0}}}, "tasks.chain_sum.weight: got 0, expected a posi"),
        ({"seed": 10**6}, "seed: got 1000000, expected 0 to "),
        ({"template": "Calculate"}, "template: got 'Calculate', expected {question} in it"),
        ({"sft_rows": 1, "response": "12"}, "response: got '12', expected {answer} in it"),
        ({"train_rows": 0}, "train_rows: got 0, expected at least 1"),
    ],
)
def test_wrong_keywords_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        reasoning_gym(tmp_path, **{"tasks": SUMS, **changes})


class TestWithThePackage:
    """What needs reasoning-gym (`pip install 'jaxrl_llm[tasks]'`)."""

    @pytest.fixture(autouse=True)
    def package(self):
        pytest.importorskip("reasoning_gym")
        task_dataset.cache_clear()

    @pytest.mark.parametrize("task", MANY)
    def test_the_right_answer_scores_one_after_a_round_trip_through_a_file(self, tmp_path, task):
        reasoning_gym(tmp_path, tasks={task: {}}, train_rows=3, validation_rows=2)
        task_dataset.cache_clear()  # as in a reward worker
        (row, *_) = rows = verl_rows([str(tmp_path / "train.parquet")])
        assert [row["data_source"] for row in rows] == [f"reasoning_gym/{task}"] * 3
        answer = row["reward_model"]["ground_truth"]
        assert answered(row, f" {answer}\n") == {"score": 1.0, "acc": 1.0, "pred": answer.strip()}
        wrong = answered(row, "no such answer")
        assert wrong["acc"] == 0.0 and wrong["score"] < 0.2
        given = row["data_source"], answer, answer, row["extra_info"]
        assert by_source(*given)["score"] == 1.0

    def test_no_validation_question_comes_elsewhere(self, tmp_path):
        """Of 100 products, so that chance alone would let some meet."""
        tasks = {"products": {"min_digits": 1, "max_digits": 1}, **SUMS}
        reasoning_gym(tmp_path, tasks=tasks, train_rows=60, validation_rows=40, sft_rows=50, seed=3)
        splits = {n: questions(tmp_path / f"{n}.parquet") for n in ("train", "validation", "sft")}
        assert [len(set(part)) for part in splits.values()] == [60, 40, 50]
        assert not set(splits["validation"]) & {*splits["train"], *splits["sft"]}

    def test_weights_divide_the_rows_and_a_seed_decides_which(self, tmp_path):
        tasks = {"aiw": {"weight": 3}, "chain_sum": {"max_digits": 1}}
        for name, seed in (("a", 0), ("b", 0), ("c", 1)):
            reasoning_gym(tmp_path / name, tasks=tasks, train_rows=20, validation_rows=4, seed=seed)
        a, b, c = (verl_rows([str(tmp_path / n / "train.parquet")]) for n in "abc")
        assert a == b and a != c
        counts = [sum(row["data_source"].endswith(task) for row in a) for task in tasks]
        assert counts == [15, 5]

    @pytest.mark.slow
    @pytest.mark.guards("configs/tasks/reasoning_gym.py")
    def test_another_process_with_another_hash_seed_makes_the_same(self, tmp_path):
        tasks = {task: {} for task in MANY}
        command = [sys.executable, "-m", "jaxrl_llm.data.prepare", "reasoning_gym"]
        rows = ["--train_rows", "38", "--validation_rows", "19", "--tasks", json.dumps(tasks)]
        for seed in "12":
            environment = os.environ | {"PYTHONHASHSEED": seed}
            out = ["--out", str(tmp_path / seed)]
            subprocess.run([*command, *out, *rows], check=True, env=environment)
        first, second = (read_rows(tmp_path / seed / "train.parquet") for seed in "12")
        assert first == second

    def test_a_prompt_is_as_the_user_sets_it(self, tmp_path):
        format_of = {
            "system": "Be short.",
            "template": "{question}\nUse {braces}.",
            "response": "<answer>{answer}</answer>",
        }
        reasoning_gym(
            tmp_path, tasks=SUMS, train_rows=4, validation_rows=1, sft_rows=2, **format_of
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

    def test_a_part_of_the_score_may_be_left_out(self, tmp_path):
        reasoning_gym(tmp_path, tasks=SUMS, train_rows=1, validation_rows=1)
        (row,) = verl_rows([str(tmp_path / "train.parquet")])
        reply = f"It is {row['reward_model']['ground_truth']}"
        assert 0 < answered(row, reply)["score"] < 1
        assert answered(row, reply, exact=True)["score"] == 0.0

    def test_an_item_that_the_package_makes_otherwise_is_a_failure(self, tmp_path):
        reasoning_gym(tmp_path, tasks=SUMS, train_rows=1, validation_rows=1)
        (row,) = verl_rows([str(tmp_path / "train.parquet")])
        with pytest.raises(ValueError, match="this version of reasoning-gym makes another item"):
            score("", "1", "not a number", row["extra_info"])
        with pytest.raises(ValueError, match=r"got one without extra_info\.task"):
            score("", "1", "1", None)

    @pytest.mark.parametrize(
        ("tasks", "message"),
        [
            ({"chainsum": {}}, "unknown task 'chainsum'; did you mean 'chain_sum'?"),
            ({"chain_sum": {"max_term": 2}}, "unknown setting of chain_sum 'max_term'; did you"),
            ({"chain_sum": {"min_terms": 9, "max_terms": 2}}, "chain_sum: "),
            ({"chain_sum": {"seed": 1}}, "chain_sum: seed is set for all tasks"),
            ({"products": {"max_digits": 1, "min_digits": 1}}, "products: got 99 questions"),
        ],
    )
    def test_impossible_tasks_are_refused(self, tmp_path, tasks, message):
        with pytest.raises(ValueError) as error:
            reasoning_gym(tmp_path, tasks=tasks, train_rows=400, validation_rows=1)
        assert message in str(error.value)

    def test_a_wrong_task_is_one_line_on_the_command_line(self, tmp_path):
        with pytest.raises(SystemExit, match=r"error: unknown task 'sums'"):
            main(["reasoning_gym", "--out", str(tmp_path), "--tasks", "{sums: {}}"])
