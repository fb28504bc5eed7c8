"""How a reward model is given prompts and answers: the policy's tokens, or its own of the text."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.chat_template import ChatTemplate, Message
from jaxrl_llm.data.steps import encode_steps, last_tokens, split_steps
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.types import Batch


class ScorerInput(NamedTuple):
    """A prompt and an answer, as a reward model reads them.

    Attributes:
        tokens: of both.
        step_ends: index in `tokens` of each step's last one, for a process reward model.
        drawn_ends: index among the policy's tokens of each step's last one.
    """

    tokens: tuple[int, ...]
    step_ends: tuple[int, ...] = ()
    drawn_ends: tuple[int, ...] = ()


class Unreadable(Exception):
    """An answer that a reward model can't be given; the message says why."""


Encode = Callable[[Rollouts, int], ScorerInput]
"""(rollouts, row) -> what a reward model reads of it; raises Unreadable."""


def policy_tokens(rollouts: Rollouts, row: int) -> ScorerInput:
    """Return the tokens as they were read and drawn, the one that stopped the answer included.

    Of several chains they are those of the one that drew last.
    """
    episode = rollouts.episodes[row].last_chain
    return ScorerInput((*episode.prompt, *map(int, episode.tokens)))


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts with a reward model's own tokenizer and chat template.

    Attributes:
        tokenizer: the reward model's.
        template_kwargs: variables of its chat template.
    """

    tokenizer: Any
    template_kwargs: Mapping[str, Any]

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The reward model's chat template."""
        return ChatTemplate(self.tokenizer, self.template_kwargs)

    def answer(self, rollouts: Rollouts, row: int) -> ScorerInput:
        """Encode as `data.preferences` does: the prompt, and the answer to its closing token."""
        messages = self._shown(whole_chat(rollouts, row))
        with unreadable():
            prompt, answer = self.template.answer(messages, rollouts.prompts[row].tools)
        return ScorerInput((*prompt, *answer))

    def chat(self, rollouts: Rollouts, row: int) -> ScorerInput:
        """Encode the chat as the template has it, with the answer as the assistant's message."""
        messages = self._shown(whole_chat(rollouts, row))
        with unreadable():
            return ScorerInput(tuple(self.template.chat(messages, rollouts.prompts[row].tools)))

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return a chat whose last answer has its reasoning in its text, if need be."""
        last = messages[-1]
        reasoning, content = last.get("reasoning_content"), last.get("content") or ""
        if not reasoning or self.template.shows_reasoning:
            return list(messages)
        last = {key: value for key, value in last.items() if key != "reasoning_content"}
        return [*messages[:-1], {**last, "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}]


@dataclass(frozen=True)
class StepEncoder(TextEncoder):
    """Encodes the steps of answers for a process reward model, as `data.preferences` does.

    Attributes:
        separator: that the model was trained with.
        splits_at: text that ends a step of an answer.
        decode: from the policy's tokens to their text.
    """

    _: KW_ONLY
    separator: str
    splits_at: str
    decode: Callable[[Sequence[int]], str]

    def steps(self, rollouts: Rollouts, row: int) -> ScorerInput:
        """Encode the templated prompt, and each step with the separator behind it."""
        prompt = whole_chat(rollouts, row)[:-1]
        steps = split_steps(rollouts.texts[row], self.splits_at)
        with unreadable():
            begin = self.template.prompt(prompt, rollouts.prompts[row].tools)
        tokens, ends = encode_steps(self.tokenizer, [text for text, _ in steps], self.separator)
        drawn = rollouts.episodes[row].last_chain.tokens.tolist()
        places = last_tokens(self.decode, drawn, [end for _, end in steps])
        return ScorerInput(
            (*begin, *tokens), tuple(len(begin) + end for end in ends), tuple(places)
        )


def whole_chat(rollouts: Rollouts, row: int) -> list[Message]:
    """Return the messages of a prompt and what followed it.

    Raises:
        Unreadable: the prompt was given as tokens.
    """
    episode, messages = rollouts.episodes[row], rollouts.prompts[row].messages
    if episode.messages:
        return list(episode.messages)
    if not messages:
        raise Unreadable("its prompt has no messages, only tokens")
    return [*messages, {"role": "assistant", "content": rollouts.texts[row]}]


@contextlib.contextmanager
def unreadable() -> Iterator[None]:
    """Say why a chat template refuses a chat."""
    try:
        yield
    except ValueError as error:
        raise Unreadable(str(error)) from error


class ScorerBatch(NamedTuple):
    """Prompts and answers as a reward model reads them, and those that it can't be given.

    Attributes:
        batch: of all; what can't be read is one token.
        inputs: of each; None of what can't be read.
        failures: why it can't, by row.
    """

    batch: Batch
    inputs: list[ScorerInput | None]
    failures: dict[int, str]


def scorer_batch(rollouts: Rollouts, encode: Encode, width: int) -> ScorerBatch:
    """Encode prompts and answers, and lay them out side by side.

    Args:
        rollouts: B answers.
        encode: one of them.
        width: the most tokens of a sequence.
    """
    count = len(rollouts.prompts)
    tokens, sizes = np.zeros((count, width), np.int32), np.ones(count, np.int32)
    inputs: list[ScorerInput | None] = [None] * count
    failures = {}
    for row in range(count):
        try:
            given = encode(rollouts, row)
        except Unreadable as error:
            failures[row] = str(error)
            continue
        if len(given.tokens) > width:
            failures[row] = (
                f"{len(given.tokens)} tokens of the reward model, more than its {width}: raise "
                "reward.max_tokens"
            )
            continue
        inputs[row], sizes[row] = given, len(given.tokens)
        tokens[row, : sizes[row]] = given.tokens
    return ScorerBatch(Batch(tokens, sizes, {}), inputs, failures)
