"""Generated tasks of reasoning-gym (https://arxiv.org/abs/2505.24760), scored by their own rules.

An item is kept as the seed and the number from which its generator makes it again, bit for bit:
what a rule needs to know of an item is not always something that a file can hold.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.data.rows import Row, Written, write_splits
from jaxrl_llm.rewards.functions import task_dataset

SEED_SPAN = 1_000_000
"""Seeds between those of two files. Item i is made from the seed plus i, so files that lie nearer
together than they have items share some."""
MAX_SEED = 2**32 // (3 * SEED_SPAN) - 1
"""Numpy's generators take 32 bits."""
TRIES = 4
"""Items that are looked at for each that is wanted: a question may come twice."""


def reasoning_gym(  # noqa: PLR0913 - each is a key of a config
    out: str | Path,
    *,
    tasks: Mapping[str, Mapping[str, Any]] | None = None,
    train_rows: int = 4096,
    validation_rows: int = 512,
    sft_rows: int = 0,
    system: str = "",
    template: str = "{question}",
    response: str = "{answer}",
    seed: int = 0,
) -> Written:
    """Write tasks of reasoning-gym, for the reward function of the same name.

    No question comes twice in a file, and no validation question comes in another file; the
    supervised file may share questions with the training file.

    Args:
        out: directory for train.parquet, validation.parquet and sft.parquet (prompt + response).
        tasks: `{NAME: {weight: 1, SETTING: value, …}, …}`: which tasks, in which proportion, and
            the settings of their generators.
        train_rows: questions to train on.
        validation_rows: questions held out.
        sft_rows: questions with their answers, for a supervised warm-up; 0 writes no such file.
        system: the system message; empty for none.
        template: of the user's message, with `{question}` in it.
        response: of the supervised file's responses, with `{answer}` in it.
        seed: of the choice of questions.

    Returns:
        The files and their rows.

    Raises:
        ValueError: the package is not installed, there is no such task or setting, a number is out
            of range, a template lacks its field, or there are too few questions.
    """
    plan = TaskPlan(tasks or {}, system, template, response, seed)
    return write_splits(Path(out), plan.splits(train_rows, validation_rows, sft_rows))


class Item(NamedTuple):
    """An item of a task: its question and answer, and what it is made again from.

    `settings` are JSON, with the seed and the number of items.
    """

    task: str
    settings: str
    number: int
    question: str
    answer: str | None


class TaskPlan(NamedTuple):
    """What files of tasks hold; the keywords of `prepare.reasoning_gym`."""

    tasks: Mapping[str, Mapping[str, Any]]
    system: str
    template: str
    response: str
    seed: int

    def splits(self, train_rows: int, validation_rows: int, sft_rows: int) -> dict[str, list[Row]]:
        """Return the rows of each file, in an order by the seed.

        Raises:
            ValueError: as `prepare.reasoning_gym`.
        """
        self._check()
        counts = {"validation": validation_rows, "train": train_rows, "sft": sft_rows}
        for split, count in counts.items():
            least = int(split != "sft")
            if count < least:
                raise ValueError(f"{split}_rows: got {count}, expected at least {least}")
        splits, held_out = dict[str, list[Row]](), set[str]()
        for part, (split, count) in enumerate(counts.items()):
            first = (3 * self.seed + part) * SEED_SPAN
            items = self._items(count, first, held_out)
            if split == "validation":
                held_out = {item.question for item in items}
            splits[split] = [self._row(split, index, item) for index, item in enumerate(items)]
        return {split: rows for split, rows in splits.items() if rows}

    def _check(self) -> None:
        if not self.tasks:
            raise ValueError("tasks: expected at least one, as {chain_sum: {weight: 1}}")
        for task, weight in self._weights().items():
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f"tasks.{task}.weight: got {weight!r}, expected a positive number")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed: got {self.seed}, expected 0 to {MAX_SEED}")
        for name, field in (("template", "{question}"), ("response", "{answer}")):
            if field not in getattr(self, name):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {field} in it")

    def _weights(self) -> dict[str, Any]:
        return {task: (given or {}).get("weight", 1) for task, given in self.tasks.items()}

    def _items(self, count: int, seed: int, held_out: set[str]) -> list["Item"]:
        items = list[Item]()
        for task, rows in rows_by_weight(self._weights(), count).items():
            settings = {k: v for k, v in (self.tasks[task] or {}).items() if k != "weight"}
            items += draw_items(task, settings, seed, rows, held_out)
        random.Random(seed).shuffle(items)
        return items

    def _row(self, split: str, index: int, item: "Item") -> Row:
        prompt = [{"role": "system", "content": self.system}] if self.system else []
        # not str.format: questions and templates may have other braces
        question = self.template.replace("{question}", item.question)
        prompt.append({"role": "user", "content": question})
        if split == "sft":
            if item.answer is None:
                raise ValueError(f"{item.task} has no single right answer, so sft_rows must be 0")
            return {"prompt": prompt, "response": self.response.replace("{answer}", item.answer)}
        made_from = {"task": item.task, "settings": item.settings, "item": item.number}
        return {
            "data_source": f"reasoning_gym/{item.task}",
            "prompt": prompt,
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": item.answer or ""},
            "extra_info": {"split": split, "index": index, **made_from},
        }


def draw_items(
    task: str, settings: Mapping[str, Any], seed: int, count: int, excluded: set[str]
) -> list[Item]:
    """Make items with different questions.

    Args:
        task: its name.
        settings: of its generator.
        seed: of the first item.
        count: how many.
        excluded: questions that may not come.

    Raises:
        ValueError: as `task_dataset`, or there are too few questions.
    """
    size = TRIES * count + 100
    if size > SEED_SPAN:
        most = (SEED_SPAN - 100) // TRIES
        raise ValueError(f"{task}: got {count} rows of one file, expected at most {most}")
    for name in ("seed", "size"):
        if name in settings:
            raise ValueError(f"{task}: {name} is set for all tasks: expected no {name!r} here")
    text = json.dumps({**settings, "seed": seed, "size": size}, sort_keys=True)
    questions, items = set(excluded), list[Item]()
    for item in _items(task, text, size):
        if len(items) == count:
            break
        if item.question not in questions:
            questions.add(item.question)
            items.append(item)
    if len(items) < count:
        raise ValueError(
            f"{task}: got {len(items)} questions that differ from each other and from those held "
            f"out, expected {count}: ask for fewer rows, or widen its settings"
        )
    return items


def _items(task: str, settings: str, size: int) -> Iterator[Item]:
    dataset = task_dataset(task, settings)
    for number in range(size):
        made = dataset[number]
        yield Item(task, settings, number, made["question"], made["answer"])


def rows_by_weight(weights: Mapping[str, float | int], rows: int) -> dict[str, int]:
    """Deal rows out to tasks in proportion to their weights, by largest remainder.

    >>> rows_by_weight({"a": 2, "b": 1, "c": 1}, 5)
    {'a': 3, 'b': 1, 'c': 1}
    """
    total = sum(weights.values())
    shares = {name: rows * weight / total for name, weight in weights.items()}
    counts = {name: int(share) for name, share in shares.items()}
    order = sorted(shares, key=lambda name: counts[name] - shares[name])
    for name in order[: rows - sum(counts.values())]:
        counts[name] += 1
    return counts
