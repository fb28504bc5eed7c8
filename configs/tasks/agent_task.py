"""Tasks of several turns that a small decoder learns on a laptop: their rows and their teachers.

Each teacher is flawed in a known way, so that a model that imitates it succeeds at a known rate:
RL then finds out which half of what it has seen is right.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxrl_llm.configs.tasks._code import Code
from jaxrl_llm.configs.tasks._rows import Messages, chat_message, task_row, turn_rows
from jaxrl_llm.configs.tasks._search import Search, write_corpus
from jaxrl_llm.data.rows import Row, Written, write_splits
from jaxrl_llm.rollout.agents.environments import MOVES, Play, grid, guess_number, moved

LETTERS = "abcdefghijklmnopqrstuvwxyz"
GRID_SIDE = 4


def agent_task(
    out: str | Path,
    *,
    task: str = "look_up",
    settings: Mapping[str, Any] | None = None,
    train_rows: int = 4096,
    validation_rows: int = 256,
    sft_episodes: int = 4096,
    seed: int = 0,
) -> Written:
    """Write a task of several turns, with a tool or an environment, that a small model can learn.

    No validation row comes in another file, except for guess_number. For search there is a folder
    `corpus`, too, in which its tool searches.

    Args:
        out: directory for train.parquet, validation.parquet and sft.parquet (prompt + response).
        task: look_up, calculator, guess_number, grid, code or search.
        settings: of the task and its teacher (configs/tasks/agent_task.py).
        train_rows: rows to train on.
        validation_rows: rows held out.
        sft_episodes: of a flawed teacher, each turn a row, for a supervised warm-up; 0 writes no
            such file.
        seed: of all draws.

    Returns:
        The files and their rows.

    Raises:
        ValueError: no such task or setting, or a number out of range.
    """
    rows = {"train": train_rows, "validation": validation_rows}
    splits = agent_task_splits(
        task, settings or {}, rows=rows, sft_episodes=sft_episodes, seed=seed
    )
    if task == "search":
        write_corpus(Path(out), Search(**(settings or {})))
    return write_splits(Path(out), splits)


@runtime_checkable
class AgentTask(Protocol):
    """A task: how rows are drawn, and what the flawed teacher does with one.

    Its fields are the settings that a configuration may give.
    """

    def row(self, number: int, rng: random.Random) -> Row:
        """Draw a row, the `number`th of its file."""
        ...

    def chat(self, row: Row, rng: random.Random) -> Messages:
        """Return the chat of an episode of the teacher, from the row's prompt to its end."""
        ...


class LookUp(NamedTuple):
    """Follow a chain of letters through a secret table that only a tool can read.

    The prompt `q3=` asks for the letter three arrows after q. The teacher stops too early, after
    each call but the last one, by some chance: it is right with 1 - stop to the power of hops - 1.

    Attributes:
        hops: the longest chain.
        stop: the chance to stop.
    """

    hops: int = 4
    stop: float = 0.5

    def row(self, number: int, rng: random.Random) -> Row:
        """Draw a table, a letter and a number of hops."""
        table = "".join(one_cycle(rng))
        start, hops = rng.choice(LETTERS), rng.randint(1, self.hops)
        answer = start
        for _ in range(hops):
            answer = table[LETTERS.index(answer)]
        return task_row("look_up", f"{start}{hops}=", answer, table=table)

    def chat(self, row: Row, rng: random.Random) -> Messages:
        """Look up letter after letter, and answer with the last one."""
        prompt = row["prompt"][0]["content"]
        letter, hops, chat = prompt[0], int(prompt[1:-1]), list(row["prompt"])
        for hop in range(1, hops + 1):
            chat.append(chat_message("assistant", f"[look_up(letter='{letter}')]"))
            letter = row["extra_info"]["table"][LETTERS.index(letter)]
            chat.append(chat_message("tool", letter))
            if hop < hops and rng.random() < self.stop:
                break
        return [*chat, chat_message("assistant", letter)]


class Calculator(NamedTuple):
    """Multiply numbers of four and of three digits, with or without a calculator.

    The teacher guesses, with the right number of digits but for the value; or it calls the
    calculator, and then may copy the first number wrong, or guess after all. Half of the products
    have six digits, half seven, so that both are seen.

    Attributes:
        guess: the chance to guess without a call.
        miscopy: the chance that a digit of a call is wrong.
        forget: the chance to guess after a call.
        failing: the chance that the calculator answers `!`: the teacher calls again, or guesses,
            by half.
    """

    guess: float = 0.65
    miscopy: float = 0.25
    forget: float = 1 / 3
    failing: float = 0.0

    def row(self, number: int, rng: random.Random) -> Row:
        """Draw two numbers."""
        digits = rng.choice((6, 7))
        while True:
            first, second = rng.randint(1000, 9999), rng.randint(100, 999)
            if len(str(first * second)) == digits:
                return task_row("calculator", f"{first}*{second}=", str(first * second))

    def chat(self, row: Row, rng: random.Random) -> Messages:
        """Answer with the calculator's result or with a guess."""
        problem, chat = row["prompt"][0]["content"][:-1], list(row["prompt"])
        answer = row["reward_model"]["ground_truth"]
        guessed = str(rng.randrange(10 ** (len(answer) - 1), 10 ** len(answer)))
        if rng.random() < self.guess:
            return [*chat, chat_message("assistant", guessed)]
        while True:
            first, second = problem.split("*")
            if rng.random() < self.miscopy:
                first = _with_another_digit(first, rng)
            chat.append(chat_message("assistant", f"[calculator(expression='{first}*{second}')]"))
            failed = rng.random() < self.failing
            result = "!" if failed else str(int(first) * int(second))
            chat.append(chat_message("tool", result))
            if not failed:
                forgets = rng.random() < self.forget
                return [*chat, chat_message("assistant", guessed if forgets else result)]
            if rng.random() < 0.5:
                return [*chat, chat_message("assistant", guessed)]


class GuessNumber(NamedTuple):
    """Find a secret number by guesses (`rollout.environment: guess_number`).

    The teacher guesses any number that is still possible, each by the same chance. Every number
    comes equally often in a file, validation included: no prompt shows it.

    Attributes:
        high: the largest number.
        guesses: so many may be made.
    """

    high: int = 31
    guesses: int = 5

    def row(self, number: int, rng: random.Random) -> Row:
        """Return the row of the next number."""
        return task_row("guess_number", f"1-{self.high}=", str(number % self.high + 1))

    def chat(self, row: Row, rng: random.Random) -> Messages:
        """Guess until the number is found or all guesses are made."""
        low, high = 1, self.high

        def guess(told: str) -> str:
            nonlocal low, high, last
            if told:
                low, high = (low, last - 1) if told == "<" else (last + 1, high)
            last = rng.randint(low, high)
            return str(last).zfill(len(str(self.high)))

        last = 0
        secret = row["reward_model"]["ground_truth"]
        game = guess_number(secret, high=self.high, guesses=self.guesses)
        return list(row["prompt"]) + _played(game, guess)


class Grid(NamedTuple):
    """Walk to a goal on a slippery grid with walls (`rollout.environment: grid`).

    The prompt is the map, row by row, and the first cell: every free cell by its letter, the
    goal's in capitals. The teacher makes a step on a shortest way by some chance, else any step.

    Attributes:
        walls: how many.
        careful: the chance of a step on a shortest way.
        steps: so many may be made.
        slip: the chance of a slip.
    """

    walls: int = 3
    careful: float = 0.5
    steps: int = 10
    slip: float = 0.2

    def row(self, number: int, rng: random.Random) -> Row:
        """Draw a map with a way of two steps or more."""
        free = LETTERS[: GRID_SIDE**2]
        while True:
            *walls, goal, start = rng.sample(free, self.walls + 2)
            drawn = ["#" if c in walls else c.upper() if c == goal else c for c in free]
            cells = "".join(drawn)
            if distances(cells).get(start, 0) >= 2:
                return task_row("grid", f"{cells} {start}", goal, map=cells, start=start)

    def chat(self, row: Row, rng: random.Random) -> Messages:
        """Walk until the goal is reached or all steps are made."""
        cells, cell = row["extra_info"]["map"], row["extra_info"]["start"]
        away = distances(cells)

        def step(told: str) -> str:
            here = told or cell
            if rng.random() >= self.careful:
                return rng.choice(list(MOVES))
            return rng.choice([m for m in MOVES if away[moved(cells, here, m)] < away[here]])

        walk = grid(row["extra_info"], rng, steps=self.steps, slip=self.slip)
        return list(row["prompt"]) + _played(walk, step)


AGENT_TASKS: dict[str, Any] = {
    "look_up": LookUp,
    "calculator": Calculator,
    "guess_number": GuessNumber,
    "grid": Grid,
    "code": Code,
    "search": Search,
}


def agent_task_splits(
    task: str, settings: Mapping[str, Any], *, rows: Mapping[str, int], sft_episodes: int, seed: int
) -> dict[str, list[Row]]:
    """Draw the rows of a task, and those of its teacher's turns.

    Args:
        task: one of `AGENT_TASKS`.
        settings: values for its fields.
        rows: how many for `train` and for `validation`.
        sft_episodes: episodes of the teacher; 0 for no `sft`.
        seed: of all draws.

    Returns:
        Rows by split. No row of validation is in another split, nor any row twice in one, except
        for `guess_number`.

    Raises:
        ValueError: no such task or setting, or a number out of range.
    """
    if task not in AGENT_TASKS:
        raise ValueError(f"agent_task: expected one of {', '.join(AGENT_TASKS)}, got {task!r}")
    if min(rows.values()) < 1 or sft_episodes < 0:
        raise ValueError(
            "agent_task: expected at least 1 row each and 0 episodes, got"
            f" {dict(rows)}, sft_episodes={sft_episodes}"
        )
    fields = AGENT_TASKS[task]._field_defaults
    if unknown := set(settings) - set(fields):
        raise ValueError(
            f"agent_task: {task} has the settings {', '.join(fields)}, got {sorted(unknown)}"
        )
    drawn = AGENT_TASKS[task](**settings)
    _check_settings(task, drawn)
    rng = random.Random(f"{task} {seed}")
    validation = _draw(drawn, rows["validation"], rng, "validation", [])
    splits = {
        "train": _draw(drawn, rows["train"], rng, "train", validation),
        "validation": validation,
    }
    if sft_episodes:
        taught = _draw(drawn, sft_episodes, rng, "sft", validation)
        splits["sft"] = [part for row in taught for part in turn_rows(drawn.chat(row, rng))]
    return splits


def one_cycle(rng: random.Random) -> list[str]:
    """Return a permutation of the letters with one cycle, so that no chain meets itself.

    This is Sattolo's algorithm: each of the 25! such permutations by the same chance.
    """
    letters = list(LETTERS)
    for place in range(len(letters) - 1, 0, -1):
        other = rng.randrange(place)
        letters[place], letters[other] = letters[other], letters[place]
    return letters


def distances(cells: str) -> dict[str, int]:
    """Return how many steps each cell is from the goal of a map, where it can be reached.

    >>> distances("aB#d")
    {'b': 0, 'd': 1, 'a': 1}
    """
    goal = next(cell for cell in cells if cell.isupper()).lower()
    away, border = {goal: 0}, [goal]
    while border:
        here = border.pop(0)
        for move in MOVES:  # each step can be made back
            there = moved(cells, here, move)
            if there not in away:
                away[there] = away[here] + 1
                border.append(there)
    return away


def _draw(
    task: AgentTask, count: int, rng: random.Random, split: str, held_out: Sequence[Row]
) -> list[Row]:
    shared = isinstance(task, GuessNumber)
    seen = {_secret(row) for row in held_out}
    rows: list[Row] = []
    refused = 0
    while len(rows) < count:
        row = task.row(len(rows), rng)
        if not shared and _secret(row) in seen:
            refused += 1
            if refused > 100 * count + 1000:
                raise ValueError(f"agent_task: there are too few rows for {split}: {len(rows)}")
            continue
        seen.add(_secret(row))
        row["extra_info"] |= {"split": split, "index": len(rows)}
        rows.append(row)
    return rows


def _secret(row: Row) -> str:
    return f"{row['prompt'][0]['content']} {row['extra_info'].get('table', '')}"


def _check_settings(task: str, settings: Any) -> None:
    chances = {
        *("stop", "guess", "miscopy", "forget", "failing", "careful", "slip", "broken", "wrong"),
        "vague",
    }
    most = {"hops": 9, "high": 999, "guesses": 99, "walls": GRID_SIDE**2 - 4, "steps": 99}
    most |= {"people": 5000, "cities": 1000, "lands": 400}
    for name, value in settings._asdict().items():
        low, high = (0, 1) if name in chances else (name != "walls", most[name])
        whole = name in chances or isinstance(value, int)
        if not isinstance(value, int | float) or not whole or not low <= value <= high:
            raise ValueError(
                f"agent_task: {task}: expected {name} from {int(low)} to {high}, got {value!r}"
            )


def _played(play: Play, answer: Callable[[str], str]) -> Messages:
    """Return the turns of a teacher in an environment, and what it was told between them."""
    chat, told = [], next(play).text
    while True:
        reply = answer(told)
        chat.append(chat_message("assistant", reply))
        try:
            told = play.send(reply).text
        except StopIteration:
            return chat
        chat.append(chat_message("user", told))


def _with_another_digit(number: str, rng: random.Random) -> str:
    """Return the number with one digit changed; the first one stays 1 or more."""
    place = rng.randrange(len(number))
    others = [d for d in "0123456789"[place == 0 :] if d != number[place]]
    return number[:place] + rng.choice(others) + number[place + 1 :]
