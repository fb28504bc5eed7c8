"""Sampled episodes, as the training loop, evaluation and reward functions get them."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.dataset import Prompt, load_prompts
from jaxrl_llm.monitoring.activity import Activity, activity
from jaxrl_llm.rollout.engine import (
    CountingEngine,
    Engine,
    EngineError,
    Listener,
    PartialEngine,
    Stop,
)
from jaxrl_llm.rollout.episode import (
    NO_CHAIN,
    NOT_DRAWN,
    Episode,
    laid_out_routes,
    laid_out_visuals,
)
from jaxrl_llm.rollout.types import Completion, Request, SamplingParams
from jaxrl_llm.types import Batch


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
        if isinstance(engine, CountingEngine):
            in_flight = engine.stats().in_flight
            has_begun |= in_flight > 0  # before, the engine has not got them yet
            return len(states) - in_flight if has_begun else 0
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
    if not isinstance(engine, PartialEngine):
        raise EngineError(f"{type(engine).__name__} can't leave answers before their end")
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
