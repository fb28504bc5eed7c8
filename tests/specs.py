"""Small models for tests and doctests."""

import dataclasses
from typing import Any

from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import VisionSpec

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
TINY_VISION = VisionSpec(
    kind="qwen3",
    layers=1,
    hidden_size=8,
    heads=2,
    ff_width=8,
    patch=2,
    frames_per_patch=2,
    merge=2,
    out_size=4,
    position_side=4,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    image_id=1,
)


def tiny_spec(**changes: Any) -> ModelSpec:
    """Return a model of 8 words, width 4, one layer and two heads, with these changes."""
    return dataclasses.replace(TINY, **changes)


def tiny_vision(**changes: Any) -> VisionSpec:
    """Return a tower of one block of width 8 that reads patches of 2 x 2, with these changes."""
    return dataclasses.replace(TINY_VISION, **changes)
