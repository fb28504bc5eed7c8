"""The engine's two jitted steps over a fixed number of slots: fill slots, and decode them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, UInt32

from jaxrl_llm.models.cache import Cache, decode_step, prefill
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.transformer import logits
from jaxrl_llm.rollout.native.sampler import choose_tokens
from jaxrl_llm.sharding.layout import Layout


class Slots(NamedTuple):
    """Sequences in the middle of being decoded, one per slot.

    Attributes:
        tokens: the newest token of each sequence, not yet in the cache.
        positions: its position.
        generated: tokens generated so far.
        done: whether the sequence has ended, or the slot is empty.
        answers: generated tokens.
        logprobs: their log-probs.
        limits: the longest answer.
        stop_ids: tokens that end the answer, padded with -1.
    """

    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    generated: Int[Array, " B"]
    done: Bool[Array, " B"]
    answers: Int[Array, "B S"]
    logprobs: Float32[Array, "B S"]
    limits: Int[Array, " B"]
    seeds: UInt32[Array, " B"]
    temperature: Float32[Array, " B"]
    top_p: Float32[Array, " B"]
    top_k: Int[Array, " B"]
    stop_ids: Int[Array, "B stops"]


def fill(
    params: Any,
    spec: ModelSpec,
    cache: Cache,
    prompts: Int[Array, "P T"],
    lengths: Int[Array, " P"],
    source: Int[Array, " B"],
    *,
    layout: Layout | None = None,
) -> Cache:
    """Prefill prompts and copy each into the slots that share it.

    Args:
        params: in the compute dtype.
        spec: the model.
        cache: of all slots.
        prompts: right-padded.
        lengths: tokens of each prompt, at least 1.
        source: for each slot the prompt that it continues, or -1 to leave the slot alone.
        layout: how prompts are split over a mesh.
    """
    width = prompts.shape[1]
    dtype = cache.keys[0].dtype
    _, prefix = prefill(
        params, spec, prompts, lengths, cache_length=width, dtype=dtype, layout=layout
    )
    replace = (source >= 0)[:, None, None, None]

    def copy(old: Array, new: Array) -> Array:
        shared = new[jnp.maximum(source, 0)]
        return old.at[:, :, :width].set(jnp.where(replace, shared, old[:, :, :width]))

    return jax.tree.map(copy, cache, prefix)


def decode(
    params: Any,
    spec: ModelSpec,
    cache: Cache,
    slots: Slots,
    *,
    steps: int,
    live: int | None = None,
    layout: Layout | None = None,
) -> tuple[Cache, Slots]:
    """Decode up to `steps` tokens in every slot; stop early when all are done.

    Args:
        params: in the compute dtype.
        spec: the model.
        cache: of all slots.
        slots: where each sequence stands.
        steps: the most tokens.
        live: how much of the cache's length is read and written, more than all positions; None is
            all of it.
        layout: how slots are split over a mesh.
    """
    whole, cache = cache, _read(cache, live)

    def some_left(carry: tuple[Array, Cache, Slots]) -> Bool[Array, ""]:
        return (carry[0] < steps) & jnp.any(~carry[2].done)

    def body(carry: tuple[Array, Cache, Slots]) -> tuple[Array, Cache, Slots]:
        step, cache, slots = carry
        hidden, cache = decode_step(
            params,
            spec,
            cache,
            slots.tokens,
            slots.positions,
            dtype=cache.keys[0].dtype,
            layout=layout,
        )
        return step + 1, cache, extend(slots, *_choose(params, spec, hidden, slots))

    start = (jnp.zeros((), jnp.int32), cache, slots)
    _, cache, slots = jax.lax.while_loop(some_left, body, start)
    return _write(whole, cache), slots


def _read(cache: Cache, live: int | None) -> Cache:
    return jax.tree.map(lambda x: x[:, :, :live], cache)


def _write(whole: Cache, part: Cache) -> Cache:
    """Put the first slots of each row back."""
    return jax.tree.map(
        lambda old, new: new if old.shape == new.shape else old.at[:, :, : new.shape[2]].set(new),
        whole,
        part,
    )


def _choose(params: Any, spec: ModelSpec, hidden: Array, slots: Slots) -> tuple[Array, Array]:
    return choose_tokens(
        logits(params, spec, hidden),
        seeds=slots.seeds,
        steps=slots.generated,
        temperature=slots.temperature,
        top_p=slots.top_p,
        top_k=slots.top_k,
    )


def extend(slots: Slots, tokens: Int[Array, " B"], logprobs: Float32[Array, " B"]) -> Slots:
    """Append one token to every sequence that goes on, and mark those that end with it."""
    rows = jnp.arange(tokens.shape[0])
    at = jnp.where(slots.done, slots.answers.shape[1], slots.generated)  # past the end: dropped
    generated = slots.generated + ~slots.done
    stopped = jnp.any(tokens[:, None] == slots.stop_ids, axis=1)
    return slots._replace(
        tokens=jnp.where(slots.done, slots.tokens, tokens),
        positions=slots.positions + ~slots.done,
        generated=generated,
        done=slots.done | stopped | (generated >= slots.limits),
        answers=slots.answers.at[rows, at].set(tokens, mode="drop"),
        logprobs=slots.logprobs.at[rows, at].set(logprobs, mode="drop"),
    )
