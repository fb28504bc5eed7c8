"""What `benchmarks.gpu` counts, and what it says without a GPU."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark():
    """Import the benchmarks as `python -m` does at the repository's root."""
    sys.path.insert(0, str(ROOT))
    try:
        yield importlib.import_module("benchmarks.gpu.__main__")
    finally:
        sys.path.remove(str(ROOT))


def test_examples(benchmark):
    modules = benchmark, benchmark.shapes, importlib.import_module("benchmarks.gpu.cases")
    assert all(doctest.testmod(module).failed == 0 for module in modules)


def test_an_updates_flops_equal_a_sum_over_tokens_and_pairs(benchmark):
    shape, lengths = benchmark.shapes.SHAPES["tiny"], [3, 7, 1]
    width, inner = shape.width, shape.heads * shape.head_dim
    matrices = [(width, inner), (inner, width), *[(width, shape.ff_width)] * 3]
    matrices += [(width, shape.kv_heads * shape.head_dim)] * 2
    total = 0
    for length in lengths:
        for seen in range(1, length + 1):
            total += 2 * width * shape.vocabulary
            total += shape.layers * sum(2 * a * b for a, b in matrices)
            total += shape.layers * shape.heads * seen * 2 * (2 * shape.head_dim)
    assert benchmark.shapes.update_flops(shape, lengths) == 3 * total


def test_every_job_has_a_row_in_the_tables_whatever_came_of_it(benchmark):
    rows = []
    for part in benchmark.PARTS.values():
        for job in part.jobs(benchmark.shapes.FULL, True):
            name = benchmark.SYSTEMS[job.system]
            rows += [
                {"part": job.do, "system": name, "case": c, "error": "out of memory"}
                for c in job.cases
            ]
    results = {"command": "-", "date": "-", "machine": {"device": "NVIDIA H200"}, "rows": rows}
    assert benchmark.page(results).count("out of memory") == len(rows)
    assert sum(benchmark.LIMITS.values()) < 20 * 60
    assert benchmark.LIMITS.keys() == benchmark.PARTS.keys()


def test_what_is_missing_is_said(benchmark):
    found = {"missing": ["optax (No module named 'optax')"], "platform": "cpu", "device": "cpu"}
    texts = benchmark.lacking(found, small=False)
    assert "optax" in texts[0]
    assert "no GPU: jax sees cpu" in texts[1]
    assert benchmark.lacking(found | {"missing": []}, small=True) == []


def test_a_job_that_dies_or_takes_too_long_is_a_row(benchmark, tmp_path):
    job = benchmark.Job("no_such_module", "update", [{}])
    (row,) = benchmark.measure(job, 60, tmp_path)
    assert "No module named" in row["error"]
    (row,) = benchmark.measure(benchmark.Job("theirs", "update", [{}]), 0.01, tmp_path)
    assert row["error"] == "not done after 0 s"
