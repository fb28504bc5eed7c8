"""The chat that an agent holds with the policy: it writes one episode, token by token."""

import asyncio
import copy
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from PIL import Image

from jaxrl_llm.data.call_formats import ToolCall, count_common
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.data.turns import Answer, TurnTemplate
from jaxrl_llm.data.visuals.pictures import PictureError
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.models.inputs import Visual
from jaxrl_llm.rollout.engine import Completion, EpisodeLimits, Request, SamplingParams
from jaxrl_llm.rollout.rollouts import Episode, ToolRecord, turn_seed
from jaxrl_llm.rollout.tools.session import Session, ToolResult
from jaxrl_llm.workers.values import finite_number, short_repr

# What the messages of an episode hold: texts that are cut, images and videos that are read once.
#
# A message shows an image by a part `{"type": "image", "key": …}`, a video by one of the type
# `video`: the key is that of its `Visual` in hexadecimal digits, so that messages stay plain and
# short. What others tell has the picture itself in the part, as `{"type": "image", "image": …}`.

CUT = " ... "
IMAGES_SHARE = "a sequence's share of batch.max_visual_tokens_per_device"


class BrokenEpisode(Exception):
    """An episode that failed for no fault of the policy's."""


class Stretch(NamedTuple):
    """Tokens that are told together.

    Attributes:
        tokens: token ids.
        visuals: images and videos whose placeholders they hold, in order.
    """

    tokens: tuple[int, ...] = ()
    visuals: tuple[Visual, ...] = ()

    @property
    def visual_tokens(self) -> int:
        """Return how many of the tokens stand for images and videos."""
        return sum(visual.tokens for visual in self.visuals)

    def beyond(self, stream: "Stretch", tokenizer: Any) -> "Stretch":
        """Return what a stream, with which this begins, does not have yet.

        Raises:
            BrokenEpisode: it begins otherwise.
        """
        same = count_common(self.tokens, stream.tokens)
        if same < len(stream.tokens):
            got, own = (tokenizer.decode(s.tokens[same : same + 8]) for s in (self, stream))
            raise BrokenEpisode(
                f"chat.generate_after: got {len(self.tokens)} tokens that differ from the stream "
                f"of {len(stream.tokens)} from token {same} on: {got!r}, expected {own!r}"
            )
        shown = count_common(*([visual.key for visual in s.visuals] for s in (self, stream)))
        if shown < len(stream.visuals):
            raise BrokenEpisode(
                f"chat.generate_after: got {len(self.visuals)} images and videos, of which the "
                f"first {shown} are those of the stream; expected all of its "
                f"{len(stream.visuals)}, and new ones behind them"
            )
        return Stretch(self.tokens[same:], self.visuals[shown:])


def check_prompt(prompt: Stretch, limits: EpisodeLimits, part: str) -> None:
    """Refuse a prompt that has no room in an episode.

    Args:
        prompt: its tokens, images and videos.
        limits: of the episode.
        part: what of it is counted, for messages.

    Raises:
        BrokenEpisode: its tokens, or those of its images and videos, are too many.
    """
    bounded = (
        ("tokens", len(prompt.tokens), limits.prompt_tokens, "data.max_prompt_tokens"),
        ("tokens of images and videos", prompt.visual_tokens, limits.visual_tokens, IMAGES_SHARE),
    )
    for counted, count, most, key in bounded:
        if most is not None and count > most:
            raise BrokenEpisode(
                f"the prompt has {count} {counted} {part}, expected at most {most} ({key})"
            )


class MessageContents:
    """Reads the contents of one episode's messages.

    Args:
        tokenizer: the policy's.
        processor: of images and videos; None: the policy reads text alone.
    """

    def __init__(self, tokenizer: Any, processor: VisualProcessor | None = None) -> None:
        """Know no image yet."""
        self._tokenizer, self.processor = tokenizer, processor
        self._known: dict[str, Visual] = {}

    def named(
        self, messages: Sequence[Mapping[str, Any]], visuals: Sequence[Visual]
    ) -> list[dict[str, Any]]:
        """Return messages whose parts name the images and videos that they show.

        Args:
            messages: with parts that show something, in the order of the visuals.
            visuals: one for each such part.

        Raises:
            BrokenEpisode: there are more or fewer parts.
        """
        parts = sum(1 for _ in shown_parts(messages))
        if parts != len(visuals):
            raise BrokenEpisode(
                f"got {len(visuals)} images and videos for {parts} parts of messages that show "
                "one, expected as many"
            )
        self._known |= {visual.key.hex(): visual for visual in visuals}
        left = iter(visuals)

        def name(part: Any) -> Any:
            return {"type": part["type"], "key": next(left).key.hex()} if is_shown(part) else part

        return [_with_parts(message, name) for message in messages]

    def take(self, message: Mapping[str, Any], limit: int) -> dict[str, Any]:
        """Return a message as it is told: its images read, its texts cut.

        Args:
            message: with `content`: a text, or parts of text, images and videos.
            limit: tokens of images, videos and texts together; images are never cut.

        Raises:
            BrokenEpisode: the policy reads no images, one can't be read, or they have more tokens.
        """
        parts = message["content"]
        if not isinstance(parts, list) or not any(map(is_shown, parts)):
            several = isinstance(parts, list)
            text = "\n".join(str(part["text"]) for part in parts) if several else str(parts)
            return {**message, "content": self._cut(text, limit)}
        told = _with_parts(message, self._read)
        left = limit - sum(visual.tokens for visual in self.visuals([told]))
        if left < 0:
            raise BrokenEpisode(
                f"the images of a message have {limit - left} tokens, expected at most {limit} "
                "(rollout.limits.observation_tokens); a lower data.max_pixels makes them smaller"
            )
        texts = sum(not is_shown(part) for part in parts)

        def cut(part: Any) -> Any:
            if is_shown(part):
                return part
            return {"type": "text", "text": self._cut(str(part["text"]), left // texts)}

        return _with_parts(told, cut)

    async def ready(self, content: Any) -> Any:
        """Return a message's content with its images read, in another thread: that takes a while.

        Args:
            content: a text, or parts.

        Raises:
            BrokenEpisode: as for `take`.
        """
        if not isinstance(content, list):
            return content
        return await asyncio.to_thread(lambda: [self._read(part) for part in content])

    def visuals(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Visual, ...]:
        """Return the images and videos that messages show.

        Raises:
            BrokenEpisode: one of them was never told in this episode.
        """
        keys = [str(part.get("key")) for part in shown_parts(messages)]
        if unknown := [key for key in keys if key not in self._known]:
            raise BrokenEpisode(
                f"a message shows an image by the key {unknown[0]!r}, expected one of those that "
                "the episode's messages have shown"
            )
        return tuple(self._known[key] for key in keys)

    def told(self, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> Stretch:
        """Return what a template has written for messages, with the tokens of their images."""
        visuals = self.visuals(messages)
        return Stretch(tuple(self.expand(tokens, visuals)), visuals)

    def expand(self, tokens: Sequence[int], visuals: Sequence[Visual]) -> list[int]:
        """Return token ids with the tokens of the visuals in place of their placeholders.

        Raises:
            BrokenEpisode: the chat template has written more or fewer placeholders.
        """
        if self.processor is None:
            return list(tokens)
        try:
            return list(self.processor.placeholders.expand(tokens, visuals, self._tokenizer))
        except ValueError as error:
            raise BrokenEpisode(f"chat template: {error}") from error

    def _cut(self, text: str, tokens: int) -> str:
        """Return a text of at most so many tokens, its middle left out."""
        if len(text) <= tokens:  # a token has a character at least
            return text
        ids = self._ids(text)
        if len(ids) <= tokens:
            return text
        head, tail = tokens // 2, tokens - tokens // 2 - len(self._ids(CUT))
        decode = functools.partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        return decode(ids[:tokens]) if tail < 1 else decode(ids[:head]) + CUT + decode(ids[-tail:])

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def read(self, kind: str, source: Any) -> Visual:
        """Return an image or a video, which messages may show by its key from now on.

        Args:
            kind: `image` or `video`.
            source: in a form of `data.visuals`, but that of a path.

        Raises:
            BrokenEpisode: it can't be used, or the policy reads none.
        """
        shown = "an image" if kind == "image" else f"a {kind}"
        if self.processor is None:
            raise BrokenEpisode(
                f"a message shows {shown}, but the policy reads text alone: set model.vision, or "
                "let the agent, tool or environment tell a text"
            )
        try:
            read = self.processor.video if kind == "video" else self.processor.image
            visual = read(source)
        except PictureError as error:
            raise BrokenEpisode(f"a message shows {shown} that can't be used: {error}") from error
        self._known[visual.key.hex()] = visual
        return visual

    def with_pictures(
        self, messages: Sequence[Mapping[str, Any]], show: Callable[[Image.Image], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return messages with other parts in place of those that name images.

        Args:
            messages: of the chat.
            show: (image, as it was resized) -> the part.

        Raises:
            BrokenEpisode: one shows a video.
        """

        def shown(part: Any) -> Any:
            if not is_shown(part):
                return part
            (visual,) = self.visuals([{"content": [part]}])
            if visual.is_video or self.processor is None:
                raise BrokenEpisode("a message shows a video, expected images alone for this agent")
            return show(Image.fromarray(self.processor.pixels(visual)[0]))

        return [_with_parts(message, shown) for message in messages]

    def _read(self, part: Any) -> Any:
        """Return a part that names its image in place of holding it."""
        if not is_shown(part) or "key" in part:
            return part
        visual = self.read(part["type"], part.get(part["type"]))
        return {"type": part["type"], "key": visual.key.hex()}


def is_shown(part: Any) -> bool:
    """Tell whether a part of a message shows an image or a video.

    >>> is_shown({"type": "image"}), is_shown({"type": "text", "text": "Hi"})
    (True, False)
    """
    return isinstance(part, Mapping) and part.get("type") in ("image", "video")


def shown_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of messages that show something, in order."""
    for message in messages:
        content = message.get("content")
        yield from filter(is_shown, content if isinstance(content, list) else ())


def _with_parts(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = {"content": [change(part) for part in content]} if isinstance(content, list) else {}
    return {**message, **parts}


ChainTurn = tuple[Stretch, Completion, str, Sequence[dict[str, Any]]]
"""What is told before a turn, the turn, its text, and the messages of both."""


@dataclass(eq=False)
class EpisodeLog:
    """The record of an episode while it is held, shared by its chats.

    Attributes:
        opening: token ids before the first turn, and their images; None before it.
        pieces: what follows, in order, of all chains.
        rewards: of each turn.
        last: the last turn, as it was sampled.
        last_answer: its text.
        chats: the messages of each chain, by number; they grow.
        routes: of each chain, by number, as `Episode.routes`.
        newest: number of the chain that has drawn the last turn.
        end: why no further turn is drawn; "" before.
        is_generating: whether a turn is being drawn.
        tool_records: of each call, in order.
        score: what the environment returned, if there is one.
    """

    opening: Stretch | None = None
    pieces: list[Completion] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    last: Completion | None = None
    last_answer: str = ""
    chats: list[list[dict[str, Any]]] = field(default_factory=list)
    routes: list[Int[np.ndarray, "_ M experts"] | None] = field(default_factory=list)
    newest: int = 0
    end: str = ""
    is_generating: bool = False
    tool_records: list[ToolRecord] = field(default_factory=list)
    score: float | None = None

    def begin_chain(self, opening: Stretch, messages: list[dict[str, Any]]) -> int:
        """Note that a chain draws its first turn; return its number.

        Args:
            opening: its prompt, which the first chain has before the episode's first turn.
            messages: of the chain; what is added to them is the episode's.
        """
        number = len(self.chats)
        if self.opening is None:
            self.opening = opening
        else:
            self.pieces.append(Completion.told(opening.tokens, number, opening.visuals))
        self.chats.append(messages)
        self.routes.append(None)
        return number

    def end_turn(self, chain: int, completion: Completion, answer: str) -> None:
        """Note a turn that is drawn.

        Args:
            chain: number of the chain that drew it.
            completion: as it was sampled.
            answer: its text.
        """
        self.rewards.append(0.0)
        known, recorded = self.routes[chain], completion.routes
        if known is not None and recorded is not None:  # tokens keep what they were drawn with
            recorded = np.concatenate([known, recorded[len(known) :]])
        self.routes[chain] = recorded
        self.newest, self.last, self.last_answer = chain, completion, answer


Generate = Callable[[Request], Awaitable[Completion]]
"""Samples one turn; in `lockstep` order together with those of other episodes."""


class EpisodeEnd(Exception):
    """Ends an episode from within; `reason` is its `finish`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Chat:
    """One episode as its agent sees it, or one of its chains.

    The policy's turns are drawn by `generate`; what others say is added by `append`, and becomes
    tokens when the next turn is drawn. Nothing that was drawn is ever encoded again: an agent that
    wants another history begins a new chain with `new`.

    Args:
        prompt: the row that it is about.
        template: of the tokenizer.
        generate: samples one turn.
        sampling: how, the number of tokens aside.
        limits: of the episode.
        seed: of the episode; that of a plain answer.
        contents: reads what messages hold besides text.
    """

    def __init__(
        self,
        prompt: Prompt,
        template: TurnTemplate,
        generate: Generate,
        sampling: SamplingParams,
        limits: EpisodeLimits,
        *,
        seed: int,
        contents: MessageContents,
    ) -> None:
        """Begin with the prompt; nothing is drawn yet."""
        messages = contents.named(prompt.messages, prompt.visuals if prompt.messages else ())
        self.prompt = replace(prompt, messages=messages)
        self.limits, self.sampling, self.seed = limits, sampling, seed
        self._template, self._generate, self.contents = template, generate, contents
        self._log, self._is_first = EpisodeLog(), True
        self._begin(messages)

    def _begin(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._opening: Stretch | None = None
        self._pieces: list[Completion] = []
        self._messages: list[dict[str, Any]] = [dict(m) for m in messages]
        self._pending: list[dict[str, Any]] = []
        self._last: Answer | None = None
        self._stopped_by: int | str | None = None
        self._number: int | None = None

    def new(self, messages: Sequence[Mapping[str, Any]] | str = ()) -> "Chat":
        """Begin another chain of this episode: the policy reads these messages and nothing else.

        So an agent shortens its history, or asks a sub-agent. Turns, rewards and the end are the
        episode's; tokens that a chain repeats are part of its prompt, and are not trained again.
        Each chain has the tokens of `limits` to itself. One turn is drawn at a time.

        Args:
            messages: of the chain; a text is a user's message. None: `generate_after` says which
                tokens it begins with.

        Returns:
            The chat of the chain; this one may go on, too.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        chain = copy.copy(self)
        chain._is_first = False
        chain._begin(messages)
        return chain

    @property
    def turn(self) -> int:
        """How many turns have been drawn, in all chains."""
        return len(self._log.rewards)

    @property
    def left(self) -> int:
        """How many tokens the chain may still have, drawn and told."""
        most = self.limits.new_tokens
        if not self._is_first:
            most = min(most, self.limits.prompt_tokens + most - len(self._begun.tokens))
        return most - sum(len(piece.tokens) for piece in self._pieces)

    @property
    def tool_records(self) -> list[ToolRecord]:
        """What came of each call of a tool, in order."""
        return self._log.tool_records

    @property
    def score(self) -> float | None:
        """What the environment returned, if there is one; it may be set."""
        return self._log.score

    @score.setter
    def score(self, value: Any) -> None:
        number = None if value is None else finite_number(value)
        if number is None and value is not None:
            raise BrokenEpisode(
                f"chat.score: got {short_repr(value)}, expected a finite number (float32) or None"
            )
        self._log.score = number

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return self._template.tokenizer

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat so far, as messages."""
        return [*self._messages, *self._pending]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The chain so far: the prompt, and what was drawn and told."""
        return (*self._begun.tokens, *(int(t) for piece in self._pieces for t in piece.tokens))

    @property
    def visuals(self) -> tuple[Visual, ...]:
        """The images and videos of the chain so far, in the order of their placeholder tokens."""
        return (*self._begun.visuals, *(v for piece in self._pieces for v in piece.visuals))

    @property
    def _begun(self) -> Stretch:
        """What the chain begins with."""
        if self._opening is not None:
            return self._opening
        return Stretch(self.prompt.tokens, self.prompt.visuals) if self._is_first else Stretch()

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Answer:
        """Draw the policy's next turn.

        Args:
            max_tokens: of this turn at most; None: `limits.turn_tokens`.
            stop: texts that end the turn, besides the model's stop tokens.

        Returns:
            The turn, taken apart.

        Raises:
            EpisodeEnd: a limit is reached, or a tool ended the episode; an agent lets it pass.
            BrokenEpisode: a turn is being drawn already, or the prompt is too long.
        """
        self._check_ready()
        told = self._told()
        if self._opening is None:
            self._opening = self._opened()
        await self._add_turn(told, max_tokens, stop)
        assert self._last is not None, "it is drawn"
        return self._last

    async def generate_after(
        self,
        tokens: Sequence[int],
        *,
        visuals: tuple[Visual, ...] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """Draw the policy's next turn after exactly these tokens.

        Args:
            tokens: the chain so far, and what is told after it. Before its first turn, a prompt of
                the agent's own making.
            visuals: images and videos of all these tokens, in the order of their placeholders.
            max_tokens: as in `generate`.
            stop: as in `generate`.

        Returns:
            The turn, as it was sampled.

        Raises:
            EpisodeEnd: as in `generate`.
            BrokenEpisode: as in `generate`; the tokens do not go on from the stream.
        """
        self._check_ready()
        if self._pending:
            raise BrokenEpisode(
                f"chat.generate_after: got {len(self._pending)} appended messages, which tokens "
                "can't be told after; expected none"
            )
        given = Stretch(tuple(map(int, tokens)), visuals)
        told = Stretch()
        if self._last is not None:
            told = given.beyond(Stretch(self.tokens, self.visuals), self.tokenizer)
        if self._opening is None:
            if self._is_first:
                check_prompt(given, self.limits, "as the agent wrote it")
            self._opening = given
        unread = told if self._is_first or self._messages else self._opening
        if unread.tokens:
            text = text_decoder(self.tokenizer, skip_special_tokens=False)(unread.tokens)
            self._pending.append({"role": "user", "content": text, "as_tokens": True})
        return await self._add_turn(told, max_tokens, stop)

    async def _add_turn(
        self, told: Stretch, max_tokens: int | None, stop: Sequence[str]
    ) -> Completion:
        """Tell tokens and draw a turn; what was appended is told with them.

        Raises:
            EpisodeEnd: there is no room for a turn, or for images that are told.
        """
        left, limits = self.left, self.limits
        most = limits.turn_tokens if max_tokens is None else max_tokens
        room = min(left - len(told.tokens), left if most is None else most)
        shown = Stretch(visuals=(*self.visuals, *told.visuals)).visual_tokens
        if room < 1 or (limits.visual_tokens is not None and shown > limits.visual_tokens):
            raise self.ended("length")
        assert self._opening is not None, "it is opened"
        if self._number is None:
            self._number = self._log.begin_chain(self._opening, self._messages)
        if told.tokens:
            self._add_piece(Completion.told(told.tokens, visuals=told.visuals))
        self._messages += self._pending
        self._pending, before = [], self.tokens
        sampling = replace(self.sampling, max_new_tokens=room, stop=tuple(stop))
        seed = turn_seed(self.seed, self.turn)
        self._log.is_generating = True
        try:
            completion = await self._generate(Request(before, sampling, seed, visuals=self.visuals))
        finally:
            self._log.is_generating = False
        self._add_piece(completion.as_piece())
        self._stopped_by = completion.stopped_by
        parsed = self._template.parse(completion.tokens.tolist(), prompt=before)
        self._last = parsed._replace(finish=completion.finish)
        self._messages.append(self._template.message(parsed))
        self._log.end_turn(self._number, completion, self._last.text.strip())
        return completion

    def _add_piece(self, piece: Completion) -> None:
        assert self._number is not None, "the chain has begun"
        self._pieces.append(piece)
        self._log.pieces.append(piece._replace(chain=self._number))

    def append(self, messages: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str) -> None:
        """Tell the policy what others say; it is in the stream once the next turn is drawn.

        Args:
            messages: one or several, with `role` and `content`: a text, or a list of parts
                `{"type": "text", "text": …}` and `{"type": "image", "image": …}`, whose images are
                in any form of `data.visuals.pictures.read_picture` but that of a path; videos
                likewise. A text alone is a user's message.

        Raises:
            BrokenEpisode: an image can't be read, or not by this policy.
        """
        if isinstance(messages, str):
            messages = {"role": "user", "content": messages}
        several = [messages] if isinstance(messages, Mapping) else messages
        limit = self.limits.observation_tokens
        self._pending += [self.contents.take(message, limit) for message in several]

    def reward(self, value: Any, *, turn: int | None = None) -> None:
        """Add to the reward of a turn.

        Args:
            value: a finite number, of Python, numpy or torch.
            turn: its number, from 0; None is the newest one.

        Raises:
            BrokenEpisode: there is no such turn, or the value is not finite.
        """
        number = self.turn - 1 if turn is None else turn
        added = finite_number(value)
        if not 0 <= number < self.turn or added is None:
            raise BrokenEpisode(
                f"chat.reward: got {short_repr(value)} for turn {number}, expected a finite number "
                f"(float32) for one of the {self.turn} turns sampled so far"
            )
        self._log.rewards[number] += added

    def end(self, reason: str = "end") -> None:
        """End the episode: no further turn is drawn."""
        self._log.end = self._log.end or reason

    def ended(self, reason: str) -> EpisodeEnd:
        """End the episode, and return what tells its agent."""
        self.end(reason)
        return EpisodeEnd(self._log.end)

    def add_chain(self, opening: Stretch, turns: Sequence[ChainTurn]) -> None:
        """Add a chain that was drawn elsewhere, as by the gateway.

        Args:
            opening: its prompt.
            turns: in order.
        """
        log, messages = self._log, list[dict[str, Any]]()
        number = log.begin_chain(opening, messages)
        for told, completion, answer, new in turns:
            if told.tokens:
                log.pieces.append(Completion.told(told.tokens, number, told.visuals))
            log.pieces.append(completion.as_piece(number))
            messages += new
            log.end_turn(number, completion, answer.strip())

    def episode(self, seconds: float, error: str | None = None) -> Episode:
        """Return what has been drawn and told.

        Args:
            seconds: from the episode's start to its end.
            error: why it is broken.
        """
        log, chats = self._log, tuple(tuple(chat) for chat in self._log.chats)
        opening = log.opening or Stretch(self.tokens, self.visuals)
        finish = log.end or (log.last.finish if log.last else "end")
        return Episode(
            opening.tokens,
            tuple(log.pieces),
            "broken" if error is not None else finish,
            log.last and log.last.stopped_by,
            tuple(log.rewards),
            log.score,
            chats[log.newest] if chats else tuple(self._messages),
            tuple(log.tool_records),
            error,
            seconds,
            log.last_answer,
            chats if len(chats) > 1 else (),
            tuple(log.routes),
            opening.visuals,
        )

    def _check_ready(self) -> None:
        if self._log.is_generating:
            raise BrokenEpisode(
                "chat.generate: got a second call while a turn is drawn, expected one at a "
                "time, in all chains"
            )
        if self._log.end:
            raise EpisodeEnd(self._log.end)
        if self.turn >= self.limits.turns:
            raise self.ended("turns")

    def _told(self) -> Stretch:
        """Return the tokens between the last turn and the next one.

        Raises:
            BrokenEpisode: there is nothing to tell.
        """
        if self._last is None:
            return Stretch()
        if not self._pending:
            raise BrokenEpisode(
                "chat.generate: got a second call with nothing told since the last turn, expected "
                "chat.append in between"
            )
        stop = self._stopped_by if isinstance(self._stopped_by, int) else None
        tokens = self._template.following(
            self._pending, calls=self._last.calls, closed=stop is not None, stop=stop
        )
        return self.contents.told(tokens, self._pending)

    def _opened(self) -> Stretch:
        """Return the chain's prompt, with what the environment says first.

        Only what it has of the row's prompt may hold special tokens: the rest is of others.

        Raises:
            BrokenEpisode: its tokens are too many, or a chain begins with nothing.
        """
        if self._is_first and not self._pending:
            return self._begun
        if not self.messages:
            raise BrokenEpisode(
                "chat.generate: got a new chain without messages, expected some from chat.new or "
                "chat.append"
            )
        pairs = zip(self._messages, self.prompt.messages, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == dict(pair[1]), pairs))
        tokens = self._template.opening(self.messages[:same], told=self.messages[same:])
        opening = self.contents.told(tokens, self.messages)
        if self._is_first:
            check_prompt(opening, self.limits, "with what the environment says first")
        return opening


Content = str | list[dict[str, Any]]
"""Of a message: a text, or parts of text and images."""


class Tools:
    """The tools of an episode.

    Args:
        chat: of the episode; rewards and what a tool ends go there.
        session: runs them.
        schemas: of all tools, as the model is told of them.
    """

    def __init__(self, chat: Chat, session: Session, schemas: Sequence[dict[str, Any]]) -> None:
        """Run nothing yet."""
        self._chat, self._session, self.schemas = chat, session, schemas

    async def run(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Run the calls of one turn side by side.

        A call that fails is answered with what went wrong, as the model's next turn may be better.

        Args:
            calls: of a turn.

        Returns:
            A message for each call, in their order.

        Raises:
            BrokenEpisode: the infrastructure of a tool failed, after all retries.
        """
        limit = self._chat.limits.parallel_calls
        results = await asyncio.gather(*(self._session.call(call) for call in calls[:limit]))
        messages = []
        for call, result in zip(calls, results, strict=False):
            record(self._chat, result)
            content = await self._chat.contents.ready(result.content)
            messages.append(tool_message(call, content))
        refused = f"error: at most {limit} calls are allowed in one turn, got {len(calls)}"
        return messages + [tool_message(call, refused) for call in calls[limit:]]


class EpisodeEnvironment:
    """The environment of an episode.

    Args:
        chat: of the episode; rewards, the score and the end go there.
        session: runs it.
    """

    def __init__(self, chat: Chat, session: Session) -> None:
        """Begin nothing yet."""
        self._chat, self._session = chat, session

    async def begin(self) -> Content:
        """Start the environment; return what it says first, which may be nothing.

        Returns:
            A text, or where it shows images the parts of a message.

        Raises:
            BrokenEpisode: it failed.
        """
        return await self.step(None)

    async def step(self, answer: str | None) -> Content:
        """Tell the environment a turn of the policy; return what it says.

        Where it has ended, the chat draws no further turn.

        Raises:
            BrokenEpisode: it failed.
        """
        result = await self._session.step(answer)
        record(self._chat, result)
        if result.score is not None:
            self._chat.score = result.score
        return await self._chat.contents.ready(result.content)


def record(chat: Chat, result: ToolResult) -> None:
    """Note in an episode what came of a call.

    Raises:
        BrokenEpisode: infrastructure failed.
    """
    chat.tool_records.append(ToolRecord(result.name, result.failure, result.seconds))
    if result.failure == "broken":
        raise BrokenEpisode(f"{result.name}: {result.text}")
    if result.reward:
        chat.reward(result.reward)
    if result.end:
        chat.end()


def tool_message(call: ToolCall, content: Content) -> dict[str, Any]:
    """Return what a tool says as the message of a chat.

    >>> tool_message(ToolCall("add", {}, "call_0"), "3")
    {'role': 'tool', 'name': 'add', 'tool_call_id': 'call_0', 'content': '3'}
    """
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}
