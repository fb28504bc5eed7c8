import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import jaxrl_llm
from benchmarks.code import metrics
from jaxrl_llm.report import main
from jaxrl_llm.reporting.health import Finding
from jaxrl_llm.reporting.page import (
    KeptAnswers,
    Page,
    TokenTexts,
    curves,
    decoder,
    describe_metric,
    metric_pattern,
    metric_table,
)
from jaxrl_llm.training.run_files import RunFiles
from tests.refusals import refuses
from tests.reporting.folders import byte_tokenizer, kept_answer, step_line, write_run

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_line_and_python_write_the_same_page(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [step_line(1)])
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    assert jaxrl_llm.write_report(folder, tmp_path / "b.html") == tmp_path / "b.html"
    pages = [(folder / "report.html").read_text(), (tmp_path / "b.html").read_text()]
    once = [re.sub(r"nonce(-|=\")[\w-]+|data-metrics.*", "", page) for page in pages]
    assert once[0] == once[1]
    assert "http://" not in re.sub(r'<script type="text/plain".*', "", pages[0]).replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    folder = write_run(tmp_path / "run", [])
    assert main([str(folder), "--out", str(folder)]) == 2
    assert main([str(folder), "--out", ""]) == 2
    assert main([str(folder), "--serve", "--port", "99999"]) == 2
    assert "--port 99999" in capsys.readouterr().err
    with refuses():
        jaxrl_llm.write_report([])


def test_metrics_that_are_damaged_are_named(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [step_line(1)])
    path = folder / "metrics.jsonl"
    whole = path.read_text()
    for line in ("garbage", "[1]", '{"step": null}', '{"step": 1, "a": "b"}'):
        path.write_text(f"{whole}{line}\n")
        assert main([str(folder), "--health"]) == 2
        assert f"{path}: line 2" in capsys.readouterr().err
        (run,) = Page([folder]).metrics()["runs"]
        assert run["findings"] is None and run["problems"], "nothing is said to be well"


def test_what_looks_wrong_is_on_the_page_and_in_the_terminal(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "run", [step_line(1)])
    found = Finding("cut", "Answers are cut off", "half of them", (1, 2), "metrics.md#x", "error")
    monkeypatch.setattr("jaxrl_llm.reporting.page.check_run", lambda run: [found])
    (run,) = Page([folder]).metrics()["runs"]
    assert run["findings"] == [found._asdict()]
    monkeypatch.setattr("jaxrl_llm.reporting.health.check_run", lambda run: [found])
    assert main([str(folder), "--health"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{folder}\nerror: Answers are cut off") and "half of them" in printed
    with pytest.raises(SystemExit):
        main([str(folder), "--health", "--serve"])
    assert "exclude each other" in capsys.readouterr().err


def test_secrets_of_the_config_are_not_on_the_page(tmp_path):
    uri = "log.trackers=[{fn: mlflow, tracking_uri: 'http://me:hush@host'}]"
    folder = write_run(tmp_path / "run", [], "cluster.env={NCCL_DEBUG: hush}", uri)
    (run,) = Page([folder]).metrics()["runs"]
    assert run["config"]["cluster.env.NCCL_DEBUG"] == "(not published)"
    assert "http://(not published)@host" in run["config"]["log.trackers"]
    assert "hush" not in str(run)


@pytest.mark.parametrize("page", metrics.PAGES)
def test_the_tables_of_metrics_say_what_the_librarys_says(page):
    text = (metrics.DOCS / page).read_text(encoding="utf-8")
    assert metrics.filled(text) == text, "run python -m benchmarks.code.metrics"


def test_every_metric_of_the_librarys_table_is_in_one_of_the_pages():
    text = "".join((metrics.DOCS / page).read_text(encoding="utf-8") for page in metrics.PAGES)
    cells = [name for _, name, _ in metrics.listed(text) if name]
    names = [name for cell in cells for name in metrics.names_of(cell)]
    assert len(names) > 150
    assert [name for name in names if not describe_metric(name)[1]] == []
    patterns = [pattern for rows in metric_table().values() for pattern in rows]
    assert [p for p in patterns if not any(map(metric_pattern(p).fullmatch, names))] == []
    several = [
        name for name in names if sum(bool(metric_pattern(p).fullmatch(name)) for p in patterns) > 1
    ]
    assert several == []


def test_a_long_curve_keeps_each_parts_extremes():
    values = np.random.default_rng(0).normal(size=10_000).cumsum()
    lines = [{"step": i, "a": float(v)} for i, v in enumerate(values)]
    curve = curves(lines, 100)["a"]
    assert len(curve["x"]) <= 102
    np.testing.assert_allclose(curve["y"], values[curve["x"]], rtol=1e-4)
    parts = np.split(values, 50)
    assert {int(np.argmax(p)) + 200 * i for i, p in enumerate(parts)} <= {*curve["x"]}
    assert {int(np.argmin(p)) + 200 * i for i, p in enumerate(parts)} <= {*curve["x"]}
    np.testing.assert_allclose(curve["mean_y"], [p.mean() for p in parts], rtol=1e-4)


def test_answers_stay_within_their_budget(tmp_path):
    def asked(number):
        return json.dumps([{"role": "user", "content": f"prompt {number}"}])

    rows = {
        step: [kept_answer("x" * 100, prompt=asked(4 * step + i)) for i in range(4)]
        for step in range(1, 61)
    }
    rows[1][3]["prompt"] = rows[60][3]["prompt"] = asked("of two steps")
    run = RunFiles(write_run(tmp_path / "run", [], answers=rows))
    kept = KeptAnswers(run).read(25_000)
    assert 15_000 < len(json.dumps(kept["rows"])) < 35_000
    assert kept["total"] == 240 and len(kept["steps"]) == 60
    shown = kept["shown_steps"]
    assert (shown[0], shown[-1], len(shown)) == (1, 60, 24)
    of_ends = [kept["prompts"][r["prompt"]][0][1] for r in kept["rows"] if r["step"] in (1, 60)]
    assert of_ends.count("prompt of two steps") == 2, "those that can be compared come first"
    assert len(KeptAnswers(run).read(10_000_000)["rows"]) == 240


def test_texts_of_tokens_are_the_text_of_all(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("plain", "Zürich, 東京, 🙂🙂", "e\u0301 \u200b\n\n\t x", "\ufffd and \ufffd"):
        ids = theirs.encode(text).ids
        pieces = TokenTexts(decoder(str(tmp_path)))(ids)
        assert len(pieces) == len(ids) == len(text.encode())
        assert "".join(pieces) == theirs.decode(ids) == text
    half = theirs.encode("ü").ids[:1]
    assert TokenTexts(byte_tokenizer().decode)(half) == ["\ufffd"]


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    row = kept_answer("ab", score=float("nan"), logprobs=[float("-inf"), -0.5])
    run = RunFiles(write_run(tmp_path / "run", [], answers={1: [row]}))
    (shown,) = KeptAnswers(run).read(10_000)["rows"]
    assert shown["score"] is None and shown["lp"] == [None, -0.5] and shown["diff"] == [None, 0.12]
    assert shown["adv"] == 0.5, "one number for all tokens"
