"""The page of a run in a real browser: each view has content, and nothing in it runs or breaks."""

import json
import re

import pytest

from jaxrl_llm.reporting.page import metric_table
from tests.reporting.browsing import plot_data, show, until
from tests.reporting.folders import kept_answer, step_line, write_lines, write_run

VIEWS = ("overview", "curves", "answers", "time", "config")


@pytest.fixture
def whole_run(tmp_path):
    answers = {
        step: [kept_answer("four", score=0.0, advantage=-1.0), kept_answer("4")]
        for step in (10, 20)
    }
    lines = [step_line(step) for step in range(1, 41)]
    return write_run(tmp_path / "whole", lines, "steps=40", answers=answers)


def test_every_view_of_a_finished_run_has_content(open_runs, whole_run):
    page = open_runs(whole_run)
    overview = show(page, "overview")
    assert "finished, 40 steps" in overview.inner_text()
    numbers = overview.locator("table.numbers").inner_text()
    assert re.search(r"training score\s+0.1439\s+step 1\s+0.8782\s+step 40\s+0.8782", numbers)
    assert "Nothing looks wrong." in overview.inner_text()
    assert "seed 0" in " ".join(overview.locator(".run-facts").inner_text().split())

    curves = show(page, "curves")
    titles = curves.locator("details.group > summary h2").all_inner_texts()
    assert titles == [group for group in metric_table() if group != "Other"]
    mean, highest, lowest = plot_data(page, "critic/score", 3)
    assert mean["x"] == list(range(1, 41)) and highest["y"][0] == 1 and lowest["y"][0] == 0
    assert "score of a response" in curves.inner_text()
    page.fill("#curves input[type=search]", "gradient")
    until(page, "document.querySelectorAll('#curves .plot').length === 1")
    assert page.inner_text("#curves figcaption code") == "actor/grad_norm", "found by its meaning"

    assert show(page, "answers").locator("table.answers tbody tr").count() == 4
    page.wait_for_selector("#answer-body table")
    show(page, "time")
    until(page, "document.querySelector('#time-plot')?.data?.length === 4")
    bars = page.evaluate("document.querySelector('#time-plot').data.map(t => [t.name, t.y[0]])")
    assert bars == [["gen", 1], ["reward", 0.25], ["update_actor", 0.5], ["other", 0.25]]
    assert "step 40: 2.00 s" in page.inner_text("#one-step")
    page.click("#one-step >> text=← earlier")
    one = page.inner_text("#one-step")
    assert "step 39: 2.00 s" in one and "12.5 %" in one
    until(page, "document.querySelector('#memory-plot').data.length === 1")

    config = show(page, "config")
    config.locator("input").fill("samples_per_prompt")
    until(page, "document.querySelectorAll('#config tbody tr').length === 1")
    assert "rollout.samples_per_prompt" in config.inner_text()


def test_several_runs_lie_over_each_other_and_their_configs_are_compared(open_runs, tmp_path):
    folders = [
        write_run(tmp_path / name, [step_line(step) for step in range(1, last)], f"seed={seed}")
        for name, seed, last in (("one", 1, 30), ("two", 2, 12))
    ]
    page = open_runs(*folders)
    assert page.locator(".run-card").count() == 2
    show(page, "curves")
    assert [t["name"] for t in plot_data(page, "actor/entropy", 2)] == ["one", "two"]
    page.click("#legend >> text=two")
    assert [t["name"] for t in plot_data(page, "actor/entropy", 1)] == ["entropy"]
    page.click("#legend >> text=two")
    show(page, "config")
    assert page.locator("#config tbody th").all_inner_texts() == ["model.path", "seed"]


ATTACKS = (
    "<img src=x onerror='window.hacked=1'>",
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    "<a href='javascript:window.hacked=1'>x</a>",
)


def test_answers_are_shown_and_never_run(open_runs, tmp_path):
    rows = [
        kept_answer(
            attack,
            prompt=json.dumps([{"role": attack, "content": attack}]),
            data_source=attack,
            finish=attack,
            error=attack,
            ground_truth=json.dumps(attack),
            extra=json.dumps({attack: attack}),
        )
        for attack in ATTACKS
    ]
    lines = [
        step_line(step, **{f"reward/{attack}/mean": 1.0 for attack in ATTACKS}) for step in (1, 2)
    ]
    folder = write_run(
        tmp_path / "<img src=x onerror='window.hacked=1'>", lines, answers={1: rows, 2: rows}
    )
    page = open_runs(folder, write_run(tmp_path / "other", lines))
    for view in VIEWS:
        show(page, view)
    show(page, "curves")
    page.locator("#curve-groups .plot").last.scroll_into_view_if_needed()
    show(page, "answers")
    page.wait_for_selector("#answer-body table")
    shown = page.inner_text("#answer-body")
    for number, attack in enumerate(ATTACKS):
        assert attack in shown
        page.locator("table.answers tbody tr").nth(number).click()
        assert page.inner_text("#tokens .stream") == attack
        assert page.inner_text("#answer").count(attack) >= 6
        page.keyboard.press("Escape")
    page.click("text=same prompt over steps")
    page.wait_for_selector(".step-column")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked === undefined")
    assert page.locator("main img, main script, dialog img, dialog script").count() == 0


def test_answers_are_found_sorted_and_coloured(open_runs, whole_run):
    page = open_runs(whole_run)
    show(page, "answers")
    rows = page.locator("table.answers tbody tr")
    page.wait_for_selector("table.answers tbody tr")
    page.fill("#answers input[type=search]", "fou")
    until(page, "document.querySelectorAll('table.answers tbody tr').length === 2")
    page.fill("#answers input[type=search]", "")
    until(page, "document.querySelectorAll('table.answers tbody tr').length === 4")
    page.select_option("select[aria-label=step]", "10")
    assert rows.count() == 2
    page.click("th.score button")
    assert rows.locator("td.score").all_inner_texts() == ["1", "0"]
    page.click("th.score button")
    assert rows.locator("td.score").all_inner_texts() == ["0", "1"]
    page.select_option("select[aria-label=only]", "up")
    assert rows.count() == 1

    rows.first.click()
    token = page.locator("#tokens .token").first
    assert token.inner_text() == "4"
    assert token.get_attribute("title") == (
        "advantage +0.5 · log-prob −0.5 · trainer − engine +0.12 · entropy 0.25"
    )
    colours = set()
    for name in ("adv", "diff", "ent", "lp", "none"):
        page.click(f"#answer [data-value={name}]")
        colours.add(page.locator("#tokens .token").first.evaluate("t => t.style.background"))
    assert len(colours) == 3, "one with two sides, one with one, none"
    assert "acc" in page.inner_text("#answer") and "Ground truth" in page.inner_text("#answer")


CALL = '<tool_call>\n{"name": "f"}\n</tool_call>'


def test_episodes_show_turns_calls_and_what_was_told(open_runs, tmp_path):
    turns = [f"Look.{CALL}", "<tool_response>ü 7</tool_response>", "It is 7"]
    whole = kept_answer("".join(turns))
    sizes = [len(text.encode()) for text in turns]
    ids = [turn for turn, size in zip((0, -1, 1), sizes, strict=True) for _ in range(size)]
    drawn = [0.5] * (sizes[0] + sizes[2])
    whole |= {"turn_ids": ids, "turn_rewards": [0.25, 1.0]}
    whole |= {name: drawn for name in ("advantages", "logprobs", "rollout_logprobs", "entropies")}
    page = open_runs(write_run(tmp_path / "episodes", [step_line(1)], answers={1: [whole]}))
    show(page, "answers")
    page.click("table.answers tbody tr")
    heads = page.locator(".turn-head").all_inner_texts()
    assert heads == ["turn 1, reward 0.25", "turn 2, reward 1"]
    assert page.inner_text(".call").split() == ["tool", "call", *CALL.split()]
    told = page.locator("details.told")
    assert told.locator("pre").is_hidden()
    told.locator("summary").click()
    assert told.locator("pre").inner_text() == turns[1]
    assert page.locator("#tokens .token").count() == len(turns[0]) + len(turns[2])


def test_a_run_without_steps_has_its_views(open_runs, tmp_path):
    page = open_runs(write_run(tmp_path / "run", []))
    assert "no step yet" in page.inner_text("#overview")
    for view in VIEWS:
        assert show(page, view).inner_text().strip()


def test_what_is_damaged_or_missing_is_named(open_runs, tmp_path):
    old = {n: v for n, v in kept_answer("5").items() if n not in ("advantages", "entropies")}
    folder = write_run(tmp_path / "run", [step_line(1)], answers={1: [old], 2: [old]})
    (folder / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1 no more")
    (folder / "tokenizer.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('what?\n{"loss": 1}\n')
    write_lines(folder, [step_line(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "actor/ent')
    page = open_runs(folder)
    for line in (2, 3):
        assert f"metrics.jsonl: line {line} is no step's metrics" in page.inner_text("#overview")
    assert "stopped at step 2" in page.inner_text("#overview")
    assert "the last line is not whole" in page.inner_text("#overview")
    show(page, "answers")
    page.wait_for_selector("table.answers tbody tr")
    text = page.inner_text("#answers")
    assert "rollouts/step_000002.parquet can't be read" in text
    assert "Answers are shown without their tokens: tokenizer: can't load one from" in text
    page.click("table.answers tbody tr")
    assert page.inner_text("#tokens") == "5"
