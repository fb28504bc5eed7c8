"""How long steps take on a named GPU, from what they compute, read and send."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax

from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.program import Counted


class Gpu(NamedTuple):
    """Published figures of one GPU: dense bfloat16 FLOP/s, bytes, and bytes/s in one direction.

    `link` is NVLink's, within a node of eight; `network` that of one 400 Gb/s adapter per GPU.
    """

    flops: int | float
    memory: int | float
    bandwidth: int | float
    link: int | float
    network: int | float


GPUS: Mapping[str, Gpu] = {
    "H100": Gpu(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "H200": Gpu(989e12, 141e9, 4.8e12, 450e9, 50e9),
    "B200": Gpu(2250e12, 180e9, 7.7e12, 900e9, 50e9),
}
PER_NODE = 8
COMPUTE, BANDWIDTH, LINKS = 0.4, 0.7, 0.7
"""Assumed shares of the peaks: of FLOP/s, of memory bandwidth, of links and network."""
USABLE = 0.92
"""Share of the memory that a program gets; the rest is the driver's, and fragmentation."""


class Seconds(NamedTuple):
    """One run of a step: computing, memory traffic (these two overlap), and communication."""

    compute: int | float
    memory: int | float
    communication: int | float

    @property
    def total(self) -> int | float:
        """Return the time; communication is not overlapped."""
        return max(self.compute, self.memory) + self.communication


def seconds(counted: Counted, touched: int | float, gpu: Gpu) -> Seconds:
    """Estimate the time of one run of a step.

    Args:
        counted: what each device computes and sends.
        touched: bytes that each reads and writes at least.
        gpu: the device.

    >>> from collections import Counter
    >>> round(seconds(Counted(989e12, Counter()), 0, GPUS["H100"]).total, 2)
    2.5
    """
    sent = sum(
        size / ((gpu.network if over.leaves_node else gpu.link) * LINKS)
        for over, size in counted.sent.items()
    )
    reading = touched / (gpu.bandwidth * BANDWIDTH)
    return Seconds(counted.flops / (gpu.flops * COMPUTE), reading, sent)


def forward_flops(spec: ModelSpec, tokens: int | float, attended: int | float) -> int | float:
    r"""Count the operations that a forward pass needs, $2\,T (P_{active} + N (H_k + H_v)\, S)$.

    Two for each weight that a token is multiplied with, and two for each product of attention with
    the S tokens before it; Kaplan et al. 2020, section 2.1 (https://arxiv.org/abs/2001.08361).

    Args:
        spec: the model.
        tokens: T, all of them.
        attended: S, tokens that each attends to on average.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> forward_flops(spec, 1, 0) == 2 * (4 * 8 + 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6)
    True
    """
    active, moe = 0.0, spec.moe
    for path, d in jax.tree_util.tree_leaves_with_path(declare(spec)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        is_lookup = name == "embed" and not (spec.tied_embeddings and not spec.value_head)
        if len(d.shape) - len(d.stacked) < 2 or is_lookup:
            continue
        share = moe.experts_per_token / moe.experts if moe and "experts" in d.axes else 1.0
        active += math.prod(d.shape) * share
    widths = 2 * spec.head_width
    if spec.latent is not None:
        widths = spec.latent.key_width + spec.latent.value_width
        if spec.latent.absorbed:
            widths = 2 * spec.head_width - spec.latent.rope_width
    return 2 * tokens * (active + spec.layers * spec.heads * widths * attended)
