"""Whether a run learns: its scores, validations, answers and entropy."""

from collections.abc import Iterator

from jaxrl_llm.reporting.history import WINDOW, RunHistory, Sign

NEWEST = 10
"""Steps whose mean says how a run is now."""


def no_signal(run: RunHistory) -> Iterator[Sign]:
    """Find nothing to learn from in the newest three steps, or in all of a shorter run.

    That is: all advantages are zero, or no group has spread and all answers of the step have the
    same score. The mean score is not within a tenth of the highest one that an answer ever had.
    """
    score, lowest, highest, below, above, equal = run.together(
        *("critic/score/mean", "critic/score/min", "critic/score/max"),
        *("critic/advantages/min", "critic/advantages/max", "critic/groups_without_spread"),
    )
    columns = (score, lowest, highest, below, above, equal)
    flat = [
        ((low == high and alike == 1) or down == up == 0) and mean < run.nearly_best_score
        for mean, low, high, down, up, alike in zip(*(c.values for c in columns), strict=True)
    ]
    if flat and all(flat[-3:]):
        yield Sign(
            f"In the newest step the scores are from {lowest.values[-1]:.4g} to "
            f"{highest.values[-1]:.4g}, and equal among the answers to a prompt.",
            score.where(flat),
            is_error=True,
        )


def most_groups_equal(run: RunHistory) -> Iterator[Sign]:
    """Find at least 80 % of groups without spread, but not all, as the mean of ten steps.

    The mean score must be nearer to the lowest score of an answer than to the highest: where nearly
    all answers are right, most groups have no spread either. Nor do they where the entropy has
    collapsed, which is said instead.
    """
    equal, score, lowest = (
        s.newest(NEWEST)
        for s in run.together(
            "critic/groups_without_spread", "critic/score/mean", "critic/score/min"
        )
    )
    is_low = score.mean - min(lowest.values, default=0.0) < 0.5 * run.score_span
    if len(equal.steps) < 5 or any(True for _ in entropy_collapsed(run)):
        return
    if 0.8 <= equal.mean < 1 and is_low:
        yield Sign(
            f"In the newest {len(equal.steps)} steps {equal.mean:.0%} of the prompts had only "
            f"answers of one score; the mean score is {score.mean:.4g}.",
            equal.steps,
        )


def score_fell(run: RunHistory) -> Iterator[Sign]:
    """Find a mean score, over five steps, that has fallen clearly below its best.

    It has lost more than a quarter of what it had gained, more than a tenth of the span of scores,
    and more than three times its usual change from step to step.
    """
    score = run.series("critic/score/mean")
    means = score.smoothed
    if len(means.steps) <= 1:
        return
    best = max(means.values)
    lost, gained = best - means.values[-1], best - means.values[0]
    if lost > max(gained / 4, run.score_span / 10, 3 * score.usual_change):
        since = means.steps[means.values.index(best)]
        yield Sign(
            f"The mean of five steps was {best:.4g} at step {since} and is "
            f"{means.values[-1]:.4g} now.",
            means.where(step > since for step in means.steps),
            is_error=True,
        )


def validation_fell(run: RunHistory) -> Iterator[Sign]:
    """Find two validations in a row clearly below the best, or one clearly below the first.

    Clearly: more than a quarter of what had been gained is lost, and more than 0.1 of `acc`, or a
    tenth of the span of scores where the quantity is `reward`.
    """
    for name, (steps, values) in run.validations.items():
        scale = 1.0 if "/acc/" in name else run.score_span
        best, first = max(values), values[0]
        lost = max((best - first) / 4, scale / 10)
        is_low = [best - value > lost > 0 for value in values[-2:]]
        if not is_low[-1] or not (all(is_low) or first - values[-1] > scale / 10):
            continue
        since = steps[values.index(best)]
        fell_too = any(True for _ in score_fell(run))
        yield Sign(
            f"{name} was {best:.4g} at step {since} and is {values[-1]:.4g} now"
            + ("." if fell_too else ", while the score in training did not fall."),
            tuple(step for step in steps if step > since),
            is_error=True,
        )


def no_learning(run: RunHistory) -> Iterator[Sign]:
    """Find a score that is flat over at least fifty steps, and no better validation.

    The newest fifth of the steps has a mean score within 2 % of the span of scores of that of the
    first fifth, and it is not within a tenth of the highest. No validation is 0.02 above the first.
    """
    score = run.series("critic/score/mean")
    fifth = len(score.steps) // 5
    if fifth < 10:
        return
    first, newest = score.values[:fifth], score.newest(fifth)
    before = sum(first) / fifth
    for name, validation in run.validations.items():
        scale = 1.0 if "/acc/" in name else run.score_span
        if max(validation.values) - validation.values[0] > 0.02 * scale:
            return
    if not run.score_span:  # rewards of turns may be all that is learned from
        return
    is_flat = abs(newest.mean - before) <= 0.02 * run.score_span
    if is_flat and newest.mean < run.nearly_best_score:
        yield Sign(
            f"The mean score was {before:.4g} in the first {fifth} steps and is "
            f"{newest.mean:.4g} in the newest {fifth}."
        )


def answers_cut(run: RunHistory) -> Iterator[Sign]:
    """Find a quarter of the answers cut at the limit, as the mean of the newest ten steps.

    From three quarters on it is an error, in a run no better: its mean score or its validation has
    not risen. Some answers are whole without a stop token.
    """
    cut = run.series("response_length/clip_ratio").newest(NEWEST)
    if cut.mean >= 0.25:
        yield Sign(
            f"{cut.mean:.0%} of the answers of the newest {len(cut.steps)} steps had no stop "
            f"token within rollout.max_new_tokens={run.key('rollout.max_new_tokens', 512)}.",
            cut.steps,
            is_error=cut.mean >= 0.75 and not run.is_better_than_at_first,
        )


def entropy_collapsed(run: RunHistory) -> Iterator[Sign]:
    """Find an entropy below a tenth of that at first, while answers are wrong and all alike.

    That is: at least 80 % of groups are without spread, and the mean score is more than a fifth of
    the span of scores below the highest one. All are means of the newest five steps.
    """
    entropy, equal, score = run.together(
        "actor/entropy", "critic/groups_without_spread", "critic/score/mean"
    )
    before, now = entropy.begin_and_now
    alike, mean = equal.newest(WINDOW).mean, score.newest(WINDOW).mean
    highest = max(run.series("critic/score/max").values, default=0.0)
    is_right = run.score_span > 0 and mean >= highest - run.score_span / 5
    if now < before / 10 and alike >= 0.8 and not is_right:
        yield Sign(
            f"The entropy was {before:.4g} nats and is {now:.4g} now; {alike:.0%} of the prompts "
            f"have only answers of one score, and the mean score is {mean:.4g}.",
            entropy.where(value < before / 10 for value in entropy.values),
            is_error=True,
        )


def entropy_exploded(run: RunHistory) -> Iterator[Sign]:
    """Find an entropy above three times that at first, and half a nat more, in a run no better.

    It is the mean of the newest five steps. Better is a higher mean score than at first and, where
    there is one, a higher validation.
    """
    entropy = run.series("actor/entropy")
    before, now = entropy.begin_and_now
    if now > max(3 * before, before + 0.5) and not run.is_better_than_at_first:
        yield Sign(
            f"The entropy was {before:.4g} nats and is {now:.4g} now.",
            entropy.where(value > max(3 * before, before + 0.5) for value in entropy.values),
            is_error=True,
        )


def answers_shrank(run: RunHistory) -> Iterator[Sign]:
    """Find answers of less than 30 % of their length at first, in a run no better.

    It is the mean of the newest five steps. Better is a higher mean score than at first and, where
    there is one, a higher validation.
    """
    length = run.series("response_length/mean")
    before, now = length.begin_and_now
    if now < 0.3 * before and not run.is_better_than_at_first:
        yield Sign(
            f"The answers had {before:.4g} tokens and have {now:.4g} now.",
            length.where(value < 0.3 * before for value in length.values),
        )


def answers_grew(run: RunHistory) -> Iterator[Sign]:
    """Find answers of more than three times their length at first, in a run no better.

    It is the mean of the newest five steps. Better is a higher mean score than at first and, where
    there is one, a higher validation.
    """
    length = run.series("response_length/mean")
    before, now = length.begin_and_now
    if now > 3 * before and not run.is_better_than_at_first:
        yield Sign(
            f"The answers had {before:.4g} tokens and have {now:.4g} now.",
            length.where(value > 3 * before for value in length.values),
        )


def far_from_reference(run: RunHistory) -> Iterator[Sign]:
    """Find a KL to the reference above a nat a token, and twice that at first, in a run no better.

    It is the mean of the newest five steps. Better is a higher mean score than at first and, where
    there is one, a higher validation.
    """
    kl = run.series("actor/kl")
    before, now = kl.begin_and_now
    if now > max(1.0, 2 * before) and not run.is_better_than_at_first:
        yield Sign(
            f"The KL was {before:.4g} nats per token and is {now:.4g} now.",
            kl.where(value > 1.0 for value in kl.values),
            is_error=True,
        )
