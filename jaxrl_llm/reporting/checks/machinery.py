"""Whether what surrounds the updates works: engine, scoring, episodes, tools, logs and the run."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.config.sections import CACHE_TOLERANCE, FP8_TOLERANCE, TOLERANCE
from jaxrl_llm.reporting.history import WINDOW, RunHistory, Series, Sign

NEWEST_STEPS = 10
"""Steps over which shares are counted."""


def stopped_early(run: RunHistory) -> Iterator[Sign]:
    """Find fewer steps than `steps`, and no process that holds the run's folder."""
    planned = run.key("steps")
    done = max((row["step"] for row in run.rows), default=0)
    if planned is not None and done < planned and not run.is_open():
        yield Sign(
            f"{done} of {planned} steps are logged, and no process is training. The same command "
            "goes on from the newest checkpoint, or begins again where there is none.",
            (done,) if done else (),
            is_error=True,
        )


def not_finite(run: RunHistory) -> Iterator[Sign]:
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
        yield Sign(
            f"{', '.join(some)}{more}.",
            tuple(sorted({step for steps in found.values() for step in steps})),
            is_error=any(name.endswith(("loss", "grad_norm")) for name in found),
        )


def reward_errors(run: RunHistory) -> Iterator[Sign]:
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
        failed = run.series(name).newest(NEWEST_STEPS)
        share = sum(failed.values) / max(_sampled(run, failed), 1)
        if share >= 0.01:
            yield Sign(
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


def episodes_broken(run: RunHistory) -> Iterator[Sign]:
    """Find 5 % of the episodes broken, over the newest ten steps. From 20 % on it is an error."""
    broken = run.series("episode/broken").newest(NEWEST_STEPS)
    per_step = run.key("batch.prompts_per_step", 64) * run.key("rollout.samples_per_prompt", 8)
    share = sum(broken.values) / max(per_step * len(broken.steps), 1)
    if share >= 0.05:
        yield Sign(
            f"{sum(broken.values):.0f} episodes of the newest {len(broken.steps)} steps, "
            f"{share:.0%} of all. Above rollout.limits.broken_share="
            f"{run.key('rollout.limits.broken_share', 0.5)} the run stops.",
            broken.where(value > 0 for value in broken.values),
            is_error=share >= 0.2,
        )


def tools_fail(run: RunHistory) -> Iterator[Sign]:
    """Find a tool of whose calls 5 % time out, die or are broken, or half fail.

    Counted over the newest ten steps that call it. Calls that fail may be the model's fault, so
    that more of them are usual; calls of tools that don't exist count as such, too.
    """
    for name in run.names:
        if not (name.startswith("tools/") and name.endswith("/calls")):
            continue
        tool, calls = name.split("/")[1], run.series(name).newest(NEWEST_STEPS)
        counts = {
            kind: sum(row.get(f"tools/{tool}/{kind}") or 0.0 for row in _rows(run, calls))
            for kind in ("failed", "timeout", "died", "broken")
        }
        total, failed = sum(calls.values), counts["failed"]
        if total and (failed >= total / 2 or sum(counts.values()) - failed >= total / 20):
            said = ", ".join(f"{n:.0f} {kind}" for kind, n in counts.items() if n)
            yield Sign(f"Of {total:.0f} calls of {tool}: {said}.", calls.steps)


def _rows(run: RunHistory, of: Series) -> list[Mapping[str, Any]]:
    return [row for row in run.trained if row["step"] in of.steps]


def template_drifts(run: RunHistory) -> Iterator[Sign]:
    """Find episodes that the chat template would write otherwise, and at first did not.

    The share of the newest five steps is above that of the first step by a tenth of all.
    """
    drift = run.series("rollout/template_drift")
    before, now = drift.begin_and_now
    if now > before + 0.1:
        yield Sign(
            f"The share was {before:.0%} and is {now:.0%} now.",
            drift.where(value > before + 0.1 for value in drift.values),
        )


def engine_drifts(run: RunHistory) -> Iterator[Sign]:
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
        yield Sign(
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


def tokens_rejected(run: RunHistory) -> Iterator[Sign]:
    """Find half of the tokens with weight 0 (`algorithm.correction`), over the newest ten steps."""
    rejected = run.series("rollout_corr/rejected").newest(NEWEST_STEPS)
    if rejected.mean >= 0.5:
        yield Sign(
            f"{rejected.mean:.0%} of the tokens of the newest {len(rejected.steps)} steps have "
            "weight 0.",
            rejected.steps,
        )


def answers_too_old(run: RunHistory) -> Iterator[Sign]:
    """Find tokens from which the policy has moved far, or that are all as old as they may be.

    That is, over the newest ten steps: `async/k3_kl/age/<k>` is above 0.1 nats for some k, or the
    mean age is above nine tenths of `rollout.staleness`, if that is 2 or more.
    """
    most = run.key("rollout.staleness", 0)
    age = run.series("async/age/mean").newest(NEWEST_STEPS)
    if most >= 2 and len(age.steps) >= 5 and age.mean > 0.9 * most:
        yield Sign(
            f"The mean age is {age.mean:.3g} updates, with rollout.staleness={most}: the engine is "
            "faster than the trainer.",
            age.steps,
        )
    names = [name for name in run.names if name.startswith("async/k3_kl/age/")]
    moved = {name: run.series(name).newest(NEWEST_STEPS) for name in names}
    far = {name: s for name, s in moved.items() if len(s.steps) >= 5 and s.mean > 0.1}
    if far:
        name, series = max(far.items(), key=lambda item: item[1].mean)
        yield Sign(f"{name} is {series.mean:.4g} nats.", series.steps)


def compiles_late(run: RunHistory) -> Iterator[Sign]:
    """Find three steps after the tenth that waited for the compiler, and lost a tenth of the time.

    That is the time of all steps after the tenth. One such step is usual where the actor is first
    updated after `critic.warmup_steps`.
    """
    waited, seconds = run.together("perf/compile_wait_s", "timing_s/step")
    later = [at for at, step in enumerate(waited.steps) if step > 10]
    lost, total = (sum(s.values[at] for at in later) for s in (waited, seconds))
    steps = tuple(waited.steps[at] for at in later if waited.values[at] > 0)
    if len(steps) >= 3 and lost > total / 10:
        yield Sign(f"They waited for {lost:.3g} of {total:.3g} seconds.", steps)


def records_dropped(run: RunHistory) -> Iterator[Sign]:
    """Find steps that a tracker (`log.trackers`) did not get."""
    dropped = run.series("perf/dropped_log_records")
    if any(dropped.values):
        yield Sign(
            f"Trackers miss {max(dropped.values):.0f} records; metrics.jsonl has them all.",
            dropped.where(value > 0 for value in dropped.values),
        )


def restarted(run: RunHistory) -> Iterator[Sign]:
    """Find restarts of the job or of its engines on a cluster."""
    for name in ("cluster/restarts", "cluster/engine_restarts"):
        count = run.series(name)
        if any(count.values):
            yield Sign(
                f"{max(count.values):.0f} restarts ({name}).",
                count.where(value > 0 for value in count.values),
            )
