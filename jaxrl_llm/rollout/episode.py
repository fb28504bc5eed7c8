"""Episodes: an append-only stream of tokens, drawn by the policy or told to it.

An episode whose agent begins a history anew has several chains: each is what the policy reads and
draws in one context. They lie in one stream, in the order in which they were drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int

from jaxrl_llm.models.moe.routing import NO_ROUTE
from jaxrl_llm.models.vision.inputs import Visual
from jaxrl_llm.rollout.types import Completion
from jaxrl_llm.types import ROUTES, VISUALS

NOT_DRAWN = -1
"""The turn and the version of a token that the policy did not draw."""
NO_CHAIN = -1
"""The chain of a place that holds no token."""


class EpisodePiece(NamedTuple):
    """A part of an episode's stream, of one origin.

    Attributes:
        tokens: token ids.
        logprobs: under the policy that drew them; 0 where they were told.
        versions: of the weights that drew them; -1 where they were told.
        drawn: whether the policy drew them; else a tool, an environment or the template told them.
        chain: number of the chain that it belongs to, in the order of their first turns. The first
            piece of a later chain is its prompt.
        visuals: images and videos in it, in the order of their placeholder tokens.
    """

    tokens: Int[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    versions: Int[np.ndarray, " T"]
    drawn: bool
    chain: int = 0
    visuals: tuple[Visual, ...] = ()

    @classmethod
    def told(
        cls, tokens: Sequence[int], chain: int = 0, visuals: tuple[Visual, ...] = ()
    ) -> "EpisodePiece":
        """Return a piece that the policy did not draw."""
        count = len(tokens)
        return cls(
            np.array(tokens, np.int32),
            np.zeros(count, np.float32),
            np.full(count, NOT_DRAWN, np.int32),
            drawn=False,
            chain=chain,
            visuals=visuals,
        )


class ToolRecord(NamedTuple):
    """What came of one call of a tool, or of one step of an environment.

    Attributes:
        name: of the tool; of the environment.
        failure: None, or why there was no usable answer: failed, timeout, died, broken.
        seconds: that it took.
    """

    name: str
    failure: str | None
    seconds: float


@dataclass(frozen=True, eq=False)
class Episode:
    """One episode of the policy: a prompt, and what was drawn and told after it.

    A plain answer is an episode of one turn.

    Attributes:
        prompt: token ids before the first turn.
        pieces: what follows, in order, of all chains.
        finish: why it ended: "stop" (the last turn ended and nothing follows), "length" (no tokens
            left), "turns" (no turns left), "end" (a tool or the environment ended it), "timeout",
            or "broken" (it failed for no fault of the policy).
        stopped_by: the token or text that ended the last turn, if one did.
        rewards: of each turn; none are zeros.
        score: what the environment returned, if there is one.
        messages: the chat as it was read, from the prompt on; empty where it is a plain answer. Of
            several chains, that which drew last.
        tool_records: of each call, in order.
        error: why it is broken.
        seconds: from its start to its end.
        last_answer: the text of the last turn; None of a plain answer.
        chats: the messages of each chain, by number; empty where there is one.
        routes: of each chain, by number, the experts that its tokens went to in the engine, from
            its first token on; nothing where the engine does not record them.
        prompt_visuals: images and videos before the first turn, in the order of their tokens.
    """

    prompt: tuple[int, ...]
    pieces: tuple[EpisodePiece, ...]
    finish: str
    stopped_by: int | str | None = None
    rewards: tuple[float, ...] = ()
    score: float | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tool_records: tuple[ToolRecord, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    last_answer: str | None = None
    chats: tuple[tuple[dict[str, Any], ...], ...] = ()
    routes: tuple[Int[np.ndarray, "_ M experts"] | None, ...] = ()
    prompt_visuals: tuple[Visual, ...] = ()

    @classmethod
    def of(
        cls, prompt: Sequence[int], completion: Completion, visuals: tuple[Visual, ...] = ()
    ) -> "Episode":
        """Return a plain answer as an episode of one turn."""
        return cls(
            tuple(prompt),
            (EpisodePiece(*completion[:3], drawn=True),),
            completion.finish,
            completion.stopped_by,
            routes=(completion.routes,),
            prompt_visuals=visuals,
        )

    @property
    def usable(self) -> bool:
        """Whether it can be trained on and counted in its group's baseline."""
        return self.error is None

    @cached_property
    def tokens(self) -> Int[np.ndarray, " T"]:
        """Token ids after the prompt, drawn and told."""
        return _joined([piece.tokens for piece in self.pieces], np.int32)

    @cached_property
    def logprobs(self) -> Float32[np.ndarray, " T"]:
        """Log-probs of `tokens` as they were drawn; 0 where they were told."""
        return _joined([piece.logprobs for piece in self.pieces], np.float32)

    @cached_property
    def versions(self) -> Int[np.ndarray, " T"]:
        """Version of the weights that drew each of `tokens`; -1 where they were told."""
        return _joined([piece.versions for piece in self.pieces], np.int32)

    @cached_property
    def turn_ids(self) -> Int[np.ndarray, " T"]:
        """Number of the turn that drew each of `tokens`, from 0; -1 where they were told."""
        ids, turn = [], -1
        for piece in self.pieces:
            turn += piece.drawn
            ids.append(np.full(len(piece.tokens), turn if piece.drawn else NOT_DRAWN, np.int32))
        return _joined(ids, np.int32)

    @cached_property
    def chain_ids(self) -> Int[np.ndarray, " T"]:
        """Number of the chain that each of `tokens` belongs to."""
        pieces = self.pieces
        return _joined([np.full(len(p.tokens), p.chain, np.int32) for p in pieces], np.int32)

    @property
    def visuals(self) -> tuple[Visual, ...]:
        """Images and videos of the prompt and of all chains, in the order of the stream."""
        return (*self.prompt_visuals, *(v for piece in self.pieces for v in piece.visuals))

    @property
    def chains(self) -> int:
        """How many chains it has: contexts in which the policy drew."""
        return 1 + max((piece.chain for piece in self.pieces), default=0)

    @property
    def last_chain(self) -> "Episode":
        """The chain that drew last, as an episode of its own; it has no rewards of turns."""
        if self.chains == 1:
            return self
        number = next((p.chain for p in reversed(self.pieces) if p.drawn), 0)
        prompt, own = self.prompt, [piece for piece in self.pieces if piece.chain == number]
        visuals = self.prompt_visuals
        if number:
            prompt, visuals, own = tuple(own[0].tokens.tolist()), own[0].visuals, own[1:]
        return replace(
            self,
            prompt=prompt,
            pieces=tuple(piece._replace(chain=0) for piece in own),
            rewards=(),
            chats=(),
            routes=self.routes[number : number + 1],
            prompt_visuals=visuals,
        )

    @property
    def drawn(self) -> Bool[np.ndarray, " T"]:
        """Whether the policy drew each of `tokens`."""
        return self.turn_ids != NOT_DRAWN

    @property
    def turns(self) -> int:
        """How many turns the policy drew."""
        return sum(piece.drawn for piece in self.pieces)

    @property
    def num_turns(self) -> int:
        """How many turns there are as verl counts them, the user's first and all others."""
        return 1 + len(self.pieces)

    @property
    def token_rewards(self) -> Float32[np.ndarray, " T"]:
        """The reward of each turn on the last of its `tokens`; 0 on all others."""
        rewards = np.zeros(len(self.tokens), np.float32)
        for turn, reward in enumerate(self.rewards):
            rewards[np.flatnonzero(self.turn_ids == turn)[-1]] = reward
        return rewards


def laid_out_routes(
    episodes: Sequence[Episode], chain_ids: np.ndarray, usable: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the experts that each token went to in the engine [B T M experts], by their field.

    Args:
        episodes: B of them.
        chain_ids: the chain that each token belongs to [B T].
        usable: which episodes can be trained on [B].

    Returns:
        `NO_ROUTE` where none are known; no field if none are of any token.
    """
    recorded = [r for e in episodes for r in e.routes if r is not None]
    if not recorded:
        return {}
    routes = np.full((*chain_ids.shape, *recorded[0].shape[1:]), NO_ROUTE, recorded[0].dtype)
    for i in np.flatnonzero(usable).tolist():
        for chain, known in enumerate(episodes[i].routes):
            if known is not None:
                places = np.flatnonzero(chain_ids[i] == chain)[: len(known)]
                routes[i, places] = known[: len(places)]
    return {ROUTES: routes}


def laid_out_visuals(episodes: Sequence[Episode], usable: np.ndarray) -> dict[str, np.ndarray]:
    """Return the images and videos of each episode [B], by their field; no field without any.

    Of an episode that is not usable they are those of the prompt.
    """
    visuals = np.empty(len(episodes), object)
    for i, episode in enumerate(episodes):
        visuals[i] = episode.visuals if usable[i] else episode.prompt_visuals
    return {VISUALS: visuals} if any(visuals) else {}


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
