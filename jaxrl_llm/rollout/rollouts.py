"""Episodes and rollouts: what an engine samples for prompts, and the arrays made of it.

An episode is an append-only stream of tokens, sampled by the policy or observed by it. Where an
agent begins its history anew, the episode has several chains: each is what the policy reads and
samples in one context. They lie in one stream, in the order in which they were sampled.
"""

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int

from jaxrl_llm.data.dataset import Prompt, load_prompts
from jaxrl_llm.models.inputs import Visual
from jaxrl_llm.models.moe.routing import NO_ROUTE
from jaxrl_llm.monitoring.activity import Activity, activity
from jaxrl_llm.rollout.engine import (
    NOT_DRAWN,
    Completion,
    Engine,
    Listener,
    Request,
    SamplingParams,
    Stop,
)
from jaxrl_llm.types import ROUTES, VISUALS, Batch

NO_CHAIN = -1
"""The chain of a place that holds no token."""


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
        pieces: what follows, in order, of all chains. The first one of a later chain is its
            prompt.
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
    pieces: tuple[Completion, ...]
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
            (completion.as_piece(),),
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


class Rollouts(NamedTuple):
    """B sampled episodes; those of one prompt lie side by side. A plain answer is one of one turn.

    Attributes:
        prompts: of each episode.
        episodes: what was drawn and told.
        texts: of all that follows the prompt, without the token that stopped the last turn; of
            several chains, that of the one that drew last.
        metrics: of the sampling, by name.
    """

    prompts: list[Prompt]
    episodes: list[Episode]
    texts: list[str]
    metrics: Mapping[str, float] = MappingProxyType({})

    def take(self, rows: Sequence[int]) -> "Rollouts":
        """Return some of the episodes, by index."""
        return Rollouts(
            [self.prompts[i] for i in rows],
            [self.episodes[i] for i in rows],
            [self.texts[i] for i in rows],
            self.metrics,
        )

    def join(self, other: "Rollouts") -> "Rollouts":
        """Return these episodes, then the other's, with the other's metrics."""
        return Rollouts(
            self.prompts + other.prompts,
            self.episodes + other.episodes,
            self.texts + other.texts,
            other.metrics,
        )


@dataclass(eq=False)
class EpisodeState:
    """An episode to sample, and how far it has come.

    Attributes:
        prompt: that it begins with.
        seed: of the episode.
        draw: entropy of the seeds of all episodes that were begun with it.
        number: of the episode among these.
        turns: what was drawn, turn by turn; the last one may not be whole.
        seeds: of these turns in an agent's episode, by which they are known again.
        asked: seed of the turn that was last asked for.
        episode: the whole episode, once it has ended.
        text: of all that follows its prompt, once it was asked for.
        limit: tokens after which an answer is left as if it were not needed; None: at its end.
    """

    prompt: Prompt
    seed: int
    draw: tuple[int, ...] = ()
    number: int = 0
    turns: list[Completion] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    asked: int = 0
    episode: Episode | None = None
    text: str | None = None
    limit: int | None = None

    @property
    def drawn(self) -> int:
        """Return how many tokens are drawn."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def is_open(self) -> bool:
        """Return whether there is something to draw."""
        return self.episode is None and (self.limit is None or self.drawn < self.limit)

    def keep_unfinished(self, drawn: Completion) -> None:
        """Keep what is drawn of the turn that was last asked for, behind those that are whole."""
        pairs = zip(self.seeds, self.turns, strict=True)
        whole = [(seed, turn) for seed, turn in pairs if turn.finish]
        self.seeds = [*(seed for seed, _ in whole), self.asked]
        self.turns = [*(turn for _, turn in whole), drawn]


OnEnd = Callable[[EpisodeState], None]
"""Called with an episode that has ended, in any thread."""


def begin_episodes(
    prompts: Sequence[Prompt], samples: int, seed: tuple[int, ...]
) -> list[EpisodeState]:
    """Return G episodes for each prompt, of which nothing is drawn yet.

    Images and videos of the prompts are decoded.

    Args:
        prompts: P prompts.
        samples: G.
        seed: entropy of this call; each episode gets a seed of its own from it.
    """
    repeated = [prompt for prompt in load_prompts(prompts) for _ in range(samples)]
    seeds = answer_seeds(seed, len(repeated))
    return [
        EpisodeState(prompt, own, seed, number)
        for number, (prompt, own) in enumerate(zip(repeated, seeds, strict=True))
    ]


def sample(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    samples: int,
    seed: tuple[int, ...],
    decode: Callable[[Any], str],
) -> Rollouts:
    """Draw G answers for each prompt.

    Args:
        engine: holds the policy.
        prompts: P prompts.
        sampling: how to sample.
        samples: G.
        seed: entropy of this call; each answer gets a seed of its own from it.
        decode: answer's token ids, without the stop token, to text.
    """
    states = begin_episodes(prompts, samples, seed)
    sample_states(engine, states, sampling)
    return as_rollouts(states, decode)


def sampling_activity(
    states: Sequence[EpisodeState], engine: Engine | None = None
) -> contextlib.AbstractContextManager[Activity]:
    """Return the activity of drawing answers.

    Args:
        states: of the answers.
        engine: what is in flight there is not whole; None where answers say so when they end.
    """

    has_begun = False

    def count() -> int:
        nonlocal has_begun
        stats = None if engine is None else engine.stats()
        if stats is not None:
            has_begun |= stats.in_flight > 0  # before, the engine has not got them yet
            return len(states) - stats.in_flight if has_begun else 0
        return sum(state.episode is not None for state in states)

    return activity("sampling", len(states), count=count)


def sample_states(
    engine: Engine,
    states: Sequence[EpisodeState],
    sampling: SamplingParams,
    *,
    needed: int | None = None,
    stop: Stop | None = None,
    on_end: OnEnd | None = None,
) -> None:
    """Draw plain answers, or go on with them.

    Args:
        engine: holds the policy.
        states: answers; those that are whole stay as they are.
        sampling: how to sample.
        needed: return once the first so many are whole, with the others as they stand; None: all.
        stop: return once it is set, whatever is whole.
        on_end: called with each that ends before all have.

    Raises:
        EngineError: the engine can't leave answers before their end.
    """
    for state in states:
        if state.episode is None and state.turns and state.turns[-1].finish:
            state.episode = Episode.of(state.prompt.tokens, state.turns[-1], state.prompt.visuals)
    needed = len(states) if needed is None else needed
    first = [state for state in states[:needed] if state.is_open]
    begun = first + [state for state in states[needed:] if state.is_open]
    if not first or (stop is not None and stop.is_set):
        return
    requests = [
        Request(
            state.prompt.tokens,
            sampling
            if state.limit is None
            else replace(sampling, max_new_tokens=min(state.limit, sampling.max_new_tokens)),
            state.seed,
            state.turns[-1] if state.turns else None,
            state.prompt.visuals,
        )
        for state in begun
    ]
    longest = sampling.max_new_tokens

    def tell(number: int, completion: Completion) -> None:
        if keep_drawn(begun[number], completion, longest) and on_end is not None:
            on_end(begun[number])

    listener = None if on_end is None else tell
    with sampling_activity(begun, engine):
        completions = sample_first(engine, requests, len(first), stop, listener)
    for state, completion in zip(begun, completions, strict=True):
        keep_drawn(state, completion, longest)


def keep_drawn(state: EpisodeState, drawn: Completion, longest: int) -> bool:
    """Keep what is drawn of a plain answer; return whether it has ended, now for the first time.

    Args:
        state: of the answer.
        drawn: all of it.
        longest: its tokens at most, where it has no limit.
    """
    if state.episode is not None:
        return False
    state.turns = [drawn] if len(drawn.tokens) else []
    if state.limit is not None and drawn.finish == "length" and len(drawn.tokens) < longest:
        state.turns = [drawn._replace(finish="")]  # it has come to its limit
    elif drawn.finish:
        state.episode = Episode.of(state.prompt.tokens, drawn, state.prompt.visuals)
    return state.episode is not None


def sample_first(
    engine: Engine,
    requests: Sequence[Request],
    needed: int,
    stop: Stop | None = None,
    listener: Listener | None = None,
) -> list[Completion]:
    """Sample until the first requests have their answers or it is to stop; return all as they are.

    Raises:
        EngineError: not all are needed, and the engine can't leave answers before their end.
    """
    if needed == len(requests) and stop is None and listener is None:
        return engine.sample(requests)
    return engine.sample_until(requests, needed, stop, listener)


def as_rollouts(states: Sequence[EpisodeState], decode: Callable[[Any], str]) -> Rollouts:
    """Return episodes that are whole, with their texts."""
    episodes = [state.episode for state in states if state.episode is not None]
    for state, episode in zip(states, episodes, strict=True):
        state.text = episode_text(episode, decode) if state.text is None else state.text
    texts = [state.text for state in states if state.text is not None]
    return Rollouts([state.prompt for state in states], episodes, texts)


def episode_text(episode: Episode, decode: Callable[[Any], str]) -> str:
    """Return the text of all that follows an episode's prompt, less the token that stopped it.

    Of several chains it is that of the one that drew last.
    """
    tokens = episode.last_chain.tokens
    return decode(tokens[: len(tokens) - isinstance(episode.stopped_by, int)])


def answer_seeds(seed: tuple[int, ...], count: int) -> list[int]:
    """Return the seeds of so many answers, from the entropy of a call.

    >>> answer_seeds((0, 1), 3)[:2] == answer_seeds((0, 1), 2)
    True
    """
    return np.random.SeedSequence(seed).generate_state(count).tolist()


def side_by_side(rollouts: Rollouts, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids of prompts and answers [B T], and their numbers [B].

    T is `max_tokens`. Where chains of an episode have more together, it is that times a power of
    two, so that few widths are ever compiled for.
    """
    sizes = np.array([len(e.prompt) + len(e.tokens) for e in rollouts.episodes], np.int32)
    several = [size for size, e in zip(sizes, rollouts.episodes, strict=True) if e.chains > 1]
    while max_tokens < max(several, default=0):
        max_tokens *= 2
    tokens = np.zeros((len(rollouts.prompts), max_tokens), np.int32)
    for i, episode in enumerate(rollouts.episodes):
        tokens[i, : sizes[i]] = (*episode.prompt, *episode.tokens)
    return tokens, sizes


def lay_out(rollouts: Rollouts, *, samples: int, max_tokens: int, compares: bool = True) -> Batch:
    """Lay episodes out as a batch [B T], an episode's chains in the order of their turns.

    An episode that is not usable has its prompt only, an empty mask and a group of its own.

    Args:
        rollouts: B episodes.
        samples: G, the episodes of each prompt.
        max_tokens: T, at least the longest chain with its prompt; see `side_by_side`.
        compares: whether the episodes of a prompt are compared with each other. Then one that
            alone is left of its group is not usable, either.

    Returns:
        A batch with the fields `mask`, `response_lengths`, `group_ids`, `rollout_logprobs`,
        `turn_ids`, `chain_ids`, `versions`, `turns` and `usable`, and as `rewards` those of the
        turns, each on the last token of its turn; where the engine has recorded them the `routes`,
        and where there are images and videos the `visuals`.
    """
    tokens, sizes = side_by_side(rollouts, max_tokens)
    usable = usable_rows(rollouts, samples, compares=compares)
    for i in np.flatnonzero(~usable):
        sizes[i] = len(rollouts.episodes[i].prompt)
        tokens[i, sizes[i] :] = 0
    logprobs, rewards = (np.zeros(tokens.shape, np.float32) for _ in range(2))
    turn_ids, versions = (np.full(tokens.shape, NOT_DRAWN, np.int32) for _ in range(2))
    chain_ids = np.where(np.arange(tokens.shape[1]) < sizes[:, None], 0, NO_CHAIN)
    for i in np.flatnonzero(usable):
        episode, row = rollouts.episodes[i], slice(len(rollouts.episodes[i].prompt), sizes[i])
        logprobs[i, row], turn_ids[i, row] = episode.logprobs, episode.turn_ids
        versions[i, row], chain_ids[i, row] = episode.versions, episode.chain_ids
        rewards[i, row] = episode.token_rewards
    mask, rows = turn_ids != NOT_DRAWN, np.arange(len(sizes), dtype=np.int32)
    return Batch(
        tokens,
        sizes,
        {
            "mask": mask,
            "response_lengths": mask.sum(1, dtype=np.int32),
            "group_ids": np.where(usable, rows // samples, len(rows) + rows).astype(np.int32),
            "rollout_logprobs": logprobs,
            "rewards": rewards,
            "turn_ids": turn_ids,
            "chain_ids": chain_ids.astype(np.int32),
            "versions": versions,
            "turns": turn_ids.max(1, initial=NOT_DRAWN) + 1,
            "usable": usable,
            **laid_out_routes(rollouts.episodes, chain_ids, usable),
            **laid_out_visuals(rollouts.episodes, usable),
        },
    )


def usable_rows(rollouts: Rollouts, samples: int, *, compares: bool) -> np.ndarray:
    """Return which episodes can be trained on [B]; the arguments are those of `lay_out`."""
    usable = np.array([episode.usable for episode in rollouts.episodes], bool)
    return without_lone(usable, samples) if compares else usable


def without_lone(usable: np.ndarray, samples: int) -> np.ndarray:
    """Return which episodes [B] are usable, but for those that alone are left of their group.

    >>> without_lone(np.array([True, True, False, True]), 2)
    array([ True,  True, False, False])
    """
    groups = usable.reshape(-1, samples)
    enough = (groups.sum(1) > 1) | (samples == 1)
    return (groups & enough[:, None]).reshape(-1)


TURN, TOOL, REQUEST = 1, 2, 3
"""What a seed is for, as a part of its entropy."""


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: that of a plain answer for the first one.

    >>> turn_seed(7, 0), turn_seed(7, 1) == turn_seed(7, 2)
    (7, False)
    """
    if turn == 0:
        return seed
    return int(np.random.SeedSequence((seed, TURN, turn)).generate_state(1)[0])


def tool_seed(seed: int) -> int:
    """Return the seed of an episode's tools and environment.

    >>> tool_seed(7) == tool_seed(8)
    False
    """
    return int(np.random.SeedSequence((seed, TOOL)).generate_state(1)[0])


def request_seed(seed: int, prompt: Sequence[int], number: int) -> int:
    """Return the seed of a turn that a program has asked for, whenever it did.

    Args:
        seed: of the episode.
        prompt: token ids.
        number: of the request among those of the episode with this prompt.

    >>> request_seed(7, (1, 2), 0) == request_seed(7, (1, 2), 1)
    False
    """
    digest = hashlib.sha256(np.asarray(prompt, "<i8").tobytes()).digest()[:8]
    entropy = (seed, REQUEST, int.from_bytes(digest, "little"), number)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
