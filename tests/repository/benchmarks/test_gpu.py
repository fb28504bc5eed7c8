"""What `benchmarks.gpu` counts, and what it says without a GPU."""

import doctest
import json
import time

import pytest

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import (
    cases,
    decode_probe,
    jobs,
    learn,
    next_steps,
    quarter_hour,
    shapes,
    specs,
    tables,
)
from jaxrl_llm.models.flops import update_flops


def test_examples():
    modules = (benchmark, cases, jobs, learn, next_steps, quarter_hour, shapes, specs, tables)
    assert sum(doctest.testmod(module).failed for module in modules) == 0


def test_an_updates_flops_equal_a_sum_over_tokens_and_pairs():
    shape, lengths = shapes.SHAPES["tiny"], [3, 7, 1]
    width, inner = shape.width, shape.heads * shape.head_dim
    matrices = [(width, inner), (inner, width), *[(width, shape.ff_width)] * 3]
    matrices += [(width, shape.kv_heads * shape.head_dim)] * 2
    total = 0
    for length in lengths:
        for seen in range(1, length + 1):
            total += 2 * width * shape.vocabulary
            total += shape.layers * sum(2 * a * b for a, b in matrices)
            total += shape.layers * shape.heads * seen * 2 * (2 * shape.head_dim)
    spec = specs.spec_of("tiny")
    assert update_flops(spec, lengths) == 3 * total
    unscored = sum(lengths) - shapes.count_scored(lengths)
    assert unscored == 3
    head = 2 * width * shape.vocabulary
    assert specs.scored_flops(spec, lengths) == 3 * (total - unscored * head)


def test_decoding_reads_the_weights_and_the_cache_once_a_step():
    spec = specs.spec_of("tiny")
    matrices = 512 * 64 + 2 * 64 * (2 * 64 + 2 * 32 + 3 * 128)
    keys_and_values = 2 * 2 * 2 * 16
    cached = 3 * keys_and_values * (6 + 7)
    assert tables.decoding_bytes(spec, 3, [6, 7]) == 2 * (2 * matrices + cached)
    halved = tables.decoding_bytes(spec, 3, [6, 7], kv_cache_dtype="int8")
    assert halved == 2 * 2 * matrices + cached + 2 * cached // 16
    halved = tables.decoding_bytes(spec, 3, [6, 7], quantization="fp8")
    assert halved == 2 * (matrices + 512 * 64) + 2 * cached


def test_every_job_has_a_row_in_the_tables_whatever_came_of_it():
    rows = []
    for part in jobs.PARTS.values():
        for job in part(shapes.FULL, True):
            name = benchmark.SYSTEMS[job.system]
            rows += [
                {"part": job.do, "system": name, "case": c, "error": "out of memory"}
                for c in job.cases
            ]
    results = {"command": "-", "date": "-", "machine": {"device": "NVIDIA H200"}, "rows": rows}
    assert tables.page(results).count("out of memory") == len(rows)
    assert sum(jobs.LIMITS.values()) < 20 * 60
    assert jobs.LIMITS.keys() == jobs.PARTS.keys()


def test_what_is_missing_is_said():
    probed = {"missing": ["optax (No module named 'optax')"], "platform": "cpu", "device": "cpu"}
    texts = benchmark.lacking(probed, small=False)
    assert "optax" in texts[0]
    assert "no GPU: jax sees cpu" in texts[1]
    assert benchmark.lacking(probed | {"missing": []}, small=True) == []


def test_a_job_that_dies_or_takes_too_long_is_a_row(tmp_path):
    job = jobs.Job("no_such_module", "update", [{}])
    (row,) = benchmark.measure(job, 60, tmp_path)
    assert "No module named" in row["error"]
    (row,) = benchmark.measure(jobs.Job("theirs", "update", [{}]), 0.01, tmp_path)
    assert row["error"] == "not done after 0 s"


@pytest.fixture
def record(tmp_path):
    about = {"command": "-", "date": "-", "machine": {}}
    return quarter_hour.Record(tmp_path / "out", about, time.monotonic())


def test_phases_that_fail_hang_or_no_longer_fit_are_rows(record, tmp_path, monkeypatch):
    (tmp_path / "says.py").write_text("print('{\"seconds\": 1.0}'); print('{ no row'); 1 / 0")
    (tmp_path / "hangs.py").write_text(
        "import subprocess, sys, time\n"
        'print(\'{"what": "before"}\', flush=True)\n'
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    phases = [
        quarter_hour.Phase("fails", ("says",), 20),
        quarter_hour.Phase("hangs", ("hangs",), 1),
        quarter_hour.Phase("lacks", ("says",), 20, lacks="needs a moon"),
        quarter_hour.Phase("late", ("says",), 2000, least=1000),
    ]
    quarter_hour.run_phases(phases, 60, record)
    written = [json.loads(line) for line in (record.folder / "rows.jsonl").read_text().splitlines()]
    assert written[1:] == record.rows
    rows = [(row["phase"], row.get("what") or row.get("error", "")) for row in record.rows]
    names, texts = zip(*rows, strict=True)
    assert names == ("fails", "fails", "hangs", "hangs", "lacks", "late")
    assert "ZeroDivisionError" in texts[1]
    assert texts[2:5] == ("before", "stopped after 1 s", "needs a moon")
    assert texts[5].startswith("not begun")
    assert "{ no row" in (record.folder / "log.txt").read_text()
    assert "needs a moon" in (record.folder / "page.md").read_text()


def test_what_to_do_next_follows_from_the_rows():
    timed = {
        "phase": "decode",
        "what": decode_probe.TIMED,
        "seconds": 2.0,
        "prefill_seconds": 0.4,
        "prefill_programs": 64,
        "decode_ms_a_token": 8.0,
        "tokens_a_chunk": 16,
        "host_ms_a_chunk": 12.8,
        "of_floor": 0.3,
    }
    slow, quick = timed | {"host_ms_a_chunk": 1.28}, {"decode_ms_a_token": 7.0}
    update = {"phase": "updates", "case": {"do": "update", "logprob_chunk": 8}, "seconds": 1.0}
    better = update | {"case": {"do": "update", "logprob_chunk": 16}, "seconds": 0.5}
    kernel = {"phase": "kernel", "microseconds": 100.0, "terabytes_a_second": 2.0}
    variant = {"stages": 3, "tokens_at_once": 64, "warps": 4, "microseconds": 80.0}
    for rows, expected in (
        ([timed], "10%"),
        ([timed], "Prefill takes 20%"),
        ([slow], "1.0% of a chunk: leave it"),
        ([timed, timed | quick | {"phase": "decode-while"}], "make it the default"),
        ([timed, timed | {"phase": "decode-while"}], "leave the option alone"),
        ([update, better], "16 is the fastest"),
        ([kernel, kernel | variant], "take them: 20% less time"),
        ([update | {"error": "out of memory"}], "Not measured: updates: out of memory"),
        ([{"phase": "decode", "what": decode_probe.TIMED}], "No sentence from _decode"),
    ):
        assert expected in " ".join(next_steps.next_steps(rows)), (rows, expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute of processor time, but in processes that others may slow down
@pytest.mark.guards("benchmarks/gpu/", "jaxrl_llm/rollout/native/", "jaxrl_llm/training/")
def test_every_phase_of_the_quarter_hour_runs_without_a_gpu(tmp_path):
    pytest.importorskip("torch")
    words = ["--small", "--minutes", "25", "--out", str(tmp_path)]
    assert quarter_hour.main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    errors = {row["phase"]: row["error"] for row in rows if "error" in row}
    assert errors == {
        "target": "XLA has written no description of the device",
        "push": "needs an NVIDIA GPU",
        "learn": quarter_hour.NO_MODEL,
        "learn-trl": quarter_hour.NO_MODEL,
        "tests": "needs an NVIDIA GPU",
    }
    timed = [row for row in rows if row.get("what") == decode_probe.TIMED]
    read = {row["phase"]: row["prompt_tokens_read"] for row in timed}
    assert len(read) == 7
    for phase, tokens in read.items():  # a few prompts begin alike
        requests = {"decode-32": 4, "decode-1": 1}.get(phase, 8)
        assert 0.8 * requests * 15 < tokens <= requests * 15, read
    again = [row for row in rows if row.get("what") == decode_probe.AGAIN]
    assert {row["prompt_tokens_read"] for row in again} == {0}
    (trace,) = [row for row in rows if row.get("what") == "trace"]
    assert abs(sum(trace["shares"].values()) - 1) < 1e-6
    ended = [row["phase"] for row in rows if row.get("ended") == "done"]
    assert len(ended) == len(set(ended)) == len({row["phase"] for row in rows}) - 4


@pytest.mark.slow
@pytest.mark.guards("benchmarks/gpu/", "jaxrl_llm/training/", "models/")
def test_log_probs_and_gradients_are_those_of_transformers(tmp_path):
    """All that needs no GPU, at the size for any device: about half a minute."""
    words = ["--small", "--parts", "parity,experts", "--out", str(tmp_path)]
    assert benchmark.main(words) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    errors = [row for row in rows if "error" in row]
    assert [row["case"]["by"] for row in errors] == ["triton"], errors
    parity = {
        (row["case"].get("engine", row["case"]["by"]), row["case"]["dtype"]): row
        for row in rows
        if row["part"] == "parity"
    }
    exact, ours = parity["trainer", "float32"], parity["trainer", "bfloat16"]
    theirs = parity["transformers", "bfloat16"]
    assert max(exact["mean"], exact["gradient"]) < 1e-5
    assert ours["mean"] < 1.5 * theirs["mean"]
    assert ours["gradient"] < 1.5 * theirs["gradient"]
    assert parity["rows", "bfloat16"]["mean"] < 1.5 * theirs["mean"]
