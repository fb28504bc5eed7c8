"""Small models for tests and doctests."""

import dataclasses
from typing import Any

from jaxrl_llm.models.spec import ModelSpec

TINY = ModelSpec(
    vocab_size=8,
    hidden_size=4,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=2,
    ff_width=6,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=32,
)


def tiny_spec(**changes: Any) -> ModelSpec:
    """Return a model of 8 words, width 4, one layer and two heads, with these changes."""
    return dataclasses.replace(TINY, **changes)
