"""Small models and batches, which tests share so that compiled programs are shared, too."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.moe.spec import ClippedSwiglu, MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.types import Batch

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
DENSE = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ff_width=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=False,
    max_positions=64,
)
MOE = dataclasses.replace(DENSE, moe=MoeSpec(experts=8, experts_per_token=2, ff_width=16))
SIGMOID = dataclasses.replace(
    DENSE,
    layers=3,
    moe=MoeSpec(
        experts=6,
        experts_per_token=2,
        ff_width=8,
        router=SigmoidRouter(groups=3, top_groups=2, normalize=True, scale=2.5),
        dense_layers=1,
    ),
)
"""Routed as DeepSeek V3's, after a dense layer."""
LATENT = dataclasses.replace(
    DENSE,
    kv_heads=4,
    head_dim=6,
    qk_norm=False,
    latent=LatentSpec(query_rank=None, kv_rank=8, nope_width=4, rope_width=2, value_width=4),
)
DELTA = dataclasses.replace(
    DENSE,
    layers=3,
    gated_attention=True,
    delta=DeltaSpec(key_heads=2, value_heads=4, key_width=6, value_width=5),
    delta_layers=(True, True, False),
)
GPT_OSS = dataclasses.replace(
    DENSE,
    qk_norm=False,
    qkv_bias=True,
    output_bias=True,
    window=3,
    windowed_layers=(True, False),
    attention_sinks=True,
    moe=MoeSpec(
        experts=8,
        experts_per_token=2,
        ff_width=16,
        biases=True,
        swiglu=ClippedSwiglu(alpha=1.702, limit=1.0),
    ),
)
SPECS = {
    **{"dense": DENSE, "moe": MOE, "sigmoid": SIGMOID},
    **{"latent": LATENT, "delta": DELTA, "gpt-oss": GPT_OSS},
}


def draw(spec: ModelSpec, seed: int = 0, scale: float = 0.4) -> Any:
    """Return parameters under which attention, routing and the next token are far from uniform.

    By numpy: to compile `init_params` takes half a second for each array.
    """
    rng = np.random.default_rng(seed)

    def one(declared: Any) -> jax.Array:
        values = scale * rng.normal(size=declared.shape)
        return jnp.asarray(values + (declared.axes[-1] in ("norm", "head_dim")), jnp.float32)

    return jax.tree.map(one, declare(spec))


def make_batch(
    sizes: Sequence[int], length: int, vocab: int = DENSE.vocab_size, seed: int = 1, **fields: Any
) -> Batch:
    """Return sequences of these sizes, padded to a length, with a mask, advantages and fields.

    A third of each sequence, and one token at least, is its prompt.
    """
    rng, place, ends = np.random.default_rng(seed), np.arange(length), np.array(sizes, np.int32)
    shape = (len(sizes), length)
    mask = (place >= 1 + ends[:, None] // 3) & (place < ends[:, None])
    advantages = rng.normal(size=shape).astype(np.float32)
    tokens = rng.integers(0, vocab, shape).astype(np.int32)
    return Batch(tokens, ends, {"mask": mask, "advantages": advantages} | fields)


def tiny_spec(**changes: Any) -> ModelSpec:
    """Return a model of 8 words, width 4, one layer and two heads, with these changes."""
    return dataclasses.replace(TINY, **changes)


def tiny_vision(**changes: Any) -> VisionSpec:
    """Return a tower of one block of width 8 that reads patches of 2 x 2, with these changes."""
    return dataclasses.replace(TINY_VISION, **changes)
