"""The hyper-parameters of a mixture of experts."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxrl_llm.models.moe.routing import SigmoidRouter, SoftmaxRouter

MIXTRAL_ROUTER = SoftmaxRouter(normalize=True)


class RouteShape(NamedTuple):
    """What a record of choices holds of each token: `top` experts in each of so many layers.

    Its dtype has a number for every expert, and `models.moe.routing.NO_ROUTE`.
    """

    layers: int
    top: int
    dtype: DTypeLike


@dataclass(frozen=True, kw_only=True)
class ClippedSwiglu:
    r"""Combine gate g and up u as $(u + 1)\, g\, \sigma(\alpha g)$, both clipped: gpt-oss.

    https://arxiv.org/abs/2508.10925.

    Args:
        alpha: Slope α of the sigmoid.
        limit: The most that g may be, and that u may be on either side of 0.

    >>> unit = ClippedSwiglu(alpha=1.702, limit=7.0)
    >>> unit(jnp.array([9.0, 0.0]), jnp.array([-9.0, 1.0])).round().astype(int).tolist()
    [-42, 0]
    """

    alpha: float
    limit: float

    def __call__(self, gate: Array, up: Array) -> Array:
        """Combine what the two projections give."""
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Describe feed-forward layers that are mixtures of experts; a part of the model's spec.

    Args:
        experts: Number of routed experts E.
        experts_per_token: Experts that each token is sent to.
        ff_width: Feed-forward width F of one expert.
        dense_layers: How many of the first layers have a plain feed-forward instead.
        router: How tokens choose experts.
        shared_ff_width: Width of the experts that every token passes, together; 0 without them.
        shared_gate: Whether what the shared experts give is multiplied by the sigmoid of a
            projection of their input.
        biases: Whether the router and the three projections of each expert have a bias.
        swiglu: How an expert combines gate and up; None: the model's activation of the gate times
            up.
        hf_module: Module of a layer that holds the experts in a Hugging Face checkpoint.
        hf_router_bias: Name there of the bias of a `SigmoidRouter`.
        hf_router: Name there of the router.
        hf_projections: Names there of an expert's gate, up and down projections, where each is an
            array of its own.
        hf_joined: Whether a checkpoint joins the experts of a layer in one array, gate and up in
            another, their columns taking turns (gpt-oss).
        hf_halves: Whether gate and up are then its first and second half (Qwen3-VL-MoE).
        hf_shared: Name there of the shared experts.

    Raises:
        ValueError: A size is not positive, a token would choose more experts than there are, or the
            groups of a `SigmoidRouter` do not divide the experts into at least 2 each, or too few
            of them are chosen from.

    >>> MoeSpec(experts=8, experts_per_token=2, ff_width=6).dense_layers
    0
    """

    experts: int
    experts_per_token: int
    ff_width: int
    dense_layers: int = 0
    router: SoftmaxRouter | SigmoidRouter = MIXTRAL_ROUTER
    shared_ff_width: int = 0
    shared_gate: bool = False
    biases: bool = False
    swiglu: ClippedSwiglu | None = None
    hf_module: str = "mlp"
    hf_router: str = "gate"
    hf_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    hf_router_bias: str = "gate.e_score_correction_bias"
    hf_joined: bool = False
    hf_halves: bool = False
    hf_shared: str = "shared_experts"

    def route_shape(self, layers: int) -> RouteShape:
        """Return what a record of choices holds of each token in a model of so many layers.

        >>> MoeSpec(experts=256, experts_per_token=8, ff_width=6, dense_layers=3).route_shape(61)
        RouteShape(layers=58, top=8, dtype=dtype('int16'))
        """
        dtype = jnp.int8 if self.experts <= jnp.iinfo(jnp.int8).max + 1 else jnp.int16
        return RouteShape(layers - self.dense_layers, self.experts_per_token, jnp.dtype(dtype))

    def __post_init__(self) -> None:
        if self.ff_width <= 0 or min(self.dense_layers, self.shared_ff_width) < 0:
            raise ValueError(f"sizes of a mixture of experts must be positive, got {self}")
        if not 0 < self.experts_per_token <= self.experts:
            raise ValueError(
                f"a token is sent to 1 or more of the experts, got "
                f"experts_per_token={self.experts_per_token} of {self.experts}"
            )
        if isinstance(self.router, SigmoidRouter):
            groups, chosen = self.router.groups, self.router.top_groups
            size = self.experts // groups if groups > 0 else 0
            fits = size >= 2 and size * groups == self.experts and 0 < chosen <= groups
            if not fits or chosen * size < self.experts_per_token:
                raise ValueError(
                    "groups must divide the experts into at least 2 each, and those chosen from "
                    f"hold experts_per_token; got {self}"
                )
