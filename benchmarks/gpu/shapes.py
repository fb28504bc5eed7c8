"""Models, GPUs and sizes of the jobs of `benchmarks.gpu`. Plain Python, for torch's jobs, too."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Sizes of a Qwen3 model; embeddings and output projection are tied."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff_width: int


SHAPES = {
    "qwen3-1.7b": Shape(151936, 2048, 28, 16, 8, 128, 6144),
    "qwen3-1.7b, 4 layers": Shape(32768, 2048, 4, 16, 8, 128, 6144),
    "tiny": Shape(512, 64, 2, 4, 2, 16, 128),
}


class Peak(NamedTuple):
    """What a GPU can do at most: dense bfloat16 FLOP/s and bytes/s of its memory."""

    flops: float
    bandwidth: float
    source: str


PEAKS = {
    "H200": Peak(989e12, 4.8e12, "https://www.nvidia.com/en-us/data-center/h200/"),
    "H100": Peak(989e12, 3.35e12, "https://www.nvidia.com/en-us/data-center/h100/"),
}
"""By a part of the device's name: of the SXM modules, half of what the pages give with sparsity."""


def peak_of(device: str) -> Peak | None:
    """Return the peaks of a device, None for one that is not listed.

    >>> peak_of("NVIDIA H200").bandwidth
    4800000000000.0
    >>> peak_of("cpu"), peak_of("NVIDIA H100 PCIe")
    (None, None)
    """
    if any(other in device for other in ("PCIe", "NVL")):
        return None
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def spread_lengths(tokens: int, mean: int, most: int, sigma: float = 1.0) -> list[int]:
    """Draw log-normal lengths, cut at `most`, that add up to a number of tokens.

    >>> lengths = spread_lengths(4096, 128, 512)
    >>> sum(lengths), max(lengths) <= 512, len(lengths) > 16
    (4096, True, True)
    """
    draw, lengths = random.Random(0), []
    while (left := tokens - sum(lengths)) > 0:
        drawn = round(draw.lognormvariate(0, sigma) * mean / 2.718281828 ** (sigma**2 / 2))
        lengths.append(min(max(drawn, mean // 16), most, left))
    return lengths


def lengths_of(job: dict[str, Any]) -> list[int]:
    """Return the lengths of the sequences that a job of part `mfu` trains on.

    >>> lengths_of({"lengths": "equal", "tokens": 64, "length": 32})
    [32, 32]
    """
    if job["lengths"] == "equal":
        return [job["length"]] * (job["tokens"] // job["length"])
    return spread_lengths(job["tokens"], job["length"] // 2, job["row"])


def count_scored(lengths: Sequence[int]) -> int:
    """Count the tokens that a job trains on: all but prompts, a quarter or the first one.

    >>> count_scored([1024, 2])
    769
    """
    return sum(length - max(length // 4, 1) for length in lengths)


class Sizes(NamedTuple):
    """How large the jobs are.

    Attributes:
        shape: Of the model.
        small_shape: Of the model whose numbers are compared with transformers'.
        parity: Sequences that are compared, and their tokens.
        experts: Rows, experts, width of the rows and of the products.
        tokens: Of an update.
        micro: Tokens of its micro-batches, small, middle and large.
        length: Of each sequence where they are equal.
        row: Tokens of a packed row.
        attention: (rows, tokens of a row, segments in it).
        heads: N, K and H of the attention that is timed alone.
        scored: Tokens to score, the width of their hidden states and the vocabulary.
        chunks: Tokens scored at once.
        decode: Numbers of requests.
        answer: Tokens of a prompt and of an answer.
        read_bytes: Of an array that is read to measure the memory's rate.
        runs: How often what is timed is repeated.
        updates: How many of the updates are timed.
        bandwidth: Bytes that the memory gives in a second; None measures it.
    """

    shape: str
    small_shape: str
    parity: tuple[int, int]
    experts: tuple[tuple[int, int, int, int], ...]
    tokens: int
    micro: tuple[int, int, int]
    length: int
    row: int
    attention: tuple[tuple[int, int, int], ...]
    heads: tuple[int, int, int]
    scored: tuple[int, int, int]
    chunks: tuple[int, ...]
    decode: tuple[int, ...]
    answer: tuple[int, int]
    read_bytes: int
    runs: int
    updates: int | None = None
    bandwidth: float | None = None


FULL = Sizes(
    shape="qwen3-1.7b",
    small_shape="qwen3-1.7b, 4 layers",
    parity=(16, 512),
    experts=((65536, 128, 2048, 768), (65536, 32, 4096, 1536), (1024, 128, 2048, 768)),
    tokens=32768,
    micro=(2048, 8192, 32768),
    length=1024,
    row=4096,
    attention=((8, 1024, 1), (4, 4096, 4), (2, 8192, 1), (2, 8192, 16), (1, 32768, 8)),
    heads=(16, 8, 128),
    scored=(8192, 2048, 151936),
    chunks=(256, 512, 1024, 2048, 4096, 8192),
    decode=(1, 32, 256),
    answer=(128, 256),
    read_bytes=2**33,
    runs=5,
)
SMALL = Sizes(
    shape="tiny",
    small_shape="tiny",
    parity=(4, 32),
    experts=((256, 4, 64, 32),),
    tokens=512,
    micro=(64, 128, 512),
    length=32,
    row=64,
    attention=((2, 64, 1), (2, 128, 4)),
    heads=(4, 2, 16),
    scored=(256, 64, 512),
    chunks=(64, 256),
    decode=(1, 4),
    answer=(8, 128),
    read_bytes=2**26,
    runs=2,
    updates=12,
)
