import jax
import numpy as np
import pytest

from jaxrl_llm.models.spec import ModelSpec, initialize


@pytest.fixture(scope="session")
def spec():
    return ModelSpec(
        vocab_size=37,
        width=16,
        layers=3,
        heads=4,
        kv_heads=2,
        head_width=6,
        ff_width=20,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied_embeddings=False,
        max_positions=64,
    )


@pytest.fixture(scope="session")
def draw():
    """`initialize`, compiled once for each spec."""
    return jax.jit(initialize, static_argnums=0)


@pytest.fixture(scope="session")
def params(spec, draw):
    """Parameters large enough that attention is far from uniform and norms differ from one."""
    rng = np.random.default_rng(0)

    def disturb(leaf):
        return leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32)

    return jax.tree.map(disturb, draw(spec, key=jax.random.key(0)))
