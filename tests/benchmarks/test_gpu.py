"""What `benchmarks.gpu` counts, and what it says without a GPU."""

import doctest
import json

import pytest

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import cases, jobs, shapes, specs, tables
from jaxrl_llm.models.flops import update_flops


@pytest.mark.parametrize("module", [benchmark, cases, jobs, shapes, specs, tables])
def test_examples(module):
    assert doctest.testmod(module).failed == 0


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
    assert update_flops(specs.spec_of("tiny"), lengths) == 3 * total


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
