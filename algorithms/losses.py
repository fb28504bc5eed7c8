"""Policy losses, by the names that a config uses: per-token losses with per-token diagnostics.

A loss's positional parameters are fields of a batch, its keyword arguments are its
hyper-parameters. The scalar is sum(weights · loss), with weights from `reduce`.

In all of them r = exp(log π − log π_old), whose exponent is clipped to ±20, and sg stops the
gradient. Infinite log-probs are taken as huge finite ones, so that loss and gradient are finite
whatever stands off the mask; NaN stays NaN. Diagnostics are averaged by `reduce.token_mean`:
pg_clipfrac is the share of tokens that clipping holds back, ppo_kl is log π_old − log π.
"""

from jaxrl_llm.algorithms.losses_covariance import (
    clip_cov,
    kl_cov,
    select_clip_cov,
    select_kl_cov,
)
from jaxrl_llm.algorithms.losses_sequence import gmpo, gspo
from jaxrl_llm.algorithms.losses_stale import a3po
from jaxrl_llm.algorithms.losses_token import (
    TokenLoss,
    cispo,
    dppo_kl,
    dppo_tv,
    dro,
    negative_log_likelihood,
    ppo_clip,
    reinforce,
    sapo,
)

__all__ = [
    "TokenLoss",
    "a3po",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gspo",
    "kl_cov",
    "negative_log_likelihood",
    "ppo_clip",
    "reinforce",
    "sapo",
    "select_clip_cov",
    "select_kl_cov",
]
