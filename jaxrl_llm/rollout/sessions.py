"""The tools and the environment of one episode, as its agent sees them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.data.call_text import ToolCall
from jaxrl_llm.rollout.chat import BrokenEpisode, Chat
from jaxrl_llm.rollout.episode import ToolRecord
from jaxrl_llm.rollout.tools.pool import Session, ToolResult

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
        return await self._step(None)

    async def step(self, answer: str) -> Content:
        """Tell the environment a turn of the policy; return what it says.

        Where it has ended, the chat draws no further turn.

        Raises:
            BrokenEpisode: it failed.
        """
        return await self._step(answer)

    async def _step(self, answer: str | None) -> Content:
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


def record_end(chat: Chat, result: ToolResult) -> None:
    """Note in an episode the rewards that its tools have at its end.

    Raises:
        BrokenEpisode: infrastructure failed.
    """
    if result.reward or result.failure is not None:
        record(chat, result._replace(end=False))


def tool_message(call: ToolCall, content: Content) -> dict[str, Any]:
    """Return what a tool says as the message of a chat.

    >>> tool_message(ToolCall("add", {}, "call_0"), "3")
    {'role': 'tool', 'name': 'add', 'tool_call_id': 'call_0', 'content': '3'}
    """
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}
