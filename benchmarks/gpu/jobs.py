"""The parts of `benchmarks.gpu` as jobs, each a process with its cases. Plain Python."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.shapes import Sizes

LIMITS = {
    "target": 20,
    "parity": 120,
    "update": 400,
    "decode": 350,
    "experts": 70,
    "attention": 90,
    "logprobs": 50,
    "profile": 80,
}
"""Seconds for each part; together less than 20 minutes."""

Row = dict[str, Any]


class Job(NamedTuple):
    """One process.

    Attributes:
        system: The module of this folder that runs it.
        do: The function in it.
        cases: What it does one after another.
    """

    system: str
    do: str
    cases: list[Row]


def update_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield the updates, the most telling first: what there is no time for is left out."""
    return itertools.islice(_updates(sizes, has_flash), sizes.updates)


def _updates(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    low, middle, high = sizes.micro
    common = {"shape": sizes.shape, "tokens": sizes.tokens, "row": sizes.row, "runs": sizes.runs}
    equal = {"lengths": "equal", "length": sizes.length} | common
    spread = equal | {"lengths": "spread"}
    whole = equal | {"length": middle, "row": middle}

    def ours(micro: int, remat: str, case: Row = equal, attention: str = "auto") -> Job:
        return Job("ours", "update", [case | _of(micro=micro, remat=remat, attention=attention)])

    def torch(
        micro: int, again: bool, case: Row = equal, by: str = "sdpa", masters: bool = False
    ) -> Job:
        settings = _of(micro=micro, checkpointing=again, attention=by, masters=masters)
        return Job("theirs", "update", [case | settings])

    yield ours(middle, "dots")
    yield torch(middle, False)
    yield ours(middle, "none")
    yield torch(middle, True)
    if has_flash:
        yield torch(middle, False, by="flash_attention_2")
    yield ours(high, "dots")
    yield torch(high, True)
    yield ours(low, "none")
    yield torch(low, False)
    yield ours(middle, "dots", spread)
    yield torch(middle, False, spread)
    yield torch(middle, False, masters=True)
    yield ours(middle, "dots", attention="xla")
    yield ours(middle, "full")
    yield ours(high, "full")
    yield torch(high, False)
    yield ours(middle, "dots", whole)
    yield torch(middle, False, whole)
    yield ours(low, "dots")
    yield torch(low, True)
    yield ours(high, "none")


def _of(**values: Any) -> Row:
    return values


def attention_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield one process per way of attending."""
    common = {"heads": sizes.heads, "runs": 2 * sizes.runs}
    for system, by in (("ours", "cudnn"), ("ours", "xla"), ("theirs", "sdpa")):
        cases = [common | {"case": case, "by": by} for case in sizes.attention]
        yield Job(system, "attention", cases)


def experts_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield one process per way of multiplying groups of rows by a matrix each."""
    for system, by in (
        ("ours", "triton"),
        ("ours", "blocked"),
        ("ours", "ragged_dot"),
        ("theirs", "grouped_mm"),
    ):
        cases = [{"experts": case, "by": by, "runs": sizes.runs} for case in sizes.experts]
        yield Job(system, "experts", cases)


def parity_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield one process, in which transformers in float32 is computed once."""
    common = {"shape": sizes.small_shape, "parity": sizes.parity}
    low = common | {"dtype": "bfloat16"}
    cases = [common | {"by": "trainer", "dtype": "float32"}]
    cases += [low | {"by": by} for by in ("transformers", "trainer")]
    cases += [low | {"by": "engine", "engine": name} for name in ENGINES]
    yield Job("parity", "parity", cases)


def target_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield what writes the device's description for XLA's compiler."""
    yield Job("ours", "target", [{}])


def logprob_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield one process for all chunk sizes."""
    common = {"scored": sizes.scored, "runs": sizes.runs}
    yield Job("ours", "logprobs", [common | {"chunk": chunk} for chunk in sizes.chunks])


def profile_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield the update of the middle size."""
    (case,) = next(update_jobs(sizes, has_flash)).cases
    yield Job("ours", "profile", [case])


def decode_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield each number of requests for both systems; few and many by our other engines, too."""
    common = _of(
        shape=sizes.shape,
        dtype="bfloat16",
        answer=sizes.answer,
        runs=2,
        read_bytes=sizes.read_bytes,
        bandwidth=sizes.bandwidth,
    )
    few, *middle, many = sizes.decode
    plain, *others = ENGINES
    for requests in (many, few, *middle):
        case = common | {"requests": requests}
        yield Job("ours", "decode", [case | {"engine": plain}])
        yield Job("theirs", "decode", [case])
    for requests, engine in itertools.product((many, few), others):
        yield Job("ours", "decode", [common | {"requests": requests, "engine": engine}])


def merged(jobs: Sequence[Job]) -> list[Job]:
    """Return jobs with the cases of each system in one process, which saves importing it again.

    >>> [len(job.cases) for job in merged([Job("a", "f", [{}]), Job("b", "f", [{}])] * 2)]
    [2, 2]
    """
    names = dict.fromkeys((job.system, job.do) for job in jobs)
    return [
        Job(*name, [case for job in jobs if job[:2] == name for case in job.cases])
        for name in names
    ]


ENGINES = {
    "pages": {},
    "rows": {"attention": "xla"},
    "int8 cache": {"settings": {"kv_cache_dtype": "int8"}},
    "fp8 weights": {"settings": {"quantization": "fp8"}},
}
"""What the native engines differ in: how attention was chosen, and settings of the engine."""

PARTS: dict[str, Callable[[Sizes, bool], Iterator[Job]]] = {
    "target": target_jobs,
    "parity": parity_jobs,
    "update": update_jobs,
    "decode": decode_jobs,
    "experts": experts_jobs,
    "attention": attention_jobs,
    "logprobs": logprob_jobs,
    "profile": profile_jobs,
}
"""Functions of the sizes and of whether flash-attn is installed, by the part's name."""
