"""What the chats of one episode write together, in the order in which it comes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxrl_llm.rollout.contents import Stretch
from jaxrl_llm.rollout.episode import Episode, EpisodePiece, ToolRecord
from jaxrl_llm.rollout.types import Completion

ChainTurn = tuple[Stretch, Completion, str, Sequence[dict[str, Any]]]
"""What is told before a turn, the turn, its text, and the messages of both."""


@dataclass(eq=False)
class EpisodeLog:
    """The record of an episode while it is held, shared by its chats.

    Attributes:
        opening: token ids before the first turn, and their images; None before it.
        pieces: what follows, in order, of all chains.
        rewards: of each turn.
        stopped_by: the token or text that ended the last turn, if one did.
        last_finish: "stop" or "length" of the last turn.
        last_answer: text of the last turn.
        chats: the messages of each chain, by number; they grow.
        routes: of each chain, by number, as `Episode.routes`.
        newest: number of the chain that has drawn the last turn.
        end: why no further turn is drawn; "" before.
        is_generating: whether a turn is being drawn.
        tool_records: of each call, in order.
        score: what the environment returned, if there is one.
    """

    opening: Stretch | None = None
    pieces: list[EpisodePiece] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    stopped_by: int | str | None = None
    last_finish: str = "end"
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
            self.pieces.append(EpisodePiece.told(opening.tokens, number, opening.visuals))
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
        self.newest, self.last_answer = chain, answer
        self.stopped_by = completion.stopped_by
        self.last_finish = completion.finish

    def add_chain(self, opening: Stretch, turns: Sequence[ChainTurn]) -> None:
        """Add a chain whose turns are all drawn.

        Args:
            opening: its prompt.
            turns: in order.
        """
        messages: list[dict[str, Any]] = []
        number = self.begin_chain(opening, messages)
        for told, completion, answer, new in turns:
            if told.tokens:
                self.pieces.append(EpisodePiece.told(told.tokens, number, told.visuals))
            self.pieces.append(EpisodePiece(*completion[:3], drawn=True, chain=number))
            messages += new
            self.end_turn(number, completion, answer.strip())

    def episode(
        self,
        prompt: Stretch,
        messages: list[dict[str, Any]],
        seconds: float,
        error: str | None,
    ) -> Episode:
        """Return what has been drawn and told.

        Args:
            prompt: what stands for the opening, before there is one.
            messages: that stand for those of a chain, before one has drawn.
            seconds: from the episode's start to its end.
            error: why it is broken.
        """
        chats = tuple(tuple(chat) for chat in self.chats)
        opening = prompt if self.opening is None else self.opening
        return Episode(
            opening.tokens,
            tuple(self.pieces),
            "broken" if error is not None else self.end or self.last_finish,
            self.stopped_by,
            tuple(self.rewards),
            self.score,
            chats[self.newest] if chats else tuple(messages),
            tuple(self.tool_records),
            error,
            seconds,
            self.last_answer,
            chats if len(chats) > 1 else (),
            tuple(self.routes),
            opening.visuals,
        )
