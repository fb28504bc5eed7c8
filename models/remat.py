"""Rematerialisation by name: which values of a layer the backward pass finds stored.

It computes the others again. Per token of a dense layer, with the letters of the axis legend, it
stores these numbers, all but the N in the compute dtype:

| policy | what is stored | numbers | what is computed again |
| --- | --- | --- | --- |
| `none` | arguments of products, norms, attention | 4 D + 4 N H + 3 K H + 3 F + N | norms, scores |
| `dots` | the layer's input, products with weights | 2 D + N H + 2 K H + 2 F | attention, norms |
| `full` | the layer's input | D | the whole layer |

No policy stores scores, of which there are N L per token: `models.attention` computes them again,
and norms and activations keep their arguments only. `full` computes a second forward pass, a
quarter of its step; `dots` computes little but attention. The products of experts are not counted
among those with weights, so `dots` computes them again, and on a mesh every policy does.

Layers are a loop that is never unrolled: next to each other, the compiler would find the second
forward pass to be the first one, and store it.

Chen et al. 2016 (https://arxiv.org/abs/1604.06174).
"""

from collections.abc import Callable
from typing import Any

POLICIES = {"none": None, "dots": "dots_with_no_batch_dims_saveable", "full": "nothing_saveable"}
"""The names in `jax.checkpoint_policies`."""


def rematerialize(
    layer: Callable[..., Any], policy: str, *, looks_up: bool = False
) -> Callable[..., Any]:
    """Make the backward pass of a scan's body store what a policy names, and recompute the rest.

    Args:
        layer: Body of a scan over layers.
        policy: A key of `POLICIES`.
        looks_up: Whether the body takes its weights out of a stack that it closes over. Then no
            policy stores them, as they would be copies of the stack.

    Returns:
        A function with the same values and gradients.

    Raises:
        ValueError: There is no such policy.

    >>> rematerialize(abs, "some")
    Traceback (most recent call last):
    ValueError: remat policy 'some'; expected one of none, dots, full
    """
    if policy not in POLICIES:
        raise ValueError(f"remat policy {policy!r}; expected one of {', '.join(POLICIES)}")
    if policy == "none" and not looks_up:
        return layer
    import jax  # here, so that a config can be checked without it

    saved = getattr(jax.checkpoint_policies, POLICIES[policy]) if POLICIES[policy] else _no_slice
    # a scan body needs no barrier against common-subexpression elimination
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)


def _no_slice(primitive: Any, *_: Any, **__: Any) -> bool:
    """Store everything but layers of a stack."""
    return primitive.name not in ("dynamic_slice", "squeeze")
