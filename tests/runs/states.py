"""Train states to save, and how they are compared."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.sharding.layout import replicated
from jaxrl_llm.training.update import TrainState

EXTRA = {"data": {"index": 3, "rng": [1, 2**60]}, "kl_coef": 0.1, "config": {"a": None, "b": "ß"}}


def make_state(mesh, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "matrix": jax.device_put(
            rng.normal(size=(8, 6)).astype(np.float32), NamedSharding(mesh, P("fsdp", "tensor"))
        ),
        "layers": {
            "scale": jax.device_put(jnp.asarray(rng.normal(size=5), jnp.bfloat16), replicated(mesh))
        },
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    count = jax.device_put(np.int32(seed), replicated(mesh))
    state = TrainState(params, optimizer.init(params), count, count)
    return jax.tree.map(lambda x: jax.device_put(x, _layout(x, mesh)), state)


def _layout(x, mesh):
    split = NamedSharding(mesh, P("fsdp", "tensor"))
    return split if x.shape == (8, 6) else replicated(mesh)


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def steps(folder):
    return sorted(int(p.name) for p in Path(folder).iterdir() if p.name.isdigit())
