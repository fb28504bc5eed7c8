"""Runs with a fault that was planted: what looks wrong in them is found in the files they left."""

import pytest

from jaxrl_llm.reporting.health import check_run
from jaxrl_llm.runs.files import read_run

FAST = "optim.schedule.value=0.02"


def found(result):
    """What looks wrong in a run, by name."""
    return {finding.name: finding for finding in check_run(read_run(result.run_dir))}


def test_x(run, workshop):
    import time

    mine = workshop.mine
    cases = {
        "healthy": ["steps=12"],
        "constant": [f"reward.function={mine('same_for_all')}", "steps=4"],
        "errors": [f"reward.function={mine('raises_on_odd')}", "reward.max_error_share=1"],
        "cut": ["rollout.max_new_tokens=1"],
        "skipped": [f"algorithm.loss={mine('loss_nan_for_group_0')}"],
        "nan": [f"algorithm.loss={mine('loss_nan')}", "steps=9"],
        "flipped": [f"algorithm.loss={{fn: '{mine('loss')}', weight: -1.0}}", "steps=12", FAST],
        "zero loss": [f"algorithm.loss={{fn: '{mine('loss')}', weight: 0.0}}", "steps=4"],
        "collapse": ["algorithm.entropy_coef=-1.0", "steps=12", FAST],
        "explode": ["algorithm.entropy_coef=10.0", "steps=12", FAST],
        "lr0": ["optim.schedule.value=0.0", "steps=4"],
        "hugelr": ["optim.schedule.value=0.3", "steps=12", "validation.every=3"],
        "long": [
            f"algorithm.loss={{fn: '{mine('loss')}', weight: -1.0}}",
            f"reward.function={mine('few_tokens')}",
            "rollout.max_new_tokens=16",
            "steps=12",
            FAST,
        ],
        "critic": [
            "algorithm.advantage=gae",
            "critic.optim.schedule={fn: constant_schedule, value: 0.0}",
            "steps=20",
        ],
        "kl": [
            "algorithm.kl_loss=k3",
            "algorithm.kl_coef=0.0",
            f"algorithm.loss={{fn: '{mine('loss')}', weight: -1.0}}",
            "steps=12",
            FAST,
        ],
    }
    for name, words in cases.items():
        t = time.time()
        result = run(*words)
        print("#####", name, result.status, round(time.time() - t, 1), found(result).values())
        for n in (
            "critic/score/mean",
            "actor/entropy",
            "actor/kl",
            "actor/ppo_kl",
            "actor/pg_clipfrac",
            "actor/grad_norm",
            "response_length/mean",
            "critic/groups_without_spread",
            "critic/vf_explained_var",
        ):
            v = [r.get(n) for r in result.metrics if n in r]
            if v:
                print("   ", n, ["%.3g" % x if x is not None else None for x in v])
