"""What a function asks for by name is there: every producer of a field, in whole runs."""

import numpy as np
import pytest

NEEDS = {
    "critic": ("algorithm.advantage=gae_whitened", "critic.optim.schedule.value=1e-3"),
    "greedy": ("algorithm.advantage=remax",),
    "baseline": ("algorithm.advantage=optimal_token_baseline",),
    "clip_cov": (
        "algorithm.loss=clip_cov",
        "algorithm.high_covariance={fn: select_clip_cov, ratio: 0.2, low: 0.0}",
    ),
    "kl_cov": (
        "algorithm.loss=kl_cov",
        "algorithm.high_covariance={fn: select_kl_cov, ratio: 0.2}",
    ),
    "prime": (
        "algorithm.advantage=prime",
        "reward_model.optim.schedule.value=1e-3",
        "reward.scorer=arithmetic",
    ),
    "correction": ("algorithm.correction=[truncated_token, {fn: icepop, low: 0.1}]",),
    "bypass": ("algorithm.bypass=true",),
    "penalty": ("algorithm.penalty={fn: overlong_penalty, max_tokens: 4, buffer: 2}",),
    "keep": ("algorithm.keep=with_spread",),
}


@pytest.fixture(scope="module", params=NEEDS)
def trained(request, run):
    return request.param, run(*NEEDS[request.param]).ok()


def test_a_run_has_what_its_functions_ask_for(trained):
    name, result = trained
    last = result.metrics[-1]
    print(name, {k: v for k, v in last.items() if not k.startswith("timing")})
