"""The server of programs: one address for each episode, on the loopback by default.

A session answers the requests of one episode: it finds after which tokens each of them goes on.
"""

import asyncio
import contextlib
import functools
import hashlib
import hmac
import itertools
import json
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.data.chat import REFUSALS
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.models.inputs import Visual
from jaxrl_llm.rollout.agents.chat import (
    IMAGES_SHARE,
    Answer,
    BrokenEpisode,
    Chat,
    Generate,
    Stretch,
)
from jaxrl_llm.rollout.engine import Completion, Request, SamplingParams
from jaxrl_llm.rollout.gateway.programs import ProgramPool, ProgramSpec
from jaxrl_llm.rollout.openai_api.requests import (
    APIError,
    Fields,
    answer_delta,
    answer_message,
    finish_reason,
    image_reader,
    parse_body,
    parse_messages,
    parse_stops,
    parse_tools,
    read_body,
    read_images,
    shown,
    wait_until_gone,
)
from jaxrl_llm.rollout.openai_api.responses import event, read_answer, usage
from jaxrl_llm.rollout.openai_api.responses_api import ResponseEnvelope, chat_request
from jaxrl_llm.rollout.rollouts import request_seed
from jaxrl_llm.workers.pool import Limits
from jaxrl_llm.workers.supervisor import raise_descriptor_limit


@dataclass(frozen=True, eq=False)
class DrawnTurn:
    """A turn of the policy, and what it was drawn after.

    Attributes:
        parent: the turn that it goes on from; None where the stream begins with it.
        prompt: all tokens before it.
        number: among turns with the same prompt.
        asked: number of its request in the episode.
        completion: as it was sampled.
        answer: the turn, taken apart.
        messages: what is new since the parent, with this turn as the last.
        digest: of all messages up to this turn, and of the tools.
        visuals: images among the tokens before it.
    """

    parent: "DrawnTurn | None"
    prompt: tuple[int, ...]
    number: int
    asked: int
    completion: Completion
    answer: Answer
    messages: tuple[dict[str, Any], ...]
    digest: bytes
    visuals: tuple[Visual, ...] = ()

    @property
    def stream(self) -> tuple[int, ...]:
        """All tokens up to its end."""
        return (*self.prompt, *self.completion.tokens.tolist())

    @property
    def path(self) -> list["DrawnTurn"]:
        """The turns from the first of its stream to this one."""
        turns: list[DrawnTurn] = [self]
        while (before := turns[-1].parent) is not None:
            turns.append(before)
        return turns[::-1]

    @property
    def told(self) -> Stretch:
        """What is told between the parent and this turn; nothing in the first of a stream."""
        if self.parent is None:
            return Stretch()
        tokens = self.prompt[len(self.parent.stream) :]
        return Stretch(tokens, self.visuals[len(self.parent.visuals) :])

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        """By what turns are put in order, whichever was drawn first."""
        return prompt_identity(self.prompt, self.visuals), self.number


def prompt_identity(prompt: tuple[int, ...], visuals: Sequence[Visual]) -> tuple[int, ...]:
    """Return what tells prompts apart: their tokens, and behind these the keys of their images.

    >>> import numpy as np
    >>> patches, keys = np.zeros((4, 12), np.uint8), (b"of one picture", b"of the other")
    >>> one, other = (Visual(patches, (1, 2, 2), 2, key) for key in keys)
    >>> prompt_identity((5,), [one]) == prompt_identity((5,), [other])
    False
    """
    return (*prompt, *(int.from_bytes(visual.key[:7]) for visual in visuals))


def streams_of(turns: Sequence[DrawnTurn]) -> list[list[DrawnTurn]]:
    """Return each turn once, in streams; the one that was asked for a turn last comes last.

    Requests that share a beginning share the turns in it. Of streams that part, the one with most
    drawn tokens has the turns that they share.
    """

    def weight(path: Sequence[DrawnTurn]) -> Any:
        return -sum(len(turn.completion.tokens) for turn in path), path[-1].order

    left = set(turns)
    streams: list[list[DrawnTurn]] = []
    while left:
        paths = [[turn for turn in end.path if turn in left] for end in left]
        streams.append(min(paths, key=weight))
        left -= set(streams[-1])
    return sorted(streams, key=lambda stream: stream[-1].asked)


def history_digests(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[bytes]:
    """Return a digest of each beginning of a chat.

    Chats are the same that differ in spaces at the ends of what the assistant said, in how a call's
    arguments are written, in reasoning, which most clients drop, or in the ids of calls. What
    others said is the client's own, which it has no reason to write otherwise: each space counts.

    Args:
        messages: as `jaxrl_llm.rollout.openai_api.requests.parse_message` returns them.
        tools: that the model is told of.

    >>> one = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes? "}
    >>> two = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}
    >>> history_digests(one, []) == history_digests(two, [])
    True
    >>> other = {"role": "user", "content": " Hi"}
    >>> history_digests([other], [])[0] in history_digests(one, [])
    False
    """
    state, digests = _digest(b"", list(tools)), []
    for message in messages:
        calls = [
            [call["function"]["name"], _as_values(call["function"]["arguments"])]
            for call in message.get("tool_calls") or ()
        ]
        role, content = message["role"], message.get("content") or ""
        is_own = role == "assistant" and isinstance(content, str)
        text = content.strip() if is_own else content
        state = _digest(state, [role, text, calls])
        digests.append(state)
    return digests


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.sha256(before + json.dumps(value, sort_keys=True).encode()).digest()


def _as_values(arguments: Any) -> Any:
    """Return a call's arguments as JSON has them, where 1.0 is 1."""

    def number(text: str) -> float:
        return int(float(text)) if float(text).is_integer() else float(text)

    return json.loads(json.dumps(arguments), parse_float=number)


MODEL = "policy"
KNOWN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
"""What chat templates know of a message."""


@dataclass(frozen=True)
class ClientRequest:
    """One request of a program.

    Attributes:
        messages: the chat, as chat templates want it.
        tools: that the model is told of.
        max_tokens: of the answer; None: as the run has it.
        stop: texts that end it.
        stream: whether it is sent as events.
        include_usage: whether these end with a count of tokens.
        overridden: names of fields that ask for something else than the run does.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    overridden: tuple[str, ...] = ()


def read_chat_request(tree: Mapping[str, Any], sampling: SamplingParams) -> ClientRequest:
    """Read the body of a request.

    How answers are drawn is the run's choice: a temperature is read and ignored. What would make
    another distribution of the answers, as a penalty does, is refused.

    Args:
        tree: the body.
        sampling: of the run.

    Raises:
        APIError: a field is wrong, unknown or refused.
    """
    fields = Fields(tree)
    fields.take("model", str)  # programs name the one that they were written with
    messages = parse_messages(fields.take("messages", list, []))
    if not messages or messages[-1]["role"] == "assistant":
        last = [message["role"] for message in messages[-1:]]
        raise fields.refuse("messages", last, "a last message that is not the assistant's")
    tools, choice = parse_tools(fields.take("tools", list, [])), fields.any_of("tool_choice")
    names = "max_tokens", "max_completion_tokens"
    sizes = [fields.between(name, int, None, 1, float("inf")) for name in names]
    own = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "parallel_tool_calls": True,
        "seed": None,
    }
    given = {name: fields.any_of(name) for name in own}
    request = ClientRequest(
        messages=tuple(as_template_message(message) for message in messages),
        tools=() if choice == "none" else tuple(tools),
        max_tokens=min((size for size in sizes if size is not None), default=None),
        stop=parse_stops(fields),
        stream=fields.take("stream", bool, False),
        include_usage=bool(fields.take("stream_options", dict, {}).get("include_usage")),
        overridden=(
            *(name for name, value in given.items() if value not in (None, own[name])),
            *(["tool_choice"] if choice not in (None, "auto", "none") else []),
        ),
    )
    if fields.take("n", int, 1) != 1:
        raise fields.refuse("n", tree["n"], "1: the same request again gets another answer")
    if fields.take("logprobs", bool, False):
        raise fields.refuse("logprobs", True, "none: the run keeps them itself")
    fields.end()
    return request


def as_template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without what chat templates do not know.

    >>> as_template_message({"role": "user", "content": "Be brief.", "refusal": None})
    {'role': 'user', 'content': 'Be brief.'}
    """
    return {name: message[name] for name in KNOWN if message.get(name) is not None}


class Reply:
    """An answer on its way to the client.

    Args:
        id: of the answer.
        message: the assistant's.
        finish: of the turn.
        prompt_tokens: before the answer.
        tokens: of the answer.
    """

    def __init__(
        self, id: str, message: dict[str, Any], finish: str, *, prompt_tokens: int, tokens: int
    ) -> None:
        """Keep what the answer says."""
        self._id, self._message = id, message
        self._finish = finish_reason(finish, has_calls="tool_calls" in message)
        self._prompt_tokens, self._tokens = prompt_tokens, tokens

    def chat(self, request: ClientRequest) -> dict[str, Any] | str:
        """Return the answer to a request of `/chat/completions`: whole, or all its events."""
        around = {"id": f"chatcmpl-{self._id}", "created": int(time.time()), "model": MODEL}
        counted = usage(self._prompt_tokens, self._tokens)
        if not request.stream:
            choices = [self._choice("message", self._message, self._finish)]
            return {**around, "object": "chat.completion", "choices": choices, "usage": counted}
        chunks: list[dict[str, Any]] = [
            {"choices": [self._choice("delta", answer_delta(self._message), None)]},
            {"choices": [self._choice("delta", {}, self._finish)]},
        ]
        chunks += [{"choices": [], "usage": counted}] if request.include_usage else []
        kind = {"object": "chat.completion.chunk"}
        events = [event({**around, **kind, **chunk}) for chunk in chunks]
        return "".join([*events, "data: [DONE]\n\n"])

    def response(self, tree: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the answer to a request of `/responses`, likewise.

        Args:
            tree: the request's body.
        """
        envelope = ResponseEnvelope(tree, MODEL, self._prompt_tokens)
        if not tree.get("stream"):
            choice = self._choice("message", self._message, self._finish)
            return envelope.answer([choice], self._tokens)
        choice = self._choice("delta", answer_delta(self._message), self._finish)
        return envelope.chunk(choice, first=True) + envelope.end(self._tokens)

    def _choice(self, part: str, message: Any, finish: str | None) -> dict[str, Any]:
        return {"index": 0, part: message, "finish_reason": finish}


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


class GatewaySession:
    """Answers the requests of one program by turns of the policy.

    A request whose messages go on from a turn that was drawn is answered after exactly the tokens
    of that turn; what is new is told behind them. Any other begins a chain of its own. All methods
    run in the event loop of the episodes.

    Args:
        server: of all episodes, which counts.
        chat: of the episode; `end` gives it what was drawn.
        generate: samples a turn.

    Attributes:
        limit: of the episode that has been reached; "" before.
        failure: gets what the engine raises.
        prompt_error: why the program's first prompt is none, if it is so.
    """

    def __init__(self, server: "Gateway", chat: Chat, generate: Generate) -> None:
        """Begin without a turn."""
        self.server, self.chat, self._generate = server, chat, generate
        self.loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self.loop.create_future()
        self.prompt_error: str | None = None
        self._turns, self._tickets = list[DrawnTurn](), dict[bytes, list[Ticket]]()
        self._equal, self._asked = Counter[tuple[int, ...]](), 0
        self._images = dict[bytes, Visual]()  # by a digest of the URL
        self.limit, self._is_closed = "", False
        self._drawing = asyncio.Semaphore(1 if server.one_at_a_time else 10**6)
        self._running, self._last_active = 0, self.loop.time()

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
        self.server.counts["gateway/requests"] += 1
        request = read_chat_request(ticket.tree, self.chat.sampling)
        self._check_open()
        for name in request.overridden:
            self.server.warn_once(
                name, "a program asks for %s: what the run says is used (docs/gateway.md)", name
            )
        tickets = self._tickets.setdefault(ticket.key, [])
        earlier = next((t for t in tickets if t.is_left or ticket.is_retry), None)
        if earlier is None:
            ticket.work = asyncio.create_task(self._draw(request))
        else:
            tickets.remove(earlier)
            ticket.work = earlier.work
            self.server.counts["gateway/retries"] += 1
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
        for stream in streams_of(self._turns):
            before = [m for turn in stream[0].path[:-1] for m in turn.messages]
            turns = [
                (turn.told, turn.completion, turn.answer.text, turn.messages) for turn in stream
            ]
            first = Stretch(), *turns[0][1:3], (*before, *turns[0][3])
            opening = Stretch(stream[0].prompt, stream[0].visuals)
            self.chat.add_chain(opening, [first, *turns[1:]])
        await asyncio.gather(*work, return_exceptions=True)

    def _check_open(self) -> None:
        if self._is_closed or self.limit:
            reason = f": it has reached its limit of {self.limit}" if self.limit else ""
            raise APIError(f"the episode is over{reason}", status=410, code="episode_over")

    def _end(self, reason: str) -> None:
        self.limit = self.limit or reason
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
        try:
            template = self.server.template(request.tools)
        except ValueError as error:
            raise APIError(f"tools: {error}", param="tools") from error
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
            asked_for = Request(prompt, sampling, seed, visuals=visuals)
            try:
                completion = await self._generate(asked_for)
            except Exception as error:
                if not self.failure.done():  # else another request was sooner
                    self.failure.set_exception(error)
                raise APIError(f"the engine failed: {error}", status=410) from error
        parsed = template.parse(completion.tokens.tolist(), prompt=prompt)
        shown_answer = read_answer(
            template, completion.tokens.tolist(), prompt=prompt, index=number, stops=request.stop
        )
        message = answer_message(shown_answer)
        known = template.message(parsed)
        echoed = [as_template_message(told) for told in parse_messages([message])]
        turn = DrawnTurn(
            parent,
            prompt,
            number,
            asked,
            completion,
            parsed._replace(finish=completion.finish),
            (*messages, known),
            history_digests([*request.messages, *echoed], request.tools)[-1],  # as it is sent again
            visuals,
        )
        self._turns.append(turn)
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

    def _place(
        self, request: ClientRequest, template: TurnTemplate
    ) -> tuple[DrawnTurn | None, Stretch, tuple[dict[str, Any], ...]]:
        """Return the turn that a request goes on from, all its tokens, and what is new in it."""
        contents = self.chat.contents
        parent, count = self._find(request)
        rest = request.messages[count:]
        if any(message["role"] == "assistant" for message in rest):
            if self._turns:
                self._note_unmatched(request)
            parent, rest = None, request.messages
        try:
            if parent is None:
                return None, contents.told(template.opening([], told=rest), rest), rest
            stopped_by = parent.completion.stopped_by
            stop = stopped_by if isinstance(stopped_by, int) else None
            calls = parent.answer.calls
            tokens = template.following(rest, calls=calls, closed=stop is not None, stop=stop)
            told = contents.told(tokens, rest)
        except (*REFUSALS, BrokenEpisode) as error:
            raise APIError(f"messages: {error}", param="messages") from error
        visuals = (*parent.visuals, *told.visuals)
        return parent, Stretch((*parent.stream, *told.tokens), visuals), rest

    def _find(self, request: ClientRequest) -> tuple[DrawnTurn | None, int]:
        """Return the turn that a request goes on from, and how many of its messages end there."""
        match: tuple[DrawnTurn | None, int] = None, 0
        turns = sorted(self._turns, key=lambda turn: turn.order, reverse=True)
        by_digest = {turn.digest: turn for turn in turns}
        for count, digest in enumerate(history_digests(request.messages, request.tools), 1):
            if request.messages[count - 1]["role"] == "assistant" and digest in by_digest:
                match = by_digest[digest], count
        return match

    def _note_unmatched(self, request: ClientRequest) -> None:
        """Count a request whose answers were not drawn so, and say once where it differs."""
        self.server.counts["gateway/unmatched"] += 1
        known = [message for turn in streams_of(self._turns)[-1] for message in turn.messages]
        pairs = enumerate(zip(known, request.messages, strict=False))
        for place, (one, other) in pairs:
            if history_digests([one], []) != history_digests([other], []):
                self.server.warn_once(
                    "unmatched",
                    "a program has rewritten its history: message %d was %s and is %s. What "
                    "follows is a chain of its own (docs/gateway.md)",
                    place,
                    shown(one),
                    shown(other),
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
        if self._turns:
            self._end("length")
        else:
            self.prompt_error = message
        return APIError(message, param="messages", code=TOO_LONG)


MakeTemplate = Callable[[Sequence[Mapping[str, Any]]], TurnTemplate]
"""From the tools of a request to the chat template that tells the model of them."""

GATEWAY_METRICS = ("gateway/requests", "gateway/unmatched", "gateway/retries")
MAX_BODY_BYTES = 64_000_000
MAX_TEMPLATES = 64  # that are kept: programs may ask with other tools each time
CLIENT_GONE = 499
KEEP_ALIVE_S = 600  # longer than a round: programs keep their connections


def check_server_packages() -> None:
    """Refuse to go on without what serves programs.

    Raises:
        ConfigError: a package of the extra `serve` is not installed.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"rollout.agent: openai_program needs a server: {error}: install the extra, as in "
            "pip install -e '.[serve]'"
        ) from error


class Gateway:
    """Serves the policy to programs, by an address of its own for each episode.

    The server has a thread and an event loop of its own; what it is asked is done in the loop of
    the episodes.

    Args:
        template: from the tools of a request to the chat template.
        limits: of each program.
        one_at_a_time: whether an episode's turns are drawn one after the other.

    Raises:
        ConfigError: a package of the extra `serve` is not installed.
    """

    def __init__(self, template: MakeTemplate, limits: Limits, *, one_at_a_time: bool) -> None:
        """Serve nothing yet."""
        check_server_packages()
        raise_descriptor_limit()  # for a connection of each episode
        self.limits, self.one_at_a_time = limits, one_at_a_time

        @functools.lru_cache(MAX_TEMPLATES)
        def make_template(tools: str) -> TurnTemplate:
            return template(json.loads(tools))

        self._make_template = make_template
        self._key, self._numbers = secrets.token_bytes(32), itertools.count()
        self._sessions: dict[int, GatewaySession] = {}
        self._pools: dict[ProgramSpec, ProgramPool] = {}
        self._servers: dict[str, _Listener] = {}
        self._lock = threading.Lock()
        self.counts, self._warned = Counter[str](), set[str]()

    def close(self) -> None:
        """End the programs and the server."""
        for pool in self._pools.values():
            pool.close()
        for server in self._servers.values():
            server.close()
        self._pools.clear()
        self._servers.clear()

    def metrics(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        counts, self.counts = self.counts, Counter[str]()
        return {name: float(counts[name]) for name in GATEWAY_METRICS}

    def programs(self, spec: ProgramSpec) -> ProgramPool:
        """Return what runs a program; its process is started by the first call.

        Raises:
            RunError: the program can't be imported.
        """
        with self._lock:
            pool = self._pools.get(spec)
            if pool is None:
                pool = self._pools[spec] = ProgramPool(spec)
        pool.ready.result()
        return pool

    def warn_once(self, kind: str, message: str, *values: Any) -> None:
        """Log a warning, the first time that there is one of its kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message, *values)

    def episode(self, chat: Chat, generate: Generate) -> GatewaySession:
        """Return the gateway of an episode.

        Args:
            chat: of the episode.
            generate: samples a turn.
        """
        return GatewaySession(self, chat, generate)

    @contextlib.contextmanager
    def serving(self, session: GatewaySession, host: str) -> Iterator[tuple[str, str]]:
        """Serve a session; yield its address and its secret.

        Args:
            session: of an episode.
            host: address to listen on.

        Raises:
            ConfigError: it is no address of this machine.
        """
        with self._lock:
            if host not in self._servers:
                self._servers[host] = _Listener(self._app(), host)
            number = next(self._numbers)
            self._sessions[number] = session
        secret = f"{number}-{self._sign(number)}"
        try:
            yield f"{self._servers[host].address}/episodes/{secret}/v1", secret
        finally:
            with self._lock:
                del self._sessions[number]

    def _sign(self, number: int) -> str:
        return hmac.new(self._key, str(number).encode(), "sha256").hexdigest()[:40]

    def template(self, tools: Sequence[Mapping[str, Any]]) -> TurnTemplate:
        """Return the chat template that tells the model of tools."""
        return self._make_template(json.dumps(list(tools)))

    def _find(self, secret: str) -> GatewaySession:
        """Return the session of a secret.

        Raises:
            APIError: there is none, or its episode is over.
        """
        number, _, signature = secret.partition("-")
        known = number.isdecimal() and len(number) < 18
        if not known or not hmac.compare_digest(
            signature.encode(), self._sign(int(number)).encode()
        ):
            raise APIError("there is no such episode", status=404)
        with self._lock:
            session = self._sessions.get(int(number))
        if session is None:
            raise APIError("the episode is over", status=410, code="episode_over")
        return session

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        async def answer(request: Request) -> Response:
            session = self._find(request.path_params["secret"])
            tree = parse_body(await read_body(request, MAX_BODY_BYTES))
            is_chat = request.url.path.endswith("/chat/completions")
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            ticket = Ticket(tree if is_chat else chat_request(tree), is_retry)
            replied = await self._ask(session, ticket, request.receive)
            if replied is None:
                return Response(status_code=CLIENT_GONE)
            asked, reply = replied
            told = reply.chat(asked) if is_chat else reply.response(tree)
            if isinstance(told, str):
                return Response(told, media_type="text/event-stream")
            return JSONResponse(told)

        async def models(request: Request) -> Response:
            self._find(request.path_params["secret"])
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "jaxrl_llm"}
            return JSONResponse({"object": "list", "data": [model]})

        async def leave(request: Request, error: Exception) -> Response:
            return Response(status_code=CLIENT_GONE)

        async def refuse(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                error = APIError(f"{request.method}: {error.detail}", status=error.status_code)
            if not isinstance(error, APIError):
                log.error("the gateway failed", exc_info=error)
                error = APIError("the gateway failed; its log says why", status=410)
            return JSONResponse(error.body, error.status, error.headers)

        base = "/episodes/{secret}/v1"
        return Starlette(
            routes=[
                Route(f"{base}/chat/completions", answer, methods=["POST"]),
                Route(f"{base}/responses", answer, methods=["POST"]),
                Route(f"{base}/models", models),
            ],
            exception_handlers={
                **dict.fromkeys((APIError, HTTPException, Exception), refuse),
                ClientDisconnect: leave,
            },
        )

    async def _ask(self, session: GatewaySession, ticket: Ticket, receive: Any) -> Any:
        """Have a session answer a request; return None where its client has gone."""
        work = session.answer(ticket)
        try:
            asked = asyncio.run_coroutine_threadsafe(work, session.loop)
        except RuntimeError as error:  # the loop was closed just now
            work.close()
            raise APIError("the episode is over", status=410, code="episode_over") from error
        left = asyncio.create_task(wait_until_gone(receive))
        answered = asyncio.wrap_future(asked)
        try:
            await asyncio.wait([answered, left], return_when=asyncio.FIRST_COMPLETED)
            is_left = left.done()
        finally:
            left.cancel()
        with contextlib.suppress(RuntimeError):
            session.loop.call_soon_threadsafe(
                functools.partial(session.settle, ticket, is_left=is_left)
            )
        if is_left:
            answered.add_done_callback(lambda future: future.cancelled() or future.exception())
            return None
        try:
            return await answered
        except asyncio.CancelledError as error:
            raise APIError("the episode is over", status=410, code="episode_over") from error


class _Listener:
    """A server in a thread of its own.

    Args:
        app: what it serves.
        host: address to listen on, by a port that the kernel chooses.
    """

    def __init__(self, app: Any, host: str) -> None:
        import uvicorn

        try:
            self._socket = socket.create_server((host, 0), backlog=2048)
        except OSError as error:
            raise ConfigError(f"rollout.agent: can't listen on host {host!r}: {error}") from error
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            log_level="warning",
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="gateway", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server and its connections."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
