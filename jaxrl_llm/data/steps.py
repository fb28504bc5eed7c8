"""Steps of answers: rows with a label for each, their tokens, and where they end in an answer."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxrl_llm.data.chat import Tokenizer
from jaxrl_llm.data.row_fields import Row, check_unicode, field_error
from jaxrl_llm.workers.answers import finite_number


class StepTokens(NamedTuple):
    """An answer as a process reward model reads it.

    Attributes:
        tokens: of the steps, with the separator's behind each.
        ends: index of each step's last token, which is the separator's.
    """

    tokens: tuple[int, ...]
    ends: tuple[int, ...]


def normalize_step_row(row: Row, prompt: list[Row]) -> Row:
    """Return a row whose answer has labelled steps in this library's form.

    Args:
        row: with `completions`, the texts of the steps, and as many `labels`, each true, false or
            a number from 0 to 1.
        prompt: of the row, in one form.

    Returns:
        `prompt`, `completions` and `labels`, numbers.

    Raises:
        ValueError: it is another.

    >>> row = {"completions": ["1+1=2", "2*2=5"], "labels": [True, False]}
    >>> normalize_step_row(row, [{"role": "user", "content": "2(1+1)="}])["labels"]
    [1.0, 0.0]
    """
    steps, labels = row["completions"], row.get("labels")
    if not isinstance(steps, list) or not steps:
        raise field_error("completions", steps, "a list of the texts of steps")
    for number, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise field_error(f"completions[{number}]", step, "the text of a step")
        check_unicode(step, f"completions[{number}]")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise field_error("labels", labels, f"a list of {len(steps)}, one for each step")
    for number, label in enumerate(labels):
        if finite_number(label) is None or not 0 <= label <= 1:
            expected = "true, false or a number from 0 to 1"
            raise field_error(f"labels[{number}]", label, expected)
    return {"prompt": prompt, "completions": steps, "labels": [float(label) for label in labels]}


def encode_steps(tokenizer: Tokenizer, steps: Sequence[str], separator: str) -> StepTokens:
    """Encode steps, each alone, with the separator behind it.

    So no token spans the border of two steps, and what is scored is always the same token.

    Args:
        tokenizer: of the process reward model.
        steps: their texts.
        separator: a text.

    Raises:
        ValueError: the separator has no tokens.

    >>> class Bytes:
    ...     eos_token_id = 0
    ...     def __call__(self, text, *, add_special_tokens):
    ...         return {"input_ids": list(text.encode())}
    ...     def get_chat_template(self): return ""
    ...     def apply_chat_template(self, conversation, **kwargs): return []
    >>> encode_steps(Bytes(), ["a", "bc"], "\\n")
    StepTokens(tokens=(97, 10, 98, 99, 10), ends=(1, 4))
    """
    behind = tokenizer(separator, add_special_tokens=False)["input_ids"]
    if not behind:
        raise ValueError(f"steps: the tokenizer has no token for the separator {separator!r}")
    tokens: list[int] = []
    ends = []
    for step in steps:
        tokens += [*tokenizer(step, add_special_tokens=False)["input_ids"], *behind]
        ends.append(len(tokens) - 1)
    return StepTokens(tuple(map(int, tokens)), tuple(ends))


def check_steps(steps: Sequence[str], separator: str) -> None:
    """Raise ValueError for a step that holds the separator: an answer's text would be cut there."""
    for number, step in enumerate(steps):
        if separator in step:
            raise ValueError(
                f"completions[{number}] holds data.step_separator="
                f"{separator!r}, which ends a step: expected the text of one step without it"
            )


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    r"""Cut an answer into steps; return each with where it ends in the text.

    A step ends behind its separator, the last one at the end of the text. Blank ones are none;
    where all are blank, the answer is one empty step.

    Args:
        text: of the answer.
        separator: that ends a step.

    >>> split_steps("1+1=2\n\n2*2=4\n", "\n")
    [('1+1=2', 6), ('2*2=4', 13)]
    >>> split_steps("\n", "\n")
    [('', 1)]
    """
    steps, at = [], 0
    for part in text.split(separator):
        end = min(at + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((part, end))
        at = end
    return steps or [("", len(text))]


def last_tokens(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], ends: Sequence[int]
) -> list[int]:
    """Return the index of the token with which the text of an answer reaches each of its ends.

    Args:
        decode: from token ids to the text in which the ends are.
        tokens: of the answer.
        ends: lengths of the text, in letters, in rising order. The last one is that of the whole
            text, whose last token is the answer's, a token that stopped it included.

    >>> last_tokens(lambda ids: "".join("ab\\n"[i] for i in ids), [0, 2, 1, 1], [2, 4])
    [1, 3]
    """
    places = []
    for end in ends[:-1]:
        low, high = 0, len(tokens) - 1
        while low < high:
            middle = (low + high) // 2
            if len(decode(tokens[: middle + 1])) >= end:
                high = middle
            else:
                low = middle + 1
        places.append(low)
    return [*places, len(tokens) - 1]
