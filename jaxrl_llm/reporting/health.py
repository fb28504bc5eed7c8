"""What looks wrong in a run, in plain language: checks, each a function of the run's history."""

import bisect
import fcntl
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from jaxrl_llm.config.load import read_yaml
from jaxrl_llm.config.sections import CACHE_TOLERANCE, FP8_TOLERANCE, TOLERANCE
from jaxrl_llm.training.run_files import RunFiles

WINDOW = 5
"""Steps whose mean stands for a time of the run, where it has twice as many."""


class Finding(NamedTuple):
    """Something that looks wrong in a run.

    Attributes:
        name: of the check, the same in every run.
        title: what is wrong, in a few words.
        detail: the numbers that say so, in a sentence or two.
        steps: where it shows; empty where it is about the whole run.
        page: the page and heading below `docs/` that help, as in `health.md#nothing-is-learned`.
        severity: `error` where the run can't learn what it should, or has ended; else `warning`.
    """

    name: str
    title: str
    detail: str
    steps: tuple[int, ...]
    page: str
    severity: str


def sign(detail: str, steps: tuple[int, ...] = (), is_error: bool = False) -> Finding:
    """Return what a check has found, to which `check_history` adds what is known of the check."""
    return Finding("", "", detail, steps, "", "error" if is_error else "warning")


class Series(NamedTuple):
    """The finite values of one metric, in the order of the steps that have it.

    Attributes:
        steps: that have the metric.
        values: one for each of them.
    """

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def newest(self, n: int) -> "Series":
        """Return the last n, or all where there are fewer.

        >>> Series((1, 2, 3), (0.1, 0.2, 0.3)).newest(2)
        Series(steps=(2, 3), values=(0.2, 0.3))
        """
        return Series(self.steps[-n:], self.values[-n:])

    def where(self, keep: Iterable[bool]) -> tuple[int, ...]:
        """Return the steps that a sequence of the same length keeps."""
        return tuple(step for step, kept in zip(self.steps, keep, strict=True) if kept)

    @property
    def mean(self) -> float:
        """Of all values; NaN without any."""
        return fmean(self.values) if self.values else math.nan

    @property
    def ends(self) -> tuple[float, float] | None:
        """The means of the first and of the newest `WINDOW` steps; None below four steps.

        Of fewer than twice as many steps they are the means of both halves.
        """
        n = min(WINDOW, len(self.values) // 2)
        return (fmean(self.values[:n]), fmean(self.values[-n:])) if n > 1 else None

    @property
    def begin_and_now(self) -> tuple[float, float]:
        """The value of the first step and the mean of the newest `WINDOW`; (0, 0) below four steps.

        The first step measures what the run began with; what comes after may already have changed.
        """
        known = len(self.values) >= 4
        return (self.values[0], fmean(self.values[-WINDOW:])) if known else (0.0, 0.0)

    @property
    def smoothed(self) -> "Series":
        """The means of `WINDOW` steps in a row, each at the last of them."""
        ends = range(WINDOW, len(self.values) + 1)
        means = tuple(fmean(self.values[end - WINDOW : end]) for end in ends)
        return Series(self.steps[WINDOW - 1 :], means)

    @property
    def usual_change(self) -> float:
        """The median of the changes between two steps, without their sign; 0 below two steps."""
        pairs = zip(self.values, self.values[1:], strict=False)
        return median([abs(b - a) for a, b in pairs] or [0.0])


class RunHistory:
    """What a run has logged, and its config.

    Args:
        rows: the lines of metrics.jsonl, in their order; NaN and infinity count as null there.
        config: the resolved config as a tree.
        is_open: tells whether a process holds the run's folder.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        is_open: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep what is given."""
        self.rows = [{name: _finite(value) for name, value in row.items()} for row in rows]
        self.trained = [row for row in self.rows if row["step"] > 0]
        self.is_open = is_open
        self._config = config

    def key(self, name: str, default: Any = None) -> Any:
        """Return a key of the config, as in `rollout.max_new_tokens`; the default without one."""
        at: Any = self._config
        for part in name.split("."):
            at = at.get(part) if isinstance(at, Mapping) else None
        return default if at is None else at

    def series(self, name: str) -> Series:
        """Return a metric of the training steps, without values that are not finite."""
        pairs = [(row["step"], row[name]) for row in self.trained if row.get(name) is not None]
        return Series(tuple(step for step, _ in pairs), tuple(float(value) for _, value in pairs))

    def together(self, *names: str) -> tuple[Series, ...]:
        """Return several metrics, at the steps that have all of them."""
        rows = [row for row in self.trained if all(row.get(name) is not None for name in names)]
        steps = tuple(row["step"] for row in rows)
        return tuple(Series(steps, tuple(float(row[name]) for row in rows)) for name in names)

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of all metrics, in the order in which they first came."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    @functools.cached_property
    def validations(self) -> dict[str, Series]:
        """The mean@k of each data source by its metric's name, the value before training first."""
        names = [n for n in self.names if n.startswith("val-core/") and "/mean@" in n]
        found = {}
        for name in names:
            rows = [row for row in self.rows if row.get(name) is not None]
            values = tuple(float(row[name]) for row in rows)
            found[name] = Series(tuple(row["step"] for row in rows), values)
        return found

    @functools.cached_property
    def score_span(self) -> float:
        """The highest score of an answer less the lowest, over all steps; 0 without scores."""
        lowest, highest = (self.series(f"critic/score/{end}").values for end in ("min", "max"))
        return max(highest) - min(lowest) if lowest and highest else 0.0

    @functools.cached_property
    def nearly_best_score(self) -> float:
        """What the mean score of a step must reach for its answers to count as nearly all right.

        It is the highest score of an answer so far, less a tenth of the span of scores; infinite
        where all scores are the same, as nothing tells right from wrong then.
        """
        highest = self.series("critic/score/max").values
        return max(highest) - 0.1 * self.score_span if self.score_span else math.inf

    @functools.cached_property
    def is_better_than_at_first(self) -> bool:
        """Whether the mean score has risen, and the validation of some source; as far as logged."""
        score = self.series("critic/score/mean").ends
        pairs = [(s.values[0], s.values[-1]) for s in self.validations.values() if len(s.steps) > 1]
        has_risen = [any(newest > first for first, newest in pairs)] if pairs else []
        return all([*has_risen, score is None or score[1] > score[0]])


def read_history(run: RunFiles) -> RunHistory:
    """Read what the checks need from a run's folder.

    Raises:
        ConfigError: it has no config.yaml.
    """
    config = read_yaml(run.folder / "config.yaml")
    return RunHistory(run.metrics, config, lambda: is_held(run.folder))


def is_held(folder: Path) -> bool:
    """Tell whether a process holds a run's folder; also where it can't be found out.

    A shared lock is asked for, for a moment, so that readers do not hinder each other.
    """
    try:
        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


NEWEST = 10
"""Steps whose mean says how a run is now."""


def no_signal(run: RunHistory) -> Iterator[Finding]:
    """Find nothing to learn from in the newest three steps, or in all of a shorter run.

    That is: all advantages are zero, or no group has spread and all answers of the step have the
    same score. The mean score is not within a tenth of the highest one that an answer ever had.
    """
    score, lowest, highest, below, above, equal = run.together(
        "critic/score/mean",
        "critic/score/min",
        "critic/score/max",
        "critic/advantages/min",
        "critic/advantages/max",
        "critic/groups_without_spread",
    )
    columns = (score, lowest, highest, below, above, equal)
    flat = [
        ((low == high and alike == 1) or down == up == 0) and mean < run.nearly_best_score
        for mean, low, high, down, up, alike in zip(*(c.values for c in columns), strict=True)
    ]
    if flat and all(flat[-3:]):
        yield sign(
            f"In the newest step the scores are from {lowest.values[-1]:.4g} to "
            f"{highest.values[-1]:.4g}, and equal among the answers to a prompt.",
            score.where(flat),
            is_error=True,
        )


def most_groups_equal(run: RunHistory) -> Iterator[Finding]:
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
        yield sign(
            f"In the newest {len(equal.steps)} steps {equal.mean:.0%} of the prompts had only "
            f"answers of one score; the mean score is {score.mean:.4g}.",
            equal.steps,
        )


def score_fell(run: RunHistory) -> Iterator[Finding]:
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
        yield sign(
            f"The mean of five steps was {best:.4g} at step {since} and is "
            f"{means.values[-1]:.4g} now.",
            means.where(step > since for step in means.steps),
            is_error=True,
        )


def validation_fell(run: RunHistory) -> Iterator[Finding]:
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
        yield sign(
            f"{name} was {best:.4g} at step {since} and is {values[-1]:.4g} now"
            + ("." if fell_too else ", while the score in training did not fall."),
            tuple(step for step in steps if step > since),
            is_error=True,
        )


def no_learning(run: RunHistory) -> Iterator[Finding]:
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
        yield sign(
            f"The mean score was {before:.4g} in the first {fifth} steps and is "
            f"{newest.mean:.4g} in the newest {fifth}."
        )


def answers_cut(run: RunHistory) -> Iterator[Finding]:
    """Find a quarter of the answers cut at the limit, as the mean of the newest ten steps.

    From three quarters on it is an error, in a run no better: its mean score or its validation has
    not risen. Some answers are whole without a stop token.
    """
    cut = run.series("response_length/clip_ratio").newest(NEWEST)
    if cut.mean >= 0.25:
        yield sign(
            f"{cut.mean:.0%} of the answers of the newest {len(cut.steps)} steps had no stop "
            f"token within rollout.max_new_tokens={run.key('rollout.max_new_tokens', 512)}.",
            cut.steps,
            is_error=cut.mean >= 0.75 and not run.is_better_than_at_first,
        )


def entropy_collapsed(run: RunHistory) -> Iterator[Finding]:
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
        yield sign(
            f"The entropy was {before:.4g} nats and is {now:.4g} now; {alike:.0%} of the prompts "
            f"have only answers of one score, and the mean score is {mean:.4g}.",
            entropy.where(value < before / 10 for value in entropy.values),
            is_error=True,
        )


def entropy_exploded(run: RunHistory) -> Iterator[Finding]:
    """Find an entropy above three times that at first, and half a nat more, in a run no better.

    It is the mean of the newest five steps. Better is a higher mean score than at first and, where
    there is one, a higher validation.
    """
    entropy = run.series("actor/entropy")
    before, now = entropy.begin_and_now
    if now > max(3 * before, before + 0.5) and not run.is_better_than_at_first:
        yield sign(
            f"The entropy was {before:.4g} nats and is {now:.4g} now.",
            entropy.where(value > max(3 * before, before + 0.5) for value in entropy.values),
            is_error=True,
        )


def answers_shrank(run: RunHistory) -> Iterator[Finding]:
    """Find answers of less than 30 % of their length at first, in a run no better.

    It is the mean of the newest five steps. Better is a higher mean score than at first and, where
    there is one, a higher validation.
    """
    length = run.series("response_length/mean")
    before, now = length.begin_and_now
    if now < 0.3 * before and not run.is_better_than_at_first:
        yield sign(
            f"The answers had {before:.4g} tokens and have {now:.4g} now.",
            length.where(value < 0.3 * before for value in length.values),
        )


def answers_grew(run: RunHistory) -> Iterator[Finding]:
    """Find answers of more than three times their length at first, in a run no better.

    It is the mean of the newest five steps. Better is a higher mean score than at first and, where
    there is one, a higher validation.
    """
    length = run.series("response_length/mean")
    before, now = length.begin_and_now
    if now > 3 * before and not run.is_better_than_at_first:
        yield sign(
            f"The answers had {before:.4g} tokens and have {now:.4g} now.",
            length.where(value > 3 * before for value in length.values),
        )


def far_from_reference(run: RunHistory) -> Iterator[Finding]:
    """Find a KL to the reference above a nat a token, and twice that at first, in a run no better.

    It is the mean of the newest five steps. Better is a higher mean score than at first and, where
    there is one, a higher validation.
    """
    kl = run.series("actor/kl")
    before, now = kl.begin_and_now
    if now > max(1.0, 2 * before) and not run.is_better_than_at_first:
        yield sign(
            f"The KL was {before:.4g} nats per token and is {now:.4g} now.",
            kl.where(value > 1.0 for value in kl.values),
            is_error=True,
        )


def stopped_early(run: RunHistory) -> Iterator[Finding]:
    """Find fewer steps than `steps`, and no process that holds the run's folder."""
    planned = run.key("steps")
    done = max((row["step"] for row in run.rows), default=0)
    if planned is not None and done < planned and not run.is_open():
        yield sign(
            f"{done} of {planned} steps are logged, and no process is training. The same command "
            "goes on from the newest checkpoint, or begins again where there is none.",
            (done,) if done else (),
            is_error=True,
        )


def not_finite(run: RunHistory) -> Iterator[Finding]:
    """Find metrics that were NaN or infinite, but for the gradients of skipped updates."""
    found: dict[str, list[int]] = {}
    for row in run.rows:
        for name, value in row.items():
            role, _, rest = name.rpartition("/")
            if value is None and not (rest == "grad_norm" and row.get(f"{role}/skipped")):
                found.setdefault(name, []).append(row["step"])
    if found:
        some = list(found)[:5]
        more = f" and {len(found) - 5} others" if len(found) > 5 else ""
        yield sign(
            f"{', '.join(some)}{more}.",
            tuple(sorted({step for steps in found.values() for step in steps})),
            is_error=any(name.endswith(("loss", "grad_norm")) for name in found),
        )


def reward_errors(run: RunHistory) -> Iterator[Finding]:
    """Find 1 % of the answers without a score of their own, over the newest ten steps.

    Their reward function raised, took too long, crashed or returned no finite number, or it said
    itself that they are unscored. From 10 % on it is an error.
    """
    on_error = run.key("reward.on_error", 0.0)
    meanings = {
        "reward/errors": f"have no score but reward.on_error={on_error}",
        "reward/unscored": "are unscored and left out of their groups",
    }
    if on_error == "unscored":
        del meanings["reward/errors"]  # the others count these, too
    for name, meaning in meanings.items():
        failed = run.series(name).newest(NEWEST)
        share = sum(failed.values) / max(_sampled(run, failed), 1)
        if share >= 0.01:
            yield sign(
                f"{sum(failed.values):.0f} answers of the newest {len(failed.steps)} steps, "
                f"{share:.1%} of all, {meaning}.",
                failed.where(value > 0 for value in failed.values),
                is_error=share >= 0.1,
            )


def _sampled(run: RunHistory, of: Series) -> float:
    """Return how many answers were sampled in some steps."""
    batches = run.series("batch/generation_batches")  # with a group filter
    by_step = dict(zip(batches.steps, batches.values, strict=True))
    per_batch = run.key("batch.prompts_per_step", 64) * run.key("rollout.samples_per_prompt", 8)
    return per_batch * math.fsum(by_step.get(step, 1.0) for step in of.steps)


def episodes_broken(run: RunHistory) -> Iterator[Finding]:
    """Find 5 % of the episodes broken, over the newest ten steps. From 20 % on it is an error."""
    broken = run.series("episode/broken").newest(NEWEST)
    per_step = run.key("batch.prompts_per_step", 64) * run.key("rollout.samples_per_prompt", 8)
    share = sum(broken.values) / max(per_step * len(broken.steps), 1)
    if share >= 0.05:
        yield sign(
            f"{sum(broken.values):.0f} episodes of the newest {len(broken.steps)} steps, "
            f"{share:.0%} of all. Above rollout.limits.broken_share="
            f"{run.key('rollout.limits.broken_share', 0.5)} the run stops.",
            broken.where(value > 0 for value in broken.values),
            is_error=share >= 0.2,
        )


def tools_fail(run: RunHistory) -> Iterator[Finding]:
    """Find a tool of whose calls 5 % time out, die or are broken, or half fail.

    Counted over the newest ten steps that call it. Calls that fail may be the model's fault, so
    that more of them are usual; calls of tools that don't exist count as such, too.
    """
    for name in run.names:
        if not (name.startswith("tools/") and name.endswith("/calls")):
            continue
        tool, calls = name.split("/")[1], run.series(name).newest(NEWEST)
        counts = {
            kind: sum(row.get(f"tools/{tool}/{kind}") or 0.0 for row in _rows(run, calls))
            for kind in ("failed", "timeout", "died", "broken")
        }
        total, failed = sum(calls.values), counts["failed"]
        if total and (failed >= total / 2 or sum(counts.values()) - failed >= total / 20):
            said = ", ".join(f"{n:.0f} {kind}" for kind, n in counts.items() if n)
            yield sign(f"Of {total:.0f} calls of {tool}: {said}.", calls.steps)


def _rows(run: RunHistory, of: Series) -> list[Mapping[str, Any]]:
    return [row for row in run.trained if row["step"] in of.steps]


def template_drifts(run: RunHistory) -> Iterator[Finding]:
    """Find episodes that the chat template would write otherwise, and at first did not.

    The share of the newest five steps is above that of the first step by a tenth of all.
    """
    drift = run.series("rollout/template_drift")
    before, now = drift.begin_and_now
    if now > before + 0.1:
        yield sign(
            f"The share was {before:.0%} and is {now:.0%} now.",
            drift.where(value > before + 0.1 for value in drift.values),
        )


def engine_drifts(run: RunHistory) -> Iterator[Finding]:
    """Find log-probs of engine and trainer that differ ever more, or by half of what is allowed.

    That is: the mean difference of the newest five steps is five times that of the first step and
    above 0.005 nats, or above half of `rollout.logprob_tolerance`, at which the run stops.
    """
    difference = run.series("training/rollout_logprobs_diff_mean")
    if not difference.steps:
        return
    before, now = difference.values[0], difference.newest(WINDOW).mean
    limit = _tolerance(run) / 2
    if now > limit or now > max(5 * before, 0.005):
        above = min(limit, max(5 * before, 0.005))
        yield sign(
            f"They differed by {before:.4g} nats on average at first, and by {now:.4g} now; at "
            f"{2 * limit:.4g} the run stops.",
            difference.where(value > above for value in difference.values),
            is_error=now > limit,
        )


def _tolerance(run: RunHistory) -> float:
    """Return the difference in nats at which the run stops."""
    is_low = run.key("rollout.kv_cache_dtype", "auto") != "auto"
    default = CACHE_TOLERANCE if is_low else TOLERANCE
    if run.key("rollout.quantization", "none") == "fp8":
        default = FP8_TOLERANCE
    return run.key("rollout.logprob_tolerance", default)


def tokens_rejected(run: RunHistory) -> Iterator[Finding]:
    """Find half of the tokens with weight 0 (`algorithm.correction`), over the newest ten steps."""
    rejected = run.series("rollout_corr/rejected").newest(NEWEST)
    if rejected.mean >= 0.5:
        yield sign(
            f"{rejected.mean:.0%} of the tokens of the newest {len(rejected.steps)} steps have "
            "weight 0.",
            rejected.steps,
        )


def answers_too_old(run: RunHistory) -> Iterator[Finding]:
    """Find tokens from which the policy has moved far, or that are all as old as they may be.

    That is, over the newest ten steps: `async/k3_kl/age/<k>` is above 0.1 nats for some k, or the
    mean age is above nine tenths of `rollout.staleness`, if that is 2 or more.
    """
    most = run.key("rollout.staleness", 0)
    age = run.series("async/age/mean").newest(NEWEST)
    if most >= 2 and len(age.steps) >= 5 and age.mean > 0.9 * most:
        yield sign(
            f"The mean age is {age.mean:.3g} updates, with rollout.staleness={most}: the engine is "
            "faster than the trainer.",
            age.steps,
        )
    names = [name for name in run.names if name.startswith("async/k3_kl/age/")]
    moved = {name: run.series(name).newest(NEWEST) for name in names}
    far = {name: s for name, s in moved.items() if len(s.steps) >= 5 and s.mean > 0.1}
    if far:
        name, series = max(far.items(), key=lambda item: item[1].mean)
        yield sign(f"{name} is {series.mean:.4g} nats.", series.steps)


def compiles_late(run: RunHistory) -> Iterator[Finding]:
    """Find three steps after the tenth that waited for the compiler, and lost a tenth of the time.

    That is the time of all steps after the tenth. One such step is usual where the actor is first
    updated after `critic.warmup_steps`.
    """
    waited, seconds = run.together("perf/compile_wait_s", "timing_s/step")
    later = [at for at, step in enumerate(waited.steps) if step > 10]
    lost, total = (sum(s.values[at] for at in later) for s in (waited, seconds))
    steps = tuple(waited.steps[at] for at in later if waited.values[at] > 0)
    if len(steps) >= 3 and lost > total / 10:
        yield sign(f"They waited for {lost:.3g} of {total:.3g} seconds.", steps)


def records_dropped(run: RunHistory) -> Iterator[Finding]:
    """Find steps that a tracker (`log.trackers`) did not get."""
    dropped = run.series("perf/dropped_log_records")
    if any(dropped.values):
        yield sign(
            f"Trackers miss {max(dropped.values):.0f} records; metrics.jsonl has them all.",
            dropped.where(value > 0 for value in dropped.values),
        )


def restarted(run: RunHistory) -> Iterator[Finding]:
    """Find restarts of the job or of its engines on a cluster."""
    for name in ("cluster/restarts", "cluster/engine_restarts"):
        count = run.series(name)
        if any(count.values):
            yield sign(
                f"{max(count.values):.0f} restarts ({name}).",
                count.where(value > 0 for value in count.values),
            )


ROLES = {"actor": "", "critic": "critic.", "implicit_reward_model": "implicit_reward_model."}
"""What is updated, and what the keys of its optimizer begin with."""


def updates_skipped(run: RunHistory) -> Iterator[Finding]:
    """Find updates that were skipped because the gradient was not finite.

    It is an error if a tenth of the steps have such updates, or the newest one.
    """
    for role, section in ROLES.items():
        skipped = run.series(f"{role}/skipped")
        steps = skipped.where(value > 0 for value in skipped.values)
        if steps:
            yield sign(
                f"{sum(skipped.values):.0f} updates of the {role.replace('_', ' ')} were skipped. "
                f"More than {section}optim.max_skipped="
                f"{run.key(f'{section}optim.max_skipped', 3)} in a row stop the run.",
                steps,
                is_error=len(steps) >= len(skipped.steps) / 10 or skipped.steps[-1] in steps,
            )


def gradient_zero(run: RunHistory) -> Iterator[Finding]:
    """Find a gradient of exactly zero in the newest three steps, though advantages are not."""
    norm, below, above = run.together(
        "actor/grad_norm", "critic/advantages/min", "critic/advantages/max"
    )
    columns = zip(norm.values, below.values, above.values, strict=True)
    zero = [value == 0 and (low < 0 or high > 0) for value, low, high in columns]
    if len(zero) >= 3 and all(zero[-3:]):
        yield sign(
            f"The advantages of the newest step are from {below.values[-1]:.4g} to "
            f"{above.values[-1]:.4g}, and the norm of the gradient is 0.",
            norm.where(zero),
            is_error=True,
        )


def gradient_spikes(run: RunHistory) -> Iterator[Finding]:
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
            yield sign(
                f"The norm of the gradient was {max(norm.values[10:]):.4g} at most; its median is "
                f"{before[len(before) // 2]:.4g}.",
                norm.where(is_spike),
            )


def learning_rate_zero(run: RunHistory) -> Iterator[Finding]:
    """Find a learning rate of zero in three steps in a row."""
    for role in (*ROLES, "train"):
        rate = run.series(f"{role}/lr")
        zero = [value == 0 for value in rate.values]
        if any(all(zero[at : at + 3]) for at in range(len(zero) - 2)):
            section = ROLES.get(role, "")
            yield sign(
                f"{sum(zero)} of {len(zero)} steps changed nothing: look at "
                f"{section}optim.schedule, which counts updates, not steps.",
                rate.where(zero),
                is_error=all(zero),
            )


def policy_jumps(run: RunHistory) -> Iterator[Finding]:
    """Find two steps or more whose updates changed the policy by more than a nat per token.

    That is `actor/ppo_kl`, without its sign: the mean of log π_old − log π.
    """
    change = run.series("actor/ppo_kl")
    steps = change.where(abs(value) > 1 for value in change.values)
    if len(steps) >= 2:
        yield sign(
            f"They changed it by up to {max(map(abs, change.values)):.3g} nats.",
            steps,
            is_error=True,
        )


def much_clipping(run: RunHistory) -> Iterator[Finding]:
    """Find more than half of the tokens clipped, as the mean of the newest ten steps.

    Under most losses they have no gradient, so most of what was sampled is not learned from.
    """
    clipped = run.series("actor/pg_clipfrac").newest(10)
    if len(clipped.steps) >= 5 and clipped.mean > 0.5:
        yield sign(
            f"In the newest {len(clipped.steps)} steps {clipped.mean:.0%} of the tokens were "
            "clipped or dropped.",
            clipped.steps,
        )


def critic_explains_nothing(run: RunHistory) -> Iterator[Finding]:
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
        yield sign(
            f"Its explained variance is {median(newest.values):.4g}, as the median of the newest "
            "ten steps.",
            newest.steps,
        )


def experts_idle(run: RunHistory) -> Iterator[Finding]:
    """Find more than half of all layers' experts without any token, in the newest five steps."""
    for role in (*ROLES, "train"):
        idle = run.series(f"{role}/router_idle").newest(5)
        if len(idle.steps) == 5 and min(idle.values) > 0.5:
            yield sign(
                f"{idle.mean:.0%} of the experts had no token in the newest five steps "
                f"({role}/router_idle).",
                idle.steps,
            )


def loss_does_not_fall(run: RunHistory) -> Iterator[Finding]:
    """Find supervised training whose loss is not below that at first, after at least twenty steps.

    Both are means of five steps. It is an error if the loss is 10 % higher.
    """
    loss = run.series("train/loss")
    before, now = loss.ends or (0.0, 1.0)
    if len(loss.steps) >= 20 and now >= before:
        yield sign(
            f"The loss was {before:.4g} nats per token and is {now:.4g} now.",
            loss.newest(5).steps,
            is_error=now > 1.1 * before,
        )


PAGE = "health.md"

CHECKS: dict[str, Callable[[RunHistory], Iterator[Finding]]] = {
    "The run stopped before its last step": stopped_early,
    "Nothing to learn from": no_signal,
    "Updates are skipped": updates_skipped,
    "The gradient is zero": gradient_zero,
    "The learning rate is zero": learning_rate_zero,
    "The score has fallen": score_fell,
    "The validation has fallen": validation_fell,
    "Nothing is learned": no_learning,
    "The loss does not fall": loss_does_not_fall,
    "Answers are cut off": answers_cut,
    "Answers have become much shorter": answers_shrank,
    "Answers have become much longer": answers_grew,
    "The entropy has collapsed": entropy_collapsed,
    "The entropy has exploded": entropy_exploded,
    "The policy is far from the reference": far_from_reference,
    "Updates change the policy too much": policy_jumps,
    "Most prompts teach nothing": most_groups_equal,
    "Most tokens are clipped": much_clipping,
    "The gradient has spikes": gradient_spikes,
    "The critic explains nothing": critic_explains_nothing,
    "Experts are idle": experts_idle,
    "The reward function fails": reward_errors,
    "Episodes are broken": episodes_broken,
    "Calls of a tool go wrong": tools_fail,
    "The chat template and the stream drift apart": template_drifts,
    "Engine and trainer drift apart": engine_drifts,
    "Most tokens are rejected": tokens_rejected,
    "Answers are too old": answers_too_old,
    "Metrics are not finite": not_finite,
    "Steps wait for the compiler": compiles_late,
    "Log records are missing": records_dropped,
    "Processes were restarted": restarted,
}
"""The checks by what is wrong, which is also the heading of `docs/health.md` about it."""


def check_run(run: RunFiles) -> list[Finding]:
    """Return what looks wrong in a run that is finished, crashed or going on; errors come first.

    A check looks at the metrics that it knows. Where there are too few steps, or the run has no
    such metric, it finds nothing.

    Raises:
        ConfigError: the run's folder has no config.yaml.
    """
    return check_history(read_history(run))


def check_history(history: RunHistory) -> list[Finding]:
    """Return what looks wrong in a run, as `check_run`, given its metrics and its config."""
    findings = [
        found._replace(name=check.__name__, title=title, page=f"{PAGE}#{anchor(title)}")
        for title, check in CHECKS.items()
        for found in check(history)
    ]
    return sorted(findings, key=lambda finding: finding.severity)


def anchor(heading: str) -> str:
    """Return what a link to a heading of a page ends with.

    >>> anchor("The run's `policy`, now")
    'the-runs-policy-now'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def health_summary(findings: Sequence[Finding]) -> str:
    """Return one line about what was found.

    >>> health_summary([])
    'nothing looks wrong'
    """
    if not findings:
        return "nothing looks wrong"
    errors = sum(finding.severity == "error" for finding in findings)
    counts = {"error": errors, "warning": len(findings) - errors}
    parts = [f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts.items() if n]
    return f"{', '.join(parts)}: {'; '.join(dict.fromkeys(f.title for f in findings))}"


def health_text(findings: Sequence[Finding]) -> str:
    """Return what was found as text: a paragraph for each.

    >>> print(health_text([Finding("a", "A is low", "It is 1.", (3, 4, 5, 9), "a.md#a", "error")]))
    error: A is low (steps 3-5, 9)
      It is 1.
      docs/a.md#a
    """
    paragraphs = []
    for finding in findings:
        where = f" ({steps_text(finding.steps)})" if finding.steps else ""
        head = f"{finding.severity}: {finding.title}{where}"
        paragraphs.append(f"{head}\n  {finding.detail}\n  docs/{finding.page}")
    return "\n\n".join(paragraphs) or health_summary([])


def steps_text(steps: Sequence[int]) -> str:
    """Return steps in few words, those in a row as one, at most the first four of them.

    >>> steps_text((1, 2, 3, 7)), steps_text((5,))
    ('steps 1-3, 7', 'step 5')
    """
    rows: list[list[int]] = []
    for step in steps:
        if rows and step == rows[-1][-1] + 1:
            rows[-1].append(step)
        else:
            rows.append([step])
    words = [f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]) for row in rows]
    more = f" and {len(words) - 4} more times" if len(words) > 4 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(words[:4])}{more}"
