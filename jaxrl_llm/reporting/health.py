"""What looks wrong in a run, in plain language, as far as its files tell."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxrl_llm.reporting import checks
from jaxrl_llm.reporting.checks import RunHistory, Sign, read_history
from jaxrl_llm.training.run_files import RunFiles

PAGE = "health.md"

CHECKS: dict[str, Callable[[RunHistory], Iterator[Sign]]] = {
    "The run stopped before its last step": checks.stopped_early,
    "Nothing to learn from": checks.no_signal,
    "Updates are skipped": checks.updates_skipped,
    "The gradient is zero": checks.gradient_zero,
    "The learning rate is zero": checks.learning_rate_zero,
    "The score has fallen": checks.score_fell,
    "The validation has fallen": checks.validation_fell,
    "Nothing is learned": checks.no_learning,
    "The loss does not fall": checks.loss_does_not_fall,
    "Answers are cut off": checks.answers_cut,
    "Answers have become much shorter": checks.answers_shrank,
    "Answers have become much longer": checks.answers_grew,
    "The entropy has collapsed": checks.entropy_collapsed,
    "The entropy has exploded": checks.entropy_exploded,
    "The policy is far from the reference": checks.far_from_reference,
    "Updates change the policy too much": checks.policy_jumps,
    "Most prompts teach nothing": checks.most_groups_equal,
    "Most tokens are clipped": checks.much_clipping,
    "The gradient has spikes": checks.gradient_spikes,
    "The critic explains nothing": checks.critic_explains_nothing,
    "Experts are idle": checks.experts_idle,
    "The reward function fails": checks.reward_errors,
    "Episodes are broken": checks.episodes_broken,
    "Calls of a tool go wrong": checks.tools_fail,
    "The chat template and the stream drift apart": checks.template_drifts,
    "Engine and trainer drift apart": checks.engine_drifts,
    "Most tokens are rejected": checks.tokens_rejected,
    "Answers are too old": checks.answers_too_old,
    "Metrics are not finite": checks.not_finite,
    "Steps wait for the compiler": checks.compiles_late,
    "Log records are missing": checks.records_dropped,
    "Processes were restarted": checks.restarted,
}
"""The checks by what is wrong, which is also the heading of `docs/health.md` about it."""


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
        Finding(
            name=check.__name__,
            title=title,
            detail=sign.detail,
            steps=sign.steps,
            page=f"{PAGE}#{anchor(title)}",
            severity="error" if sign.is_error else "warning",
        )
        for title, check in CHECKS.items()
        for sign in check(history)
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
