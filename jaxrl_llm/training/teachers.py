"""Teachers: models whose log-probs of the answers the policy learns from, untrained."""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxrl_llm.config.errors import ConfigError, RowError, RunError, config_errors_at
from jaxrl_llm.config.functions import call, closest, described_failure, name_of
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ModelConfig
from jaxrl_llm.data.chat import VOCABULARIES, Message, PolicyTokens, load_policy_tokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.data.rows import naming_row
from jaxrl_llm.data.teacher_prompts import ScoredAnswer
from jaxrl_llm.data.token_bytes import (
    UNALIGNED,
    Alignment,
    Vocabulary,
    align_bytes,
    spread_logprobs,
    text_decoder,
)
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.engine import LEAST_LOGPROB, ScoredTokens
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.reshard import on_device, reshard, to_host
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.load_model import (
    Layouts,
    LoadedModel,
    forward_config,
    laid_out,
    microbatch_shape,
    read_model,
)
from jaxrl_llm.training.reward_model import token_difference
from jaxrl_llm.training.update import (
    MovingAverage,
    PolicyObjective,
    States,
    TrainableModel,
    UpdateSpec,
    top_pass,
)
from jaxrl_llm.types import ROUTES, Batch

OPEN_REASONING = re.compile(r"<think>\s*\Z")
"""The end of a prompt after which an answer begins inside its reasoning."""

ASKED = [{"role": "user", "content": "Go on."}]

TAIL_TOKENS = 16
"""Tokens of a prompt, at its end, in which that is looked for."""

Rendered = tuple[tuple[int, ...], str, str]
"""A prompt in a teacher's tokens; what the policy's prompt ends with to open the reasoning and the
teacher's lacks; and the reverse."""


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
        added = self._policy.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special}  # stand for no text
        self._vocabularies = Vocabulary(self._policy), Vocabulary(self.teacher)
        self._is_same = self._policy.get_vocab() == self.teacher.get_vocab()
        turns = TurnTemplate(self.teacher, teacher.stops, template_kwargs=template_kwargs)
        self._template = turns.template
        self._last: tuple[Prompt, Rendered] | None = None
        self._end = turns.following(ASKED, closed=False)[0]

    def __call__(self, prompt: Prompt, episode: Episode) -> TeacherSequence:
        """Write one answer in the teacher's tokens.

        Raises:
            ValueError: the prompt is no chat, or the teacher's template refuses it.
        """
        (tokens, lead, told), drawn = self._render(prompt), episode.tokens.tolist()
        if self._is_same:
            same = np.arange(len(drawn), dtype=np.int32)
            return TeacherSequence(tokens, tuple(drawn), Alignment(same, same))
        stopped = isinstance(episode.stopped_by, int)
        body = drawn[: len(drawn) - stopped]
        answer, alignment, is_whole = self._rewrite(lead, told, body)
        if stopped and is_whole:
            answer, alignment = [*answer, self._end], alignment.join()
        left_out = np.full(len(drawn) - len(alignment.left), UNALIGNED, np.int32)
        alignment = alignment._replace(left=np.concatenate([alignment.left, left_out]))
        return TeacherSequence(tokens, tuple(answer), alignment)

    def _render(self, prompt: Prompt) -> Rendered:
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
        lead = opened[0][0] if opened[0] and not opened[1] else ""
        told = opened[1][0] if opened[1] and not opened[0] else ""
        rendered = tuple(self._template.ids(wanted)), lead, told
        self._last = prompt, rendered
        return rendered

    def _rewrite(self, lead: str, told: str, drawn: list[int]) -> tuple[list[int], Alignment, bool]:
        """Encode an answer's text by the teacher's tokenizer; align; say if nothing is left out."""
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


def whole_text(data: bytes) -> str:
    """Return the text of bytes, up to the first that are no whole character.

    >>> whole_text("é".encode() + bytes([0xE4, 0xB8]))
    'é'
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


class TeacherModel(NamedTuple):
    """A loaded teacher.

    Attributes:
        params: its parameters, in the compute dtype.
        forward: how it is run.
        vocab: the tokens that it and the student have; None: all of both.
    """

    params: Params
    forward: ForwardConfig
    vocab: int | None

    def taught(self, update: UpdateSpec, shape: RowShape) -> UpdateSpec:
        """Return an update that distils, with this teacher, which it runs.

        Args:
            update: of the student.
            shape: of its micro-batches, which suits the student.
        """
        objective = update.objective
        assert isinstance(objective, PolicyObjective) and objective.distillation is not None
        forward = self.forward.over(shape)
        if shape.longest is not None:  # a kernel has its own limits; see `takes_long_rows`
            forward = dataclasses.replace(forward, kernel=None)
        how = dataclasses.replace(objective.distillation, teacher=forward, vocab=self.vocab)
        return update._replace(objective=dataclasses.replace(objective, distillation=how))


@activity("loading a teacher")
def open_teacher_model(
    path: str, config: ModelConfig, tokenizer: Any, student: Model, layout: Layout, *, longest: int
) -> TeacherModel:
    """Load a teacher in the compute dtype.

    Args:
        path: Hugging Face directory or hub id.
        config: of the student, which says how both are run.
        tokenizer: of the student; None: the teacher has another one.
        student: that learns from it.
        layout: where the teacher stands.
        longest: sequence, in tokens.

    Raises:
        ValueError: it can't be read, has no logits, or other tokens than the student.
    """
    spec = read_spec(path)
    if spec.value_head or spec.reward_head:
        raise ValueError(f"{path} ends in a value head, expected a language model")
    if spec.max_positions is not None and spec.max_positions < longest:
        raise ValueError(
            f"{path} has {spec.max_positions} positions, but the longest sequence has {longest} "
            "tokens"
        )
    spec = spec.for_length(longest)
    vocab = None if tokenizer is None else shared_tokens(path, spec, tokenizer, student)
    params: Any = read_model(path, spec, layout).params
    if config.dtype != "float32":
        params = reshard(params, layout.of(declare(spec)), dtype=compute_dtypes(spec, config.dtype))
    plain = dataclasses.replace(config, router_loss_coef=0.0)
    return TeacherModel(params, forward_config(plain, Decoder(spec), layout), vocab)


def shared_tokens(path: str, spec: ModelSpec, tokenizer: Any, student: Model) -> int | None:
    """Return how many token ids a student and its teacher have in common; None: all of both.

    Vocabularies are often padded to different sizes, as Qwen's to 151,936 and 152,064. Ids beyond
    the student's tokenizer are then left out of the distributions.

    Args:
        path: Hugging Face directory of the teacher; one without a tokenizer is believed if its
            vocabulary has the student's size.
        spec: of the teacher.
        tokenizer: of the student.
        student: that learns from it.

    Raises:
        ValueError: one of the student's tokens is another one for the teacher.
    """
    has_tokenizer = any((resolve(path) / name).is_file() for name in VOCABULARIES)
    if has_tokenizer and (difference := token_difference(path, tokenizer)):
        raise ValueError(difference)
    if spec.vocab_size == student.vocab_size:
        return None
    known = max(tokenizer.get_vocab().values()) + 1
    if not has_tokenizer or known > min(spec.vocab_size, student.vocab_size):
        reason = "" if has_tokenizer else "no tokenizer and "
        raise ValueError(
            f"{path} has {reason}vocab_size={spec.vocab_size}, expected the policy's "
            f"{student.vocab_size}, or a tokenizer that says which tokens are padding"
        )
    return known


# Teachers that are given sequences of tokens: on a server, or with a tokenizer of their own.


Fields = dict[str, np.ndarray]
Scores = Callable[[], list[ScoredTokens]]
"""Waits for the log-probs of sequences."""


def without_teacher(batch: Batch) -> Fields:
    """Return the fields of a teacher that says nothing of a batch's answers."""
    return {
        "teacher_logprobs": batch["rollout_logprobs"].astype(np.float32, copy=True),
        "teacher_mask": np.zeros(batch.tokens.shape, bool),
    }


@dataclass(frozen=True, kw_only=True)
class SequenceTeacher:
    """A teacher that is given the tokens of each answer, in its own numbers.

    Attributes:
        name: for messages.
        submit: begins to score sequences.
        retokenize: writes answers in the teacher's tokens; None: it has the policy's.
        longest: the most tokens of a sequence; None: whatever the policy draws has room.
        top: how many of the likeliest tokens it tells for each place.
        model: the teacher, where it stands in this process.
    """

    name: str
    submit: Callable[[Sequence[Sequence[int]]], Scores]
    retokenize: Retokenizer | None = None
    longest: int | None = None
    top: int = 0
    model: Any = None

    def begin(self, batch: Batch, rollouts: Rollouts) -> Callable[[], Fields]:
        """Begin to score a batch of answers; return what waits for its fields.

        `teacher_logprobs` [B T] and `teacher_mask` [B T], and with `top` also `teacher_ids` and
        `teacher_top_logprobs` [B T K]. A drawn token of which the teacher's tokens tell nothing, or
        to which it gives no probability, has the policy's own log-prob and is not in the mask.
        """
        rows = np.flatnonzero(batch["mask"].any(1)).tolist()
        sequences = [self._sequence(rollouts, row) for row in rows]
        asked = [i for i, sequence in enumerate(sequences) if sequence.answer]
        scores = self.submit([sequences[i].tokens for i in asked])

        def finish() -> Fields:
            with activity(f"waiting for {self.name}"):
                scored = scores()
            fields = without_teacher(batch)
            if self.top:
                places = (*batch.tokens.shape, self.top)
                fields["teacher_ids"] = np.zeros(places, np.int32)
                fields["teacher_top_logprobs"] = np.zeros(places, np.float32)
            for i, score in zip(asked, scored, strict=True):
                episode = rollouts.episodes[rows[i]]
                self._fill(fields, rows[i], episode, sequences[i], score)
            fields["teacher_mask"] &= batch["mask"]
            return fields

        return finish

    def _sequence(self, rollouts: Rollouts, row: int) -> TeacherSequence:
        prompt, episode = rollouts.prompts[row], rollouts.episodes[row]
        if self.retokenize is not None:
            sequence = self.retokenize(prompt, episode)
        else:
            same = np.arange(len(episode.tokens), dtype=np.int32)
            answer = tuple(episode.tokens.tolist())
            sequence = TeacherSequence(episode.prompt, answer, Alignment(same, same))
        return sequence if self.longest is None else sequence.cut(self.longest)

    def _fill(
        self,
        fields: Fields,
        row: int,
        episode: Episode,
        sequence: TeacherSequence,
        scored: ScoredTokens,
    ) -> None:
        """Write what is known of an answer into its row."""
        first = len(sequence.prompt)
        theirs = scored.logprobs[first:]
        impossible = np.unique(sequence.alignment.right[theirs <= LEAST_LOGPROB])
        alignment = sequence.alignment.without(impossible)
        places = slice(len(episode.prompt), len(episode.prompt) + len(episode.tokens))
        known = alignment.left != UNALIGNED
        spread = spread_logprobs(episode.logprobs, theirs, alignment)
        fields["teacher_logprobs"][row, places][known] = spread[known]
        fields["teacher_mask"][row, places] = known
        if self.top:
            fields["teacher_ids"][row, places] = scored.top_ids[first:]
            fields["teacher_top_logprobs"][row, places] = scored.top_logprobs[first:]


# A teacher behind a URL, and the tokens of a teacher with another tokenizer.


API_KEY_OF_TEACHER = "JAXRL_LLM_TEACHER_API_KEY"


@activity("opening a teacher")
def open_server_teacher(
    config: TrainConfig,
    url: str,
    own: str | None,
    model: str | None,
    tokens: PolicyTokens,
    stack: ExitStack,
) -> SequenceTeacher:
    """Connect to a server, and compare its tokens with those that it will be sent.

    The first process of a run asks it for all.

    Args:
        config: of the run.
        url: of its API.
        own: directory of the teacher's tokenizer; None: it has the policy's.
        model: its name there; None: the only one.
        tokens: of the policy.
        stack: closes the connection at the run's end.

    Raises:
        ConfigError: the server takes no sequence as long as the run's, or a package is missing.
        ScoringError: the server can't be reached, or its tokens are others.
    """
    if find_spec("httpx2") is None:
        raise ConfigError("teacher.url needs httpx2; pip install 'jaxrl_llm[client]'")
    from jaxrl_llm.rollout.openai_api.client import ScoringClient

    asked, top = config.teacher, config.teacher.top_k or 0
    retokenize = None if own is None else open_retokenizer(config, own, tokens)
    client = ScoringClient(
        url,
        model,
        api_key=asked.api_key or os.environ.get(API_KEY_OF_TEACHER) or None,
        concurrency=asked.concurrency,
        timeout_s=asked.timeout_s,
        retries=asked.retries,
    )
    stack.callback(client.close)
    room = distributed.run_on_first(client.open)
    longest = config.longest_sequence
    if own is not None:
        longest = longest_for_teacher(config, None if room is None else room - 1)
    elif room is not None and room < longest + 1:
        raise ConfigError(
            f"teacher.url: {url} takes {room} tokens, expected data.max_prompt_tokens + "
            f"rollout.max_new_tokens + 1 = {longest + 1} or more"
        )
    tokenizer = tokens.tokenizer if retokenize is None else retokenize.teacher

    def check() -> None:
        client.check_tokens(lambda text: tokenizer(text)["input_ids"], longest=room, top=top)

    def submit(sequences: Sequence[Sequence[int]]) -> Callable[[], list[ScoredTokens]]:
        if not distributed.is_first():
            return lambda: distributed.run_on_first(list)
        future = client.submit(sequences, top)
        return lambda: distributed.run_on_first(future.result)

    distributed.run_on_first(check)
    return SequenceTeacher(name=url, submit=submit, retokenize=retokenize, longest=longest, top=top)


def open_retokenizer(config: TrainConfig, own: str, tokens: PolicyTokens) -> Retokenizer:
    """Load a teacher's tokenizer, and build what writes the policy's answers in its tokens."""
    with config_errors_at("teacher.tokenizer"):
        return Retokenizer(tokens, load_policy_tokens(own), config.teacher.chat_template_kwargs)


def longest_for_teacher(config: TrainConfig, room: int | None) -> int:
    """Return the longest sequence of a teacher with a tokenizer of its own, in its tokens.

    Args:
        config: of the run.
        room: the longest sequence that it can be given; None where it does not say.

    Raises:
        ConfigError: more is asked for.
    """
    asked = config.teacher.max_tokens
    if asked is not None and room is not None and asked > room:
        raise ConfigError(
            f"teacher.max_tokens={asked}, but the longest sequence that it can be given has {room} "
            "tokens: by its positions, its server or batch.max_tokens_per_device"
        )
    wanted = asked or 2 * config.longest_sequence
    return wanted if room is None else min(wanted, room)


# A policy as its own teacher: with the weights that it began with, has now, or had on average.


AVERAGE = "teacher"
"""The name of the moving average among the states of a run."""

Infer = Callable[[Params, Batch], dict[str, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class PolicyTeacher:
    """A policy as its own teacher.

    Attributes:
        infer: (params, batch) -> its log-probs of each token [B T], by name.
        initial: weights that the run began with; None: it is the policy as it is now, or its
            average.
        average: the policy's moving average, which is among the run's states; None: it is another.
    """

    infer: Infer
    initial: Params | None = None
    average: MovingAverage | None = None

    def add_logprobs(self, states: States, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Return a batch with the teacher's log-probs, and how far the policy is from it."""
        params = self.initial
        if params is None:
            params = states["actor" if self.average is None else AVERAGE].params
        with on_device(params) as held:
            logprobs = self.infer(held, batch.without(ROUTES))["logprobs"]  # its routers choose
        apart = (batch["rollout_logprobs"] - logprobs)[batch["mask"]]
        mean = float(apart.mean()) if apart.size else 0.0
        metrics = {"teacher/reverse_kl": mean, "teacher/left_out": 0.0}
        return batch.add(teacher_logprobs=logprobs, teacher_mask=batch["mask"]), metrics


def open_policy_teacher(
    config: TrainConfig,
    model: LoadedModel,
    layouts: Layouts,
    infer: Infer,
    initial: Callable[[Layout, bool], Params],
) -> tuple[PolicyTeacher, TrainableModel | None]:
    """Make a policy its own teacher, with the weights that teacher.weights names.

    Args:
        config: of the run.
        model: the policy's.
        layouts: where each model stands.
        infer: the policy's pass.
        initial: (layout, whether they wait on the host) -> weights that the run begins with.

    Returns:
        The teacher, and what its moving average begins with.

    Raises:
        ConfigError: what it reads is longer than the model's positions.
    """
    layout = layouts.teacher
    infer = pass_of(config, model, layout, layouts, infer)
    if config.teacher.weights == "live":
        return PolicyTeacher(infer=infer), None
    if config.teacher.weights == "initial":
        return PolicyTeacher(infer=infer, initial=initial(layout, config.offload.teacher)), None
    placed = model
    if layout is not layouts.train:
        declared = layout.of(model.model.declare())
        placed = laid_out(model.model, reshard(model.params, declared), layout)
    average = MovingAverage(config.teacher.ema, placed.like, layout)
    return PolicyTeacher(infer=infer, average=average), TrainableModel(placed, average)


def pass_of(
    config: TrainConfig, model: LoadedModel, layout: Layout, layouts: Layouts, infer: Infer
) -> Infer:
    """Return the teacher's pass: the policy's, where it reads nothing longer, nor elsewhere."""
    longest = config.longest_teacher_sequence
    if model.model.max_positions is not None and longest > model.model.max_positions:
        raise ConfigError(
            f"the teacher's longest prompt + rollout.max_new_tokens = {longest}, but the model has "
            f"{model.model.max_positions} positions: lower teacher.max_prompt_tokens"
        )
    plain = dataclasses.replace(config.model, router_loss_coef=0.0)
    forward = forward_config(plain, model.model, layout, 1.0, model.tower, config.data.max_pixels)
    shape_for = functools.partial(
        microbatch_shape, config.batch, forward, layout, sequences=config.sequences_per_minibatch
    )
    shape = shape_for(longest=longest)
    if layout is layouts.train and shape == shape_for(longest=config.longest_sequence):
        return infer
    frozen = model.frozen
    return logprob_pass(forward.over(shape), shape, layout.mesh, ("logprobs",), frozen=frozen)


# Those of a run.


EVERYTHING = "*"
"""The data source of the only teacher."""


class TeacherError(RunError):
    """An answer that a teacher can't read."""


class UnalignedError(RunError):
    """Answers of a step of which no token can be compared with the teachers'."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher in this process.

    Attributes:
        path: Hugging Face directory that it was loaded from.
        params: in the compute dtype; on the host, where it waits there.
        infer: (params, batch) -> `logprobs` [B T] at temperature 1, and what else the batch gets.
        vocab_size: tokens that it knows.
        model: what the policy's update runs; None where it runs none.
    """

    path: str
    params: Params
    infer: Callable[[Params, Batch], dict[str, np.ndarray]]
    vocab_size: int
    model: TeacherModel | None = None

    def begin(self, batch: Batch, rollouts: Rollouts) -> Callable[[], Fields]:
        """Return what computes the fields of a batch of answers; nothing is begun."""
        del rollouts
        return functools.partial(self._fields, batch)

    def _fields(self, batch: Batch) -> Fields:
        """Return fields of a batch of answers: `teacher_logprobs`, `teacher_mask`, top tokens.

        Raises:
            TeacherError: a token is beyond the teacher's vocabulary, or it gives NaN.
        """
        results = self._infer(batch)
        logprobs = results.pop("logprobs")
        self._refuse_nan(logprobs[batch["mask"]])
        return {"teacher_logprobs": logprobs, "teacher_mask": batch["mask"], **results}

    def score(self, sequences: Sequence[Sequence[int]], longest: int) -> list[ScoredTokens]:
        """Return the log-probs of the tokens of sequences, none longer than so many tokens.

        Raises:
            TeacherError: as for answers.
        """
        if not sequences:
            return []
        tokens = np.zeros((len(sequences), longest), np.int32)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        sizes = np.array([len(sequence) for sequence in sequences], np.int32)
        logprobs = self._infer(Batch(tokens, sizes, {}))["logprobs"]
        self._refuse_nan(logprobs[np.arange(longest) < sizes[:, None]])
        return [
            ScoredTokens(row[:size], np.zeros((size, 0), np.int32), np.zeros((size, 0), np.float32))
            for row, size in zip(logprobs, sizes.tolist(), strict=True)
        ]

    def _refuse_nan(self, logprobs: np.ndarray) -> None:
        unknown = np.isnan(logprobs).sum()
        if unknown:
            raise TeacherError(
                f"teacher.path: {self.path} gave NaN as the log-probs of {unknown} of "
                f"{logprobs.size} tokens"
            )

    def _infer(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return what it says of a batch's tokens.

        Raises:
            TeacherError: a token is beyond the teacher's vocabulary.
        """
        largest = int(batch.tokens.max(initial=0))
        if largest >= self.vocab_size:
            raise TeacherError(
                f"teacher.path: an answer has token {largest}, but {self.path} knows "
                f"{self.vocab_size} tokens"
            )
        with on_device(self.params) as params:
            return self.infer(params, batch)


AnyTeacher: TypeAlias = Teacher | SequenceTeacher
"""What is called with a batch and its answers, and returns fields."""


def open_teachers(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    tokens: PolicyTokens,
    actor: Model,
    layout: Layout,
    stack: contextlib.ExitStack,
) -> "Teachers | None":
    """Load the teachers of a run by data source; one for all sources has the name `*`.

    Args:
        config: of the run.
        functions: that it names.
        tokens: of the policy.
        actor: the policy.
        layout: where the teachers stand.
        stack: closes the connections to servers at the run's end.

    Raises:
        ConfigError: there is no such model, or it does not know the policy's tokens.
        ScoringError: a server can't be reached, or does not know these tokens.
    """
    asked = config.teacher
    named = asked.url if asked.path is None else asked.path
    if not (functions.needs_teacher or functions.runs_teacher_in_update) or named is None:
        return None
    opened: dict[Any, AnyTeacher] = {}
    teachers = {}
    for source, where in ({EVERYTHING: named} if isinstance(named, str) else named).items():
        own, model = (
            value.get(source) if isinstance(value, Mapping) else value
            for value in (asked.tokenizer, asked.model)
        )
        key = where, own, model
        if key not in opened and asked.path is None:
            opened[key] = open_server_teacher(config, *key, tokens, stack)
        elif key not in opened and own is not None:
            opened[key] = open_retokenized(config, where, own, tokens, actor, layout)
        elif key not in opened:
            longest = config.longest_teacher_sequence
            with config_errors_at("teacher.path"):
                loaded = open_teacher_model(
                    where, config.model, tokens.tokenizer, actor, layout, longest=longest
                )
            teacher = as_teacher(config, where, loaded, layout, longest)
            inside = teacher.model if functions.runs_teacher_in_update else None
            opened[key] = dataclasses.replace(teacher, model=inside)
        teachers[source] = opened[key]
    return Teachers(teachers)


def open_retokenized(
    config: TrainConfig, path: str, own: str, tokens: PolicyTokens, actor: Model, layout: Layout
) -> SequenceTeacher:
    """Load a teacher that has the tokenizer of the directory `own`; see `open_teachers`."""
    retokenize = open_retokenizer(config, own, tokens)
    with config_errors_at("teacher.path"):
        model = open_teacher_model(path, config.model, None, actor, layout, longest=0)
    room = model.forward.model.max_positions
    if config.mesh.train.context == 1:
        in_row = config.batch.max_tokens_per_device
        room = in_row if room is None else min(room, in_row)
    longest = longest_for_teacher(config, room)
    teacher = as_teacher(config, path, model, layout, longest)

    def submit(sequences: Sequence[Sequence[int]]) -> Callable[[], list[ScoredTokens]]:
        return lambda: teacher.score(sequences, longest)

    return SequenceTeacher(
        name=path, submit=submit, retokenize=retokenize, longest=longest, model=teacher
    )


def as_teacher(
    config: TrainConfig, path: str, model: TeacherModel, layout: Layout, longest: int
) -> Teacher:
    """Return a loaded teacher with its pass over sequences of so many tokens.

    Raises:
        ConfigError: it has fewer tokens than teacher.top_k.
    """
    known = model.vocab or model.forward.model.vocab_size
    if (config.teacher.top_k or 0) > known:
        raise ConfigError(
            f"teacher.top_k={config.teacher.top_k}, but {path} and the policy have {known} tokens: "
            "lower it"
        )
    if config.offload.teacher:
        model = model._replace(params=to_host(model.params))
    shape = microbatch_shape(
        config.batch,
        model.forward,
        layout,
        longest=longest,
        sequences=config.sequences_per_minibatch,
    )
    forward, count = model.forward.over(shape), config.teacher.top_k
    infer = (
        logprob_pass(forward, shape, layout.mesh, ("logprobs",))
        if count is None
        else top_pass(forward, shape, layout.mesh, count=count, vocab=model.vocab)
    )
    size = model.forward.model.vocab_size
    return Teacher(path=path, params=model.params, infer=infer, vocab_size=size, model=model)


class Teachers:
    """The teachers of a run, each of the answers of its data source.

    Args:
        by_source: the teachers; one for all sources has the name `*`.
    """

    def __init__(self, by_source: Mapping[str, AnyTeacher]) -> None:
        """Nothing is asked yet."""
        self._teachers = by_source
        self._asked: dict[str, Callable[[], dict[str, np.ndarray]]] = {}

    @property
    def run_in_update(self) -> TeacherModel | None:
        """The teacher that the policy's update runs, if it runs one."""
        here = (teacher for teacher in self._teachers.values() if isinstance(teacher, Teacher))
        return next((teacher.model for teacher in here if teacher.model), None)

    @property
    def held_params(self) -> dict[str, Params]:
        """The weights of those in this process, by their keys."""
        models = [t.model if isinstance(t, SequenceTeacher) else t for t in self._teachers.values()]
        return {
            f"teacher.path: {model.path}": model.params for model in models if model is not None
        }

    def begin(self, batch: Batch, rollouts: Rollouts) -> None:
        """Ask the servers, which answer while other models are run."""
        self._asked = {
            source: teacher.begin(batch.take(rows), rollouts.take(rows.tolist()))
            for source, teacher, rows in self._shares(rollouts)
            if isinstance(teacher, SequenceTeacher)
        }

    def add_logprobs(self, batch: Batch, rollouts: Rollouts) -> tuple[Batch, dict[str, float]]:
        """Return the batch with the teachers' fields, and how far the policy is from them.

        Raises:
            UnalignedError: the teachers tell nothing of any token. One of several may, in a step.
        """
        fields: dict[str, np.ndarray] = {}
        metrics = {}
        for source, teacher, rows in self._shares(rollouts):
            part = batch.take(rows)
            asked = self._asked.pop(source, None)
            results = (asked or teacher.begin(part, rollouts.take(rows.tolist())))()
            for name, values in results.items():
                empty = np.zeros((len(batch.tokens), *values.shape[1:]), values.dtype)
                fields.setdefault(name, empty)[rows] = values
            if source != EVERYTHING and results["teacher_mask"].any():
                metrics[f"teacher/reverse_kl/{source}"] = mean_apart(part.add(**results))
        batch = batch.add(**fields)
        metrics["teacher/reverse_kl"] = mean_apart(batch)
        told = batch["teacher_mask"][batch["mask"]]
        if told.size and not told.any():
            names = {t.name for t in self._teachers.values() if isinstance(t, SequenceTeacher)}
            raise UnalignedError(
                f"{', '.join(sorted(names))}: not one of {told.size} tokens of the answers can be "
                "compared with the teacher's tokens (teacher.tokenizer)"
            )
        metrics["teacher/left_out"] = float(1 - told.mean()) if told.size else 0.0
        return batch, metrics

    def _shares(self, rollouts: Rollouts) -> Iterator[tuple[str, AnyTeacher, np.ndarray]]:
        sources = np.array([prompt.data_source for prompt in rollouts.prompts], object)
        for source, teacher in self._teachers.items():
            rows = np.flatnonzero((sources == source) | (source == EVERYTHING))
            if rows.size:
                yield source, teacher, rows


def mean_apart(batch: Batch) -> float:
    """Return the mean of log π − log π_T over the tokens that the teachers tell of."""
    apart = batch["rollout_logprobs"] - batch["teacher_logprobs"]
    told = apart[batch["teacher_mask"]]
    return float(told.mean()) if told.size else 0.0


def check_teacher_sources(config: TrainConfig, sources: Iterable[str]) -> None:
    """Refuse data sources that have no teacher, and what is said of none, before any is loaded."""
    key = "url" if config.teacher.path is None else "path"
    paths = getattr(config.teacher, key)
    of_it = {"tokenizer": config.teacher.tokenizer, "model": config.teacher.model}
    for name, value in of_it.items():
        for source in value if isinstance(value, dict) else ():
            if not isinstance(paths, dict):
                raise ConfigError(
                    f"teacher.{name} names data_source {source!r}, but teacher.{key} is one "
                    f"teacher for all: give both one value, or both a mapping, got {paths!r}"
                )
            if source not in paths:
                raise ConfigError(
                    f"teacher.{name}: teacher.{key} has no data_source {source!r}; "
                    + closest(source, paths)
                )
    if not isinstance(paths, dict):
        return
    for source in sorted(set(sources)):
        if source not in paths:
            raise ConfigError(
                f"teacher.{key} has no teacher for data_source {source!r} of data.train; "
                + closest(source, paths)
            )


class TeacherPromptError(RunError):
    """A function that gives no prompt for a teacher, or only such as are too long."""


@dataclass(frozen=True, kw_only=True)
class TeacherPrompts:
    """Puts the prompts that a teacher reads before a step's answers.

    Attributes:
        function: writes the messages of a prompt; asks for some of `data.teacher_prompts.TOLD`.
        encode: messages -> token ids.
        samples: answers to each prompt.
        max_prompt_tokens: the longest prompt.
        max_tokens: the longest prompt and answer.
    """

    function: Callable[..., Any]
    encode: Callable[..., Sequence[int]]
    samples: int
    max_prompt_tokens: int
    max_tokens: int

    def __call__(
        self, batch: Batch, rollouts: Rollouts, scores: Sequence[Score]
    ) -> tuple[list[int], Rollouts, dict[str, float]]:
        """Return which answers have a teacher, these with its prompts, and how many have none.

        Args:
            batch: a step's answers; only usable ones get a teacher.
            rollouts: the same.
            scores: of them.

        Raises:
            TeacherPromptError: the function failed, or all its prompts are too long.
        """
        usable = np.flatnonzero(batch["mask"].any(1)).tolist()
        rows, prompts, episodes, too_long, last = [], [], [], 0, None
        for row in usable:
            messages = self._written(batch, rollouts, scores, row)
            if messages is None:
                continue
            if last is None or last[0] != messages:  # answers to one prompt often share it
                last = messages, self._encoded(messages, rollouts.prompts[row])
            if len(last[1]) > self.max_prompt_tokens:
                too_long += 1
                continue
            rows.append(row)
            prompts.append(
                dataclasses.replace(rollouts.prompts[row], tokens=last[1], messages=messages)
            )
            episodes.append(dataclasses.replace(rollouts.episodes[row], prompt=last[1]))
        if too_long and not rows:
            raise TeacherPromptError(
                f"teacher.prompt: each of the {too_long} prompts of a step is longer than "
                f"{self.max_prompt_tokens} tokens, so that nothing is learned from the teacher: "
                "raise teacher.max_prompt_tokens"
            )
        left = len(usable) - len(rows) - too_long
        metrics = {"teacher/no_prompt": float(left), "teacher/too_long": float(too_long)}
        prompted = rollouts.take(rows)._replace(prompts=prompts, episodes=episodes)
        return rows, prompted, metrics

    def _written(
        self, batch: Batch, rollouts: Rollouts, scores: Sequence[Score], row: int
    ) -> list[Message] | None:
        """Return the messages for one answer; None where it has no teacher."""
        prompt, first = rollouts.prompts[row], row // self.samples * self.samples
        others = (i for i in range(first, first + self.samples) if i != row)
        told = {
            "messages": [dict(message) for message in prompt.messages],
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "text": rollouts.texts[row],
            "score": scores[row].score,
            "feedback": scores[row].extra,
            "siblings": [
                ScoredAnswer(rollouts.texts[i], scores[i].score, scores[i].extra)
                for i in others
                if batch["usable"][i] and scores[i].error is None
            ],
        }
        try:
            messages = call(self.function, told)
        except Exception as error:
            raise TeacherPromptError(
                f"teacher.prompt: {name_of(self.function)!r} failed on an answer to row "
                f"{prompt.index}: {described_failure(error, self.function)}"
            ) from error
        if messages is None or _is_chat(messages):
            return messages
        raise TeacherPromptError(
            f"teacher.prompt: {name_of(self.function)!r} returned {messages!r:.200}, expected "
            "messages, each with role and content, or None"
        )

    def _encoded(self, messages: Sequence[Message], prompt: Prompt) -> tuple[int, ...]:
        tools = {"tools": prompt.tools} if prompt.tools else {}
        try:
            with naming_row(f"an answer to row {prompt.index}", prompt.index):
                return tuple(self.encode(messages, **tools))
        except RowError as error:
            raise TeacherPromptError(f"teacher.prompt: {error}") from error


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages)
    )


def add_prompted_logprobs(
    batch: Batch,
    rollouts: Rollouts,
    scores: Sequence[Score],
    prompts: TeacherPrompts,
    add: Callable[[Batch, Rollouts], tuple[Batch, dict[str, float]]],
) -> tuple[Batch, dict[str, float]]:
    """Return a batch with what a teacher says of its answers behind other prompts; and metrics.

    A token without a teacher has the policy's own log-prob as `teacher_logprobs`, so that it is no
    further from the teacher than 0, and `teacher_mask` is false there.

    Args:
        batch: of a step.
        rollouts: of the step.
        scores: of the answers.
        prompts: that the teacher reads.
        add: adds its log-probs to any batch of answers.
    """
    rows, prompted, metrics = prompts(batch, rollouts, scores)
    fields = without_teacher(batch)
    if not rows:
        metrics["teacher/reverse_kl"] = 0.0
    else:
        laid_out = lay_out(prompted, samples=1, max_tokens=prompts.max_tokens, compares=False)
        told, more = add(laid_out, prompted)
        metrics |= more
        for name in (name for name in told.fields if name.startswith("teacher_")):
            empty = np.zeros((*batch.tokens.shape, *told[name].shape[2:]), told[name].dtype)
            values = fields.setdefault(name, empty)
            for place, row in enumerate(rows):
                size, episode = len(rollouts.episodes[row].tokens), prompted.episodes[place]
                here, there = len(rollouts.episodes[row].prompt), len(episode.prompt)
                values[row, here : here + size] = told[name][place, there : there + size]
    batch = batch.add(**fields)
    metrics["teacher/left_out"] = 1 - float(batch["teacher_mask"][batch["mask"]].mean())
    return batch, metrics
