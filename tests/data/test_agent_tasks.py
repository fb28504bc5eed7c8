import contextlib
import io
import itertools
import random

import pytest

from jaxrl_llm.configs.tasks._code import Code, taught_program
from jaxrl_llm.configs.tasks.agent_task import AGENT_TASKS, agent_task
from jaxrl_llm.data.rows import sft_rows, verl_rows
from jaxrl_llm.rollout.agents.environments import grid, guess_number
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.builtin import look_up


@pytest.mark.parametrize("task", sorted(AGENT_TASKS))
def test_rows_fit_the_schema_and_validation_is_held_out(tmp_path, task):
    paths = agent_task(tmp_path, task=task, train_rows=400, validation_rows=100, sft_episodes=300)
    train, validation = (verl_rows([str(path)]) for path in [*paths][:2])
    taught = sft_rows([str(tmp_path / "sft.parquet")])
    assert (len(train), len(validation)) == (400, 100)
    assert len(taught) == paths[tmp_path / "sft.parquet"] > 300 - (task == "calculator")
    assert all(row["data_source"] == task for row in train + validation)
    if task == "guess_number":  # of 31 numbers
        return

    def known(row):
        return row["prompt"][0]["content"] + row["extra_info"].get("table", "")

    assert not {known(row) for row in validation} & {known(row) for row in train}
    assert len({known(row) for row in validation + train}) == 500
    if task != "look_up":  # there, the secret is in the table
        prompts = {row["prompt"][0]["content"] for row in taught}
        assert not {known(row) for row in validation} & prompts


def test_tasks_refuse(tmp_path, subtests):
    for keywords, named in [
        *(({"task": "chess"}, "chess"), ({"settings": {"hop": 3}}, "hops")),
        *(({"settings": {"stop": 1.5}}, "stop"), ({"train_rows": 0}, "row")),
    ]:
        with subtests.test(str(keywords)), pytest.raises(ValueError, match=named):
            agent_task(tmp_path / "data", **keywords)


def test_what_the_teacher_of_look_up_is_told_is_what_the_tool_tells():
    task, rng = AGENT_TASKS["look_up"](), random.Random(1)
    for number in range(50):
        row = task.row(number, rng)
        chat = task.chat(row, rng)
        about = EpisodeRow(0, extra_info=row["extra_info"])
        letter = row["prompt"][0]["content"][0]
        for said, told in zip(chat[1:-1:2], chat[2:-1:2], strict=True):
            assert said["content"] == f"[look_up(letter='{letter}')]"
            letter = look_up(letter, about)
            assert told == {"role": "tool", "content": letter}


def test_programs_print_what_the_teacher_is_told():
    rng = random.Random(2)
    for bug, number in itertools.product(range(3), range(20)):
        row = Code().row(number, rng)
        program = taught_program(row["prompt"][0]["content"], bug)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(program.source, {})
        assert out.getvalue().strip() == program.value
        assert (program.value == row["reward_model"]["ground_truth"]) == (bug == 0)


def test_guesses_are_told_and_cost_and_what_is_no_number_tells_nothing():
    game = guess_number("3", guesses=3)
    next(game)
    assert [game.send("16")[:2], game.send("02").text] == [("<", -0.1), ">"]
    for said in ("", "x", "0", "32", "-3", "9" * 400, "٣", "1\n2"):
        game = guess_number("3", guesses=3)
        next(game)
        assert [game.send(said).text, game.send(said).text] == ["?", "?"], said
        with pytest.raises(StopIteration) as stop:
            game.send(said)
        assert stop.value.value == 0.0, said


def test_walls_and_edges_hold_and_moves_slip_to_their_sides():
    for moves, told, score in [
        ("RR", "b", 1.0),
        ("LUR", "aab", 0.0),  # edges hold; three steps may be made
        ("DxR", "aab", 0.0),  # a wall below, and what is no move
    ]:
        walk = grid({"map": "abC#efghi", "start": "a"}, random.Random(0), slip=0.0, steps=3)
        assert next(walk).text == ""
        cells = [walk.send(move).text for move in moves[:-1]]
        assert cells == list(told[: len(cells)])
        with pytest.raises(StopIteration) as stop:
            walk.send(moves[-1])
        assert stop.value.value == score
    about = {"map": "abcdefghijklmnopqrstuvwxY", "start": "m"}
    walks = [grid(about, random.Random(seed)) for seed in range(99)]
    went = {next(walk) and walk.send("U").text for walk in walks}
    assert went == {"h", "l", "n"}
