import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec


@pytest.fixture(scope="session")
def spec():
    return ModelSpec(
        vocab_size=37,
        hidden_size=16,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=6,
        ff_width=20,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied_embeddings=False,
        max_positions=64,
    )


@pytest.fixture(scope="session")
def draw():
    """A spec's parameters, so large that attention is far from uniform and norms differ from one.

    By numpy: to compile `init_params` takes half a second for each array.
    """

    def disturbed(spec):
        rng = np.random.default_rng(0)

        def one(path, decl):
            around = float("norm" in jax.tree_util.keystr(path))
            return jnp.asarray(around + 0.3 * rng.normal(size=decl.shape), jnp.float32)

        return jax.tree_util.tree_map_with_path(one, declare(spec))

    return disturbed


@pytest.fixture(scope="session")
def params(spec, draw):
    return draw(spec)
