"""One episode that a program leads by requests: after which tokens each of them is answered."""

import asyncio
import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_llm.data.chat_template import REFUSALS
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.models.vision.inputs import Visual
from jaxrl_llm.rollout.chat import Answer, Chat, Generate
from jaxrl_llm.rollout.contents import IMAGES_SHARE, BrokenEpisode, Stretch
from jaxrl_llm.rollout.gateway.client_requests import (
    ClientRequest,
    Reply,
    as_template_message,
    read_chat_request,
)
from jaxrl_llm.rollout.gateway.turn_tree import (
    DrawnTurn,
    TurnTree,
    history_digests,
    prompt_identity,
)
from jaxrl_llm.rollout.seeds import request_seed
from jaxrl_llm.rollout.types import Completion, Request
from jaxrl_llm.serving.answers import read_answer
from jaxrl_llm.serving.fields import APIError, shown
from jaxrl_llm.serving.messages import (
    answer_message,
    image_reader,
    parse_messages,
    read_images,
)

log = logging.getLogger(__name__)

TOO_LONG = "context_length_exceeded"


@dataclass(eq=False)
class Ticket:
    """A request that was received.

    Attributes:
        tree: its body, as `/chat/completions` has it.
        is_retry: whether the client says that it has sent it before.
        is_left: whether its client has gone without the answer.
        work: what draws the answer.
    """

    tree: dict[str, Any]
    is_retry: bool = False
    is_left: bool = False
    work: asyncio.Task[Reply] | None = None

    @functools.cached_property
    def key(self) -> bytes:
        """A digest of the body."""
        return hashlib.sha256(json.dumps(self.tree, sort_keys=True).encode()).digest()


@dataclass(eq=False)
class GatewayTally:
    """What the programs of a run have asked for.

    Attributes:
        counts: by metric, since they were last taken.
        warned: what has been said once.
    """

    counts: Counter[str] = field(default_factory=Counter)
    warned: set[str] = field(default_factory=set)

    def warn_once(self, kind: str, message: str, *values: Any) -> None:
        """Log a warning, the first time that there is one of its kind."""
        if kind not in self.warned:
            self.warned.add(kind)
            log.warning(message, *values)


class GatewaySession:
    """Answers the requests of one program by turns of the policy.

    A request whose messages go on from a turn that was drawn is answered after exactly the tokens
    of that turn; what is new is told behind them. Any other begins a chain of its own. All methods
    run in the event loop of the episodes.

    Args:
        chat: of the episode; `end` gives it what was drawn.
        generate: samples a turn.
        template: from the tools that the model is told of to the chat template.
        tally: counts.
        one_at_a_time: whether turns are drawn one after the other.
    """

    def __init__(
        self,
        chat: Chat,
        generate: Generate,
        template: Callable[[Sequence[Mapping[str, Any]]], TurnTemplate],
        tally: GatewayTally,
        *,
        one_at_a_time: bool,
    ) -> None:
        """Begin without a turn."""
        self.chat, self._generate, self._template, self._tally = chat, generate, template, tally
        self.loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self.loop.create_future()
        self.prompt_error: str | None = None
        self._tree, self._tickets = TurnTree(), dict[bytes, list[Ticket]]()
        self._equal, self._asked = Counter[tuple[int, ...]](), 0
        self._images = dict[bytes, Visual]()  # by a digest of the URL
        self._limit, self._is_closed = "", False
        self._drawing = asyncio.Semaphore(1) if one_at_a_time else asyncio.Semaphore(10**6)
        self._running, self._last_active = 0, self.loop.time()

    @property
    def is_limited(self) -> bool:
        """Whether a limit of the episode has been reached."""
        return bool(self._limit)

    @property
    def idle_s(self) -> float:
        """Seconds since a turn was last asked for or drawn; 0 while one is."""
        return 0.0 if self._running else self.loop.time() - self._last_active

    async def answer(self, ticket: Ticket) -> tuple[ClientRequest, Reply]:
        """Answer a request.

        If it repeats one whose client has gone without its answer, it gets that answer.

        Raises:
            APIError: it is refused, or the episode is over.
        """
        self._tally.counts["gateway/requests"] += 1
        request = read_chat_request(ticket.tree, self.chat.sampling)
        self._check_open()
        for name in request.overridden:
            self._tally.warn_once(
                name, "a program asks for %s: what the run says is used (docs/gateway.md)", name
            )
        tickets = self._tickets.setdefault(ticket.key, [])
        earlier = next((t for t in tickets if t.is_left or ticket.is_retry), None)
        if earlier is None:
            ticket.work = asyncio.create_task(self._draw(request))
        else:
            tickets.remove(earlier)
            ticket.work = earlier.work
            self._tally.counts["gateway/retries"] += 1
        tickets.append(ticket)
        assert ticket.work is not None, "it was begun"
        reply = await asyncio.shield(ticket.work)
        return request, reply

    def settle(self, ticket: Ticket, *, is_left: bool) -> None:
        """Note whether a request's client has got its answer."""
        ticket.is_left = is_left
        tickets = self._tickets.get(ticket.key, [])
        if not is_left and ticket in tickets:
            tickets.remove(ticket)

    async def end(self) -> None:
        """Give up what is being drawn, and give the chat what was."""
        self._is_closed = True
        self.failure.cancel()
        work = [t.work for tickets in self._tickets.values() for t in tickets if t.work is not None]
        for task in work:
            task.cancel()
        streams = self._tree.streams()
        for stream in streams:
            before = [m for turn in stream[0].path[:-1] for m in turn.messages]
            turns = [
                (turn.told, turn.completion, turn.answer.text, turn.messages) for turn in stream
            ]
            first = Stretch(), *turns[0][1:3], (*before, *turns[0][3])
            opening = Stretch(stream[0].prompt, stream[0].visuals)
            self.chat.add_chain(opening, [first, *turns[1:]])
        await asyncio.gather(*work, return_exceptions=True)

    def _check_open(self) -> None:
        if self._is_closed or self._limit:
            reason = f": it has reached its limit of {self._limit}" if self._limit else ""
            raise APIError(f"the episode is over{reason}", status=410, code="episode_over")

    def _end(self, reason: str) -> None:
        self._limit = self._limit or reason
        self.chat.end(reason)

    async def _draw(self, request: ClientRequest) -> Reply:
        self._running += 1
        try:
            return await self._drawn(request)
        finally:
            self._running -= 1
            self._last_active = self.loop.time()

    async def _drawn(self, request: ClientRequest) -> Reply:
        """Draw the answer to a request."""
        request = await self._with_images(request)
        template = self._template_of(request)
        parent, stream, messages = self._place(request, template)
        room, asked = self._room(parent, stream, request.max_tokens), self._asked
        prompt, visuals = stream
        identity = prompt_identity(prompt, visuals)
        number = self._equal[identity]
        self._equal[identity] += 1
        seed = request_seed(self.chat.seed, identity, number)
        async with self._drawing:
            self._check_open()
            sampling = replace(self.chat.sampling, max_new_tokens=room, stop=request.stop)
            completion = await self._sample(Request(prompt, sampling, seed, visuals=visuals))
        parsed = template.parse(completion.tokens.tolist(), prompt=prompt)
        shown_answer = read_answer(
            template, completion.tokens.tolist(), prompt=prompt, index=number, stops=request.stop
        )
        message = answer_message(shown_answer)
        known = template.message(parsed)
        turn = DrawnTurn(
            parent,
            prompt,
            number,
            asked,
            completion,
            Answer(*parsed, completion.finish),
            (*messages, known),
            history_digests([*request.messages, *as_echoed(message)], request.tools)[-1],
            visuals,
        )
        self._tree.turns.append(turn)
        return Reply(
            f"{seed:x}",
            message,
            completion.finish,
            prompt_tokens=len(prompt),
            tokens=len(completion.tokens),
        )

    async def _with_images(self, request: ClientRequest) -> ClientRequest:
        """Return a request whose messages name their images, each of which is read once.

        Raises:
            APIError: one can't be read, or not by this policy.
        """
        if all(isinstance(message["content"], str) for message in request.messages):
            return request
        contents, limits = self.chat.contents, self.chat.limits
        most = limits.prompt_tokens + limits.new_tokens
        reader = image_reader(contents.processor, most, self._images)
        messages, visuals = await asyncio.to_thread(read_images, request.messages, reader)
        return replace(request, messages=tuple(contents.named(messages, visuals)))

    def _template_of(self, request: ClientRequest) -> TurnTemplate:
        try:
            return self._template(request.tools)
        except ValueError as error:
            raise APIError(f"tools: {error}", param="tools") from error

    def _place(
        self, request: ClientRequest, template: TurnTemplate
    ) -> tuple[DrawnTurn | None, Stretch, tuple[dict[str, Any], ...]]:
        """Return the turn that a request goes on from, all its tokens, and what is new in it."""
        contents = self.chat.contents
        parent, count = self._tree.find(request.messages, request.tools)
        rest = request.messages[count:]
        if any(message["role"] == "assistant" for message in rest):
            if self._tree.turns:
                self._note_unmatched(request)
            parent, rest = None, request.messages
        try:
            shown = contents.visuals(rest)
            if parent is None:
                opened = template.opening([], told=rest)
                return None, Stretch(tuple(contents.expand(opened, shown)), shown), rest
            stopped_by = parent.completion.stopped_by
            stop = stopped_by if isinstance(stopped_by, int) else None
            calls = parent.answer.calls
            told = template.following(rest, calls=calls, closed=stop is not None, stop=stop)
            told = contents.expand(told, shown)
        except (*REFUSALS, BrokenEpisode) as error:
            raise APIError(f"messages: {error}", param="messages") from error
        return parent, Stretch((*parent.stream, *told), (*parent.visuals, *shown)), rest

    def _note_unmatched(self, request: ClientRequest) -> None:
        """Count a request whose answers were not drawn so, and say once where it differs."""
        self._tally.counts["gateway/unmatched"] += 1
        known = [message for turn in self._tree.streams()[-1] for message in turn.messages]
        pairs = enumerate(zip(known, request.messages, strict=False))
        for place, (one, other) in pairs:
            if history_digests([one], []) != history_digests([other], []):
                self._tally.warn_once(
                    "unmatched",
                    "a program has rewritten its history: message %d was %s and is %s. What "
                    "follows is a chain of its own (docs/gateway.md)",
                    *(place, shown(one), shown(other)),
                )
                return

    def _room(self, parent: DrawnTurn | None, prompt: Stretch, max_tokens: int | None) -> int:
        """Return how many tokens an answer may have.

        Raises:
            APIError: none, or it is one turn too many.
        """
        limits = self.chat.limits
        if self._asked >= limits.turns:
            self._end("turns")
            self._check_open()
        start = len(parent.path[0].prompt) if parent else len(prompt.tokens)
        if start > limits.prompt_tokens:
            raise self._too_long(
                f"the prompt has {start} tokens, expected at most {limits.prompt_tokens} "
                "(data.max_prompt_tokens)"
            )
        if limits.visual_tokens is not None and prompt.visual_tokens > limits.visual_tokens:
            raise self._too_long(
                f"the chat has {prompt.visual_tokens} tokens of images and videos, expected at "
                f"most {limits.visual_tokens} ({IMAGES_SHARE})"
            )
        told = len(prompt.tokens) - start
        left = limits.new_tokens - told
        sizes = [size for size in (limits.turn_tokens, max_tokens) if size is not None]
        if left < 1:
            raise self._too_long(
                f"the episode has no tokens left: {told} of {limits.new_tokens} "
                "(rollout.max_new_tokens) stand after its prompt"
            )
        self._asked += 1
        return min(left, *sizes) if sizes else left

    def _too_long(self, message: str) -> APIError:
        """Note that there is no room: that ends the episode, or its prompt is wrong."""
        if self._tree.turns:
            self._end("length")
        else:
            self.prompt_error = message
        return APIError(message, param="messages", code=TOO_LONG)

    async def _sample(self, request: Request) -> Completion:
        try:
            return await self._generate(request)
        except Exception as error:
            if not self.failure.done():  # else another request was sooner
                self.failure.set_exception(error)
            raise APIError(f"the engine failed: {error}", status=410) from error


def as_echoed(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an assistant's message as it reads when its client sends it again."""
    return [as_template_message(told) for told in parse_messages([message])]
