"""The shapes of `benchmarks.gpu` as this library describes a model."""

from benchmarks.gpu.shapes import SHAPES
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
