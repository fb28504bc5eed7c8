"""Whether the updates of a run do what they should: gradients, clipping, learning rate, critic."""

import bisect
from collections.abc import Iterator
from statistics import median

from jaxrl_llm.reporting.history import RunHistory, Sign

ROLES = {"actor": "", "critic": "critic.", "implicit_reward_model": "implicit_reward_model."}
"""What is updated, and what the keys of its optimizer begin with."""


def updates_skipped(run: RunHistory) -> Iterator[Sign]:
    """Find updates that were skipped because the gradient was not finite.

    It is an error if a tenth of the steps have such updates, or the newest one.
    """
    for role, section in ROLES.items():
        skipped = run.series(f"{role}/skipped")
        steps = skipped.where(value > 0 for value in skipped.values)
        if steps:
            yield Sign(
                f"{sum(skipped.values):.0f} updates of the {role.replace('_', ' ')} were skipped. "
                f"More than {section}optim.max_skipped="
                f"{run.key(f'{section}optim.max_skipped', 3)} in a row stop the run.",
                steps,
                is_error=len(steps) >= len(skipped.steps) / 10 or skipped.steps[-1] in steps,
            )


def gradient_zero(run: RunHistory) -> Iterator[Sign]:
    """Find a gradient of exactly zero in the newest three steps, though advantages are not."""
    norm, below, above = run.together(
        "actor/grad_norm", "critic/advantages/min", "critic/advantages/max"
    )
    columns = zip(norm.values, below.values, above.values, strict=True)
    zero = [value == 0 and (low < 0 or high > 0) for value, low, high in columns]
    if len(zero) >= 3 and all(zero[-3:]):
        yield Sign(
            f"The advantages of the newest step are from {below.values[-1]:.4g} to "
            f"{above.values[-1]:.4g}, and the norm of the gradient is 0.",
            norm.where(zero),
            is_error=True,
        )


def gradient_spikes(run: RunHistory) -> Iterator[Sign]:
    """Find a gradient norm of ten times the usual one.

    Usual is the median of the steps before it, or of the first ten where that is larger, as
    gradients become small when nearly all answers are right. The first ten steps are left out.
    """
    for name in ("actor/grad_norm", "train/grad_norm"):
        norm = run.series(name)
        before = sorted(norm.values[:10])
        first, is_spike = median(before or [0.0]), [False] * len(before)
        for value in norm.values[10:]:
            usual = max(first, before[len(before) // 2])
            is_spike.append(value > 10 * usual > 0)
            bisect.insort(before, value)
        if any(is_spike):
            yield Sign(
                f"The norm of the gradient was {max(norm.values[10:]):.4g} at most; its median is "
                f"{before[len(before) // 2]:.4g}.",
                norm.where(is_spike),
            )


def learning_rate_zero(run: RunHistory) -> Iterator[Sign]:
    """Find a learning rate of zero in three steps in a row."""
    for role in (*ROLES, "train"):
        rate = run.series(f"{role}/lr")
        zero = [value == 0 for value in rate.values]
        if any(all(zero[at : at + 3]) for at in range(len(zero) - 2)):
            section = ROLES.get(role, "")
            yield Sign(
                f"{sum(zero)} of {len(zero)} steps changed nothing: look at "
                f"{section}optim.schedule, which counts updates, not steps.",
                rate.where(zero),
                is_error=all(zero),
            )


def policy_jumps(run: RunHistory) -> Iterator[Sign]:
    """Find two steps or more whose updates changed the policy by more than a nat per token.

    That is `actor/ppo_kl`, without its sign: the mean of log π_old − log π.
    """
    change = run.series("actor/ppo_kl")
    steps = change.where(abs(value) > 1 for value in change.values)
    if len(steps) >= 2:
        yield Sign(
            f"They changed it by up to {max(map(abs, change.values)):.3g} nats.",
            steps,
            is_error=True,
        )


def much_clipping(run: RunHistory) -> Iterator[Sign]:
    """Find more than half of the tokens clipped, as the mean of the newest ten steps.

    Under most losses they have no gradient, so most of what was sampled is not learned from.
    """
    clipped = run.series("actor/pg_clipfrac").newest(10)
    if len(clipped.steps) >= 5 and clipped.mean > 0.5:
        yield Sign(
            f"In the newest {len(clipped.steps)} steps {clipped.mean:.0%} of the tokens were "
            "clipped or dropped.",
            clipped.steps,
        )


def critic_explains_nothing(run: RunHistory) -> Iterator[Sign]:
    """Find a critic that predicts returns no better than their mean, late in the run.

    The median of `critic/vf_explained_var` over the newest ten steps is below 0.01, after two
    thirds of the steps and twenty at least (fifty, where `steps` is null). The mean score is not
    within a tenth of the highest: where nearly all answers are right, little is left to explain.
    """
    explained, score = run.together("critic/vf_explained_var", "critic/score/mean")
    newest, done = explained.newest(10), max(explained.steps, default=0)
    is_late = done >= max(20, run.key("steps", 75) * 2 / 3)
    is_right = score.newest(10).mean >= run.nearly_best_score
    if is_late and median(newest.values) < 0.01 and not is_right:
        yield Sign(
            f"Its explained variance is {median(newest.values):.4g}, as the median of the newest "
            "ten steps.",
            newest.steps,
        )


def experts_idle(run: RunHistory) -> Iterator[Sign]:
    """Find more than half of all layers' experts without any token, in the newest five steps."""
    for role in (*ROLES, "train"):
        idle = run.series(f"{role}/router_idle").newest(5)
        if len(idle.steps) == 5 and min(idle.values) > 0.5:
            yield Sign(
                f"{idle.mean:.0%} of the experts had no token in the newest five steps "
                f"({role}/router_idle).",
                idle.steps,
            )


def loss_does_not_fall(run: RunHistory) -> Iterator[Sign]:
    """Find supervised training whose loss is not below that at first, after at least twenty steps.

    Both are means of five steps. It is an error if the loss is 10 % higher.
    """
    loss = run.series("train/loss")
    before, now = loss.ends or (0.0, 1.0)
    if len(loss.steps) >= 20 and now >= before:
        yield Sign(
            f"The loss was {before:.4g} nats per token and is {now:.4g} now.",
            loss.newest(5).steps,
            is_error=now > 1.1 * before,
        )
