"""The shapes of `benchmarks.gpu` as this library describes a model."""

from collections.abc import Sequence

from benchmarks.gpu.shapes import SHAPES, count_scored
from jaxrl_llm.models.flops import causal_pairs, forward_flops
from jaxrl_llm.models.spec import ModelSpec


def spec_of(name: str) -> ModelSpec:
    """Return the spec of one of the shapes."""
    shape = SHAPES[name]
    return ModelSpec(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ff_width=shape.ff_width,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied_embeddings=True,
        max_positions=40960,
    )


def scored_flops(spec: ModelSpec, lengths: Sequence[int]) -> int | float:
    """Count an update's FLOPs with the head for scored tokens only; it is skipped for the others.

    `update_flops` counts it for all tokens, as MFU is usually given.
    """
    pairs = causal_pairs(0, *lengths)
    return 3 * forward_flops(spec, sum(lengths), pairs, scored=count_scored(lengths))
