"""How long engines that batch continuously take for a step's answers, simulated one by one."""

import heapq
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.flops import forward_flops
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.program import PASSES
from jaxrl_llm.planning.steps import BANDWIDTH, COMPUTE, LINKS, Gpu
from jaxrl_llm.rollout.engine import BLOCK_TOKENS, Router

STEP_S, REDUCE_S = 1e-3, 1e-5
"""Assumed seconds of a decode step on the host, and of an all-reduce before its first byte."""
LAST = 0.1
"""Share of the answers, the last to end, whose time is called the tail."""


class EngineSpeed(NamedTuple):
    """Seconds that an engine takes.

    Attributes:
        step: for a decode step, whatever it decodes.
        weights: to read the weights once.
        cached: to read keys and values of a token.
        state: to read and write the state of a sequence.
        sequence: to compute the next token of a sequence.
        pair: to compute its attention to one token.
        sent: to add up a sequence's partial sums between the engine's GPUs.
        prompt: to read a token of a prompt.
    """

    step: int | float = 0.0
    weights: int | float = 0.0
    cached: int | float = 0.0
    state: int | float = 0.0
    sequence: int | float = 0.0
    pair: int | float = 0.0
    sent: int | float = 0.0
    prompt: int | float = 0.0

    def decode(self, sequences: int, context: int, steps: int) -> int | float:
        """Return the time of so many steps.

        Reading and computing overlap; in each step every sequence grows by a token.

        Args:
            sequences: that are decoded.
            context: tokens that they have in all before the first step.
            steps: how many.

        >>> EngineSpeed(weights=1.0, cached=0.5).decode(2, 10, 3)  # 6 and 7 and 8
        21.0
        """
        tokens = context + sequences * np.arange(steps)
        reading = self.weights + self.cached * tokens + self.state * sequences
        computing = self.sequence * sequences + self.pair * tokens
        return float(np.maximum(reading, computing).sum()) + steps * (
            self.step + self.sent * sequences
        )


def cache_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a token's keys and values, in bfloat16."""
    return _bytes(_cache_of_a_token(spec)._replace(states=()))


def state_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a sequence's states, where the model has some, in bfloat16."""
    return _bytes(_cache_of_a_token(spec).states)


def _cache_of_a_token(spec: ModelSpec) -> Cache:
    model, dtypes = Decoder(spec), {"dtype": "bfloat16", "kv_cache_dtype": "auto"}
    return jax.eval_shape(lambda: model.init_cache(1, 1, **dtypes))


def _bytes(arrays: Any) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def engine_speed(spec: ModelSpec, gpu: Gpu, tensor: int, prompt: int) -> EngineSpeed:
    """Return how fast an engine is, under the assumptions of `planning.steps`.

    Args:
        spec: the model, in bfloat16.
        gpu: the device.
        tensor: GPUs that share a copy of the model.
        prompt: tokens of a prompt.
    """
    decoding = spec.for_decoding
    rate, read = gpu.flops * COMPUTE * tensor, gpu.bandwidth * BANDWIDTH * tensor
    token = forward_flops(decoding, 1, 0)
    reduces = 2 * spec.layers * (tensor > 1)
    sent = reduces * 2 * spec.hidden_size * PASSES["all-reduce"] * (tensor - 1) / tensor
    return EngineSpeed(
        step=STEP_S + reduces * REDUCE_S,
        weights=2 * parameter_count(spec) / read,
        cached=cache_bytes(spec) * max(1, tensor // decoding.kv_heads) / read,
        state=2 * state_bytes(spec) / read,
        sequence=token / rate,
        pair=(forward_flops(decoding, 1, 1) - token) / rate,
        sent=sent / (gpu.link * LINKS),
        prompt=forward_flops(spec, 1, prompt / 2) / rate,
    )


def draw_lengths(
    seed: int, answers: int, *, median: int | float, sigma: int | float, most: int
) -> np.ndarray:
    """Draw answers' lengths in tokens: lognormal, cut at the longest that there may be."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, answers)
    return np.clip(drawn, 1, most).astype(int)


def mean_context(lengths: np.ndarray, prompt: int) -> int | float:
    r"""Return the tokens that a sequence being decoded has on average, $p + \sum L^2 / 2\sum L$."""
    return float(prompt + (lengths**2).sum() / (2 * lengths.sum()))


def assign_engines(groups: np.ndarray, most: int, engines: int) -> np.ndarray:
    """Return the engine of each request, if all are there at once.

    Args:
        groups: the prompt of each request, as a number.
        most: tokens that prompt and answer may have.
        engines: how many.

    >>> assign_engines(np.array([0, 0, 1, 1]), 100, 2).tolist()
    [0, 0, 1, 1]
    """
    router = Router(engines)
    return np.array([router.choose((int(group),) * BLOCK_TOKENS, most) for group in groups])


def simulate_engine(
    lengths: np.ndarray, unread: np.ndarray, *, prompt: int, slots: int, speed: EngineSpeed
) -> np.ndarray:
    """Simulate one engine, whose requests take free slots in order.

    Args:
        lengths: tokens of each answer.
        unread: tokens of each prompt that are not in the cache; the others wait while it is read.
        prompt: tokens of each prompt.
        slots: sequences decoded at once.
        speed: of the engine.

    Returns:
        Seconds after which each answer ends.

    >>> speed, no_prompts = EngineSpeed(step=1.0), np.zeros(3)
    >>> simulate_engine(np.array([1, 3, 2]), no_prompts, prompt=0, slots=2, speed=speed).tolist()
    [1.0, 3.0, 3.0]
    """
    ends, running = np.zeros(len(lengths)), []
    clock, step, context, waiting = 0.0, 0, 0, 0
    while waiting < len(lengths) or running:
        while waiting < len(lengths) and len(running) < slots:
            clock += float(unread[waiting]) * speed.prompt
            heapq.heappush(running, (step + int(lengths[waiting]), waiting))
            context += prompt
            waiting += 1
        steps = running[0][0] - step
        clock += speed.decode(len(running), context, steps)
        step, context = step + steps, context + steps * len(running)
        while running and running[0][0] == step:
            at = heapq.heappop(running)[1]
            ends[at] = clock
            context -= prompt + int(lengths[at])
    return ends


class Generation(NamedTuple):
    """Seconds after which answers end [N], and after which engines have nothing to do [E]."""

    answers: np.ndarray
    engines: np.ndarray

    @property
    def seconds(self) -> int | float:
        """Return the time until the last answer."""
        return float(self.answers.max())

    @property
    def tail(self) -> int | float:
        """Return the share of the time in which only the last tenth of the answers runs."""
        before = np.quantile(self.answers, 1 - LAST, method="lower")
        return 1 - float(before) / self.seconds


def simulate_generation(
    lengths: np.ndarray,
    *,
    prompt: int,
    most: int,
    group: int,
    engines: int,
    slots: int,
    speed: EngineSpeed,
) -> Generation:
    """Simulate engines that share the answers to a batch of prompts as `rollout.routing` says.

    Args:
        lengths: tokens of each answer, those to one prompt beside each other.
        prompt: tokens of each prompt, which an engine reads once.
        most: tokens that prompt and answer may have.
        group: answers to a prompt.
        engines: how many.
        slots: of each engine.
        speed: of each engine.
    """
    groups = np.arange(len(lengths)) // group
    places = assign_engines(groups, most, engines)
    answers, idle_from = np.zeros(len(lengths)), np.zeros(engines)
    for engine in range(engines):
        own = np.flatnonzero(places == engine)
        is_first = np.diff(groups[own], prepend=-1) > 0
        ends = simulate_engine(
            lengths[own], prompt * is_first, prompt=prompt, slots=slots, speed=speed
        )
        answers[own], idle_from[engine] = ends, ends.max(initial=0.0)
    return Generation(answers, idle_from)
