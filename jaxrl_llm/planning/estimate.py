"""How long steps take on a named GPU, from the operations and bytes of each device."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxrl_llm.planning.program import OperationCounts


class Gpu(NamedTuple):
    """Published figures of one GPU: dense bfloat16 FLOP/s, bytes, and bytes/s in one direction.

    `link` is NVLink's, within a node of eight; `network` that of one 400 Gb/s adapter per GPU.
    `capability` is for what CUDA compiles.
    """

    flops: int | float
    memory: int | float
    bandwidth: int | float
    link: int | float
    network: int | float
    capability: str


GPUS: Mapping[str, Gpu] = {
    "H100": Gpu(989e12, 80e9, 3.35e12, 450e9, 50e9, "9.0"),
    "H200": Gpu(989e12, 141e9, 4.8e12, 450e9, 50e9, "9.0"),
    "B200": Gpu(2250e12, 180e9, 7.7e12, 900e9, 50e9, "10.0"),
}
PER_NODE = 8
COMPUTE, BANDWIDTH, LINKS = 0.4, 0.7, 0.7
"""Assumed shares of the peaks: of FLOP/s, of memory bandwidth, of links and network."""
USABLE = 0.92
"""Share of the memory that a program gets; the rest is the driver's, and fragmentation."""


class StepSeconds(NamedTuple):
    """One run of a step: computing, memory traffic (these two overlap), and communication."""

    compute: int | float
    memory: int | float
    communication: int | float

    @property
    def total(self) -> int | float:
        """Return the time; communication is not overlapped."""
        return max(self.compute, self.memory) + self.communication


def estimate_seconds(counted: OperationCounts, touched: int | float, gpu: Gpu) -> StepSeconds:
    """Estimate the time of one run of a step.

    Args:
        counted: operations and bytes sent of each device.
        touched: bytes that each reads and writes.
        gpu: the device.

    >>> from jaxrl_llm.planning.program import NOTHING
    >>> round(estimate_seconds(NOTHING._replace(flops=989e12), 0, GPUS["H100"]).total, 2)
    2.5
    """
    sent = sum(
        size / ((gpu.network if over.leaves_node else gpu.link) * LINKS)
        for over, size in counted.sent.items()
    )
    reading = touched / (gpu.bandwidth * BANDWIDTH)
    return StepSeconds(counted.flops / (gpu.flops * COMPUTE), reading, sent)
