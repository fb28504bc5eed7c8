"""Prompts that a teacher reads in place of the policy's: with more in them than the policy is told.

A function here returns the messages of the new prompt, or None where an answer has no teacher. It
asks for what it needs by parameter name, its other parameters are keywords of the config:

- `messages`: the prompt's chat, a list of mappings with `role` and `content`.
- `data_source`, `ground_truth`, `extra_info`: of the prompt's row.
- `text`, `score`, `feedback`: of the answer: what the policy wrote, its score, and a mapping with
  what else the reward function reported of it.
- `siblings`: the other answers to the same prompt that have a score, each a `ScoredAnswer`.

It is called once for each answer, and again when a run goes on: the same input has to give the same
prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config import functions
from jaxrl_llm.data.chat import Message

TOLD = (
    "messages",
    "data_source",
    "ground_truth",
    "extra_info",
    "text",
    "score",
    "feedback",
    "siblings",
)
"""What a function may ask for."""

Prompted = list[Message] | None
"""The messages of a prompt; None where an answer has no teacher."""


class ScoredAnswer(NamedTuple):
    """An answer, its score, and what else the reward function reported of it."""

    text: str
    score: float
    feedback: Mapping[str, Any]


def with_demonstration(
    messages: Sequence[Message],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    column: str | None = None,
    template: str = (
        "{prompt}\n\nThis is an example of a good answer:\n\n{demonstration}\n\n"
        "Give an answer of your own."
    ),
) -> Prompted:
    """Show the teacher how the prompt may be answered (SDFT).

    Source: https://arxiv.org/abs/2601.19897.

    Args:
        messages: of the prompt.
        ground_truth: the demonstration, if no column is named.
        extra_info: of the row.
        column: what the demonstration is called in extra_info; null takes the ground truth.
        template: of the last message of the user, with its text as {prompt}.

    Returns:
        The messages; None where the row has no demonstration.

    Raises:
        ValueError: extra_info has no such name, or the template another one.

    >>> with_demonstration(
    ...     [{"role": "user", "content": "1+2="}], "3", {}, template="{prompt} ({demonstration}) "
    ... )
    [{'role': 'user', 'content': '1+2= (3) '}]
    """
    if column is not None and column not in extra_info:
        raise ValueError(f"extra_info has no {column!r}; {functions.closest(column, extra_info)}")
    demonstration = ground_truth if column is None else extra_info[column]
    if demonstration is None or demonstration == "":
        return None
    return _filled(messages, template, demonstration=demonstration)


def with_successful_sibling(
    messages: Sequence[Message],
    siblings: Sequence[ScoredAnswer],
    *,
    threshold: float = 1.0,
    template: str = (
        "{prompt}\n\nThis is a correct answer:\n\n{answer}\n\nGive an answer of your own."
    ),
) -> Prompted:
    """Show the teacher the first other answer to the prompt that succeeded (SDPO).

    Source: https://arxiv.org/abs/2601.20802.

    Args:
        messages: of the prompt.
        siblings: the other answers to it.
        threshold: the least score of a success.
        template: of the last message of the user, with its text as {prompt}.

    Returns:
        The messages; None where no other answer succeeded.

    Raises:
        ValueError: the template has another name.

    >>> with_successful_sibling(
    ...     [{"role": "user", "content": "1+2="}],
    ...     [ScoredAnswer("4", 0.0, {}), ScoredAnswer("3", 1.0, {})],
    ...     template="{prompt} ({answer}) ",
    ... )
    [{'role': 'user', 'content': '1+2= (3) '}]
    """
    success = next((s for s in siblings if s.score >= threshold), None)
    return success and _filled(messages, template, answer=success.text)


def with_feedback(
    messages: Sequence[Message],
    text: str,
    feedback: Mapping[str, Any],
    *,
    name: str = "feedback",
    template: str = (
        "{prompt}\n\nThis is an earlier answer:\n\n{answer}\n\nWhat came of it:\n\n{feedback}\n\n"
        "Give a better answer."
    ),
) -> Prompted:
    """Show the teacher what the reward function said of the answer (SDPO).

    Source: https://arxiv.org/abs/2601.20802.

    Args:
        messages: of the prompt.
        text: of the answer.
        feedback: what the reward function reported besides the score.
        name: of the text in it.
        template: of the last message of the user, with its text as {prompt}.

    Returns:
        The messages; None where nothing was said.

    Raises:
        ValueError: the template has another name.

    >>> with_feedback(
    ...     [{"role": "user", "content": "1+2="}], "4", {"feedback": "too large"},
    ...     template="{prompt} not {answer}: {feedback}. ",
    ... )
    [{'role': 'user', 'content': '1+2= not 4: too large. '}]
    """
    reported = feedback.get(name)
    if reported is None or reported == "":
        return None
    return _filled(messages, template, answer=text, feedback=reported)


def _filled(messages: Sequence[Message], template: str, **texts: Any) -> list[Message]:
    """Return the messages with the template in place of the user's last text."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
    if last is None or not isinstance(messages[last]["content"], str):
        roles = [message["role"] for message in messages]
        raise ValueError(f"expected a text of the user in the prompt, got messages of {roles}")
    try:
        content = template.format(prompt=messages[last]["content"], **texts)
    except (LookupError, ValueError) as error:
        names = ", ".join(f"{{{name}}}" for name in ("prompt", *texts))
        raise ValueError(
            f"template: expected the names {names}, and other braces twice, got {template!r}"
        ) from error
    return [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]
