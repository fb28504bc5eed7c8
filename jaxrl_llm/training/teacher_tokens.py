"""A policy's answers in the tokens of a teacher that has another tokenizer, or another template."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.token_bytes import UNALIGNED, Alignment, Vocabulary, align_bytes, text_decoder
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.rollout.rollouts import Episode

OPEN_REASONING = re.compile(r"<think>\s*\Z")
"""The end of a prompt after which an answer begins inside its reasoning."""

ASKED = [{"role": "user", "content": "Go on."}]

TAIL_TOKENS = 16
"""Tokens of a prompt, at its end, in which that is looked for."""


class TeacherSequence(NamedTuple):
    """A prompt and an answer in a teacher's tokens.

    Attributes:
        prompt: token ids.
        answer: token ids.
        alignment: of the tokens that the policy drew with those of `answer`.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    alignment: Alignment

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return prompt and answer."""
        return (*self.prompt, *self.answer)

    def cut(self, longest: int) -> "TeacherSequence":
        """Return as much of it as so many tokens hold; spans that are cut are taken away.

        A prompt that leaves no room is left alone, without an answer.
        """
        room = max(0, longest - len(self.prompt))
        if len(self.answer) <= room:
            return self
        kept = self.alignment.without(np.unique(self.alignment.right[room:]))
        return TeacherSequence(
            self.prompt, self.answer[:room], kept._replace(right=kept.right[:room])
        )


class Retokenizer:
    """Writes plain answers in a teacher's tokens.

    The prompt is rendered from its messages by the teacher's own chat template. The text of the
    answer is encoded by its tokenizer, and the token that ended the answer becomes the one with
    which the teacher's template ends a turn. Where both tokenizers have the same vocabulary, the
    answer keeps the tokens that were drawn.

    Other special tokens are no text: what follows one has no tokens of the teacher's that it could
    be compared with. Neither has a character that was cut, or one that the teacher's tokenizer
    writes otherwise, and all that follows.

    Args:
        policy: tokenizer and stop tokens of the policy.
        teacher: those of the teacher.
        template_kwargs: variables of the teacher's chat template.

    Attributes:
        teacher: its tokenizer.

    Raises:
        ValueError: the teacher's tokenizer has no chat template that ends a turn.
    """

    def __init__(
        self,
        policy: PolicyTokens,
        teacher: PolicyTokens,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Find out how the teacher's template ends a turn."""
        self._policy, self.teacher = policy.tokenizer, teacher.tokenizer
        self._special = special_tokens(self._policy)
        self._vocabularies = Vocabulary(self._policy), Vocabulary(self.teacher)
        self._is_same = self._policy.get_vocab() == self.teacher.get_vocab()
        turns = TurnTemplate(self.teacher, teacher.stops, template_kwargs=template_kwargs)
        self._template = turns.template
        self._last: tuple[Prompt, _Rendered] | None = None
        self._end = turns.following(ASKED, closed=False)[0]

    def __call__(self, prompt: Prompt, episode: Episode) -> TeacherSequence:
        """Write one answer in the teacher's tokens.

        Raises:
            ValueError: the prompt is no chat, or the teacher's template refuses it.
        """
        rendered, drawn = self._render(prompt), episode.tokens.tolist()
        if self._is_same:
            same = np.arange(len(drawn), dtype=np.int32)
            return TeacherSequence(rendered.tokens, tuple(drawn), Alignment(same, same))
        stopped = isinstance(episode.stopped_by, int)
        body = drawn[: len(drawn) - stopped]
        answer, alignment, is_whole = self._rewrite(rendered, body)
        if stopped and is_whole:
            answer, alignment = [*answer, self._end], alignment.join()
        left_out = np.full(len(drawn) - len(alignment.left), UNALIGNED, np.int32)
        alignment = alignment._replace(left=np.concatenate([alignment.left, left_out]))
        return TeacherSequence(rendered.tokens, tuple(answer), alignment)

    def _render(self, prompt: Prompt) -> "_Rendered":
        """Render a prompt by the teacher's template; answers to one prompt lie side by side."""
        if self._last is not None and self._last[0] is prompt:
            return self._last[1]
        if not prompt.messages:
            raise ValueError(
                f"prompt {prompt.index} is given as token ids: a teacher with another tokenizer "
                "needs its messages"
            )
        decode = text_decoder(self._policy, skip_special_tokens=False)
        given = decode(prompt.tokens[-TAIL_TOKENS:])
        wanted = self._template.prompt_text(prompt.messages, prompt.tools)
        opened = [OPEN_REASONING.search(text) for text in (given, wanted)]
        rendered = _Rendered(
            tuple(self._template.ids(wanted)),
            opened[0][0] if opened[0] and not opened[1] else "",
            opened[1][0] if opened[1] and not opened[0] else "",
        )
        self._last = prompt, rendered
        return rendered

    def _rewrite(
        self, rendered: "_Rendered", drawn: list[int]
    ) -> tuple[list[int], Alignment, bool]:
        """Encode an answer's text by the teacher's tokenizer; align; say if nothing is left out."""
        _, lead, told = rendered
        plain = next((i for i, token in enumerate(drawn) if token in self._special), len(drawn))
        pieces = self._pieces(0, drawn[:plain])
        data = b"".join(pieces)
        text = whole_text(data)
        if not text.startswith(told):  # the teacher would read the answer as reasoning
            return [], Alignment(np.full(plain, UNALIGNED, np.int32), np.zeros(0, np.int32)), False
        answer = self._encode((lead + text)[len(told) :])
        given = [[lead.encode(), *pieces], [told.encode(), *self._pieces(1, answer)]]
        alignment = align_bytes(*given)
        if lead or told:  # nobody drew the first span
            alignment = alignment.without(np.zeros(1, np.int32))
        alignment = Alignment(alignment.left[1:], alignment.right[1:])
        return answer, alignment, plain == len(drawn) and len(text.encode()) == len(data)

    def _encode(self, text: str) -> list[int]:
        """Encode a text; what looks like a special token in it is none."""
        encoded = self.teacher(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded["input_ids"]) if text else []

    def _pieces(self, side: int, tokens: Sequence[int]) -> list[bytes]:
        """Return what each token of a text stands for; a text may lose its first space."""
        pieces = [self._vocabularies[side].bytes_of(token) for token in tokens]
        if pieces and pieces[0].startswith(b" "):
            tokenizer = (self._policy, self.teacher)[side]
            first = text_decoder(tokenizer, skip_special_tokens=False)(tokens[:1])
            if f" {first}".encode() == pieces[0]:
                pieces[0] = pieces[0][1:]
        return pieces


class _Rendered(NamedTuple):
    """A prompt in a teacher's tokens, and how the two templates open the reasoning.

    `lead` is what the policy's prompt ends with and the teacher's lacks, `told` the reverse.
    """

    tokens: tuple[int, ...]
    lead: str
    told: str


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids that stand for no text, such as that of the end of a turn."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(number for number, token in added if token.special)


def whole_text(data: bytes) -> str:
    """Return the text of bytes, up to the first that are no whole character.

    >>> whole_text("é".encode() + bytes([0xE4, 0xB8]))
    'é'
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
