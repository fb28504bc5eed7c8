"""A reward model in this process, and how it is given answers."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import RewardConfig
from jaxrl_llm.data.chat import USER, VOCABULARIES, ChatTemplate, Message, load_tokenizer
from jaxrl_llm.data.dataset import check_ids, encode_steps, last_tokens, split_steps
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_scoring, read_spec
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rewards.scoring import ModelScores
from jaxrl_llm.rollout.rollouts import Rollouts
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.forward import (
    ForwardConfig,
    Inference,
    hidden_states,
    token_scores_from_hidden,
)
from jaxrl_llm.training.load_model import microbatch_shape, read_model
from jaxrl_llm.types import Batch, Rows


class ScorerInput(NamedTuple):
    """A prompt and an answer, as a reward model reads them.

    Attributes:
        tokens: of both.
        step_ends: index in `tokens` of each step's last one, for a process reward model.
        drawn_ends: index among the policy's tokens of each step's last one.
    """

    tokens: tuple[int, ...]
    step_ends: tuple[int, ...] = ()
    drawn_ends: tuple[int, ...] = ()


class Unreadable(Exception):
    """An answer that a reward model can't be given; the message says why."""


Encode = Callable[[Rollouts, int], ScorerInput]
"""(rollouts, row) -> what a reward model reads of it; raises Unreadable."""


def policy_tokens(rollouts: Rollouts, row: int) -> ScorerInput:
    """Return the tokens as they were read and drawn, the one that stopped the answer included.

    Of several chains they are those of the one that drew last.
    """
    episode = rollouts.episodes[row].last_chain
    return ScorerInput((*episode.prompt, *map(int, episode.tokens)))


def answer_input(template: ChatTemplate, rollouts: Rollouts, row: int) -> ScorerInput:
    """Encode the prompt, and the answer to its closing token, as `tokenize_preferences` does."""
    messages = _shown(template, whole_chat(rollouts, row))
    with unreadable():
        prompt, answer = template.answer(messages, rollouts.prompts[row].tools)
    return ScorerInput((*prompt, *answer))


def chat_input(template: ChatTemplate, rollouts: Rollouts, row: int) -> ScorerInput:
    """Encode the chat as the template has it, with the answer as the assistant's message."""
    messages = _shown(template, whole_chat(rollouts, row))
    with unreadable():
        return ScorerInput(tuple(template.chat(messages, rollouts.prompts[row].tools)))


def _shown(template: ChatTemplate, messages: Sequence[Message]) -> list[Message]:
    """Return a chat whose last answer has its reasoning in its text, if need be."""
    last = messages[-1]
    reasoning, content = last.get("reasoning_content"), last.get("content") or ""
    if not reasoning or template.shows_reasoning:
        return list(messages)
    last = {key: value for key, value in last.items() if key != "reasoning_content"}
    return [*messages[:-1], {**last, "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}]


def steps_input(
    template: ChatTemplate,
    rollouts: Rollouts,
    row: int,
    *,
    separator: str,
    splits_at: str,
    decode: Callable[[Sequence[int]], str],
) -> ScorerInput:
    """Encode the prompt, and each step of an answer with a separator behind it.

    As `data.dataset` encodes the steps of rows that a process reward model is trained on.

    Args:
        template: of a process reward model.
        rollouts: B answers.
        row: of one of them.
        separator: that the model was trained with.
        splits_at: text that ends a step of an answer.
        decode: from the policy's tokens to their text.
    """
    prompt = whole_chat(rollouts, row)[:-1]
    steps = split_steps(rollouts.texts[row], splits_at)
    with unreadable():
        begin = template.prompt(prompt, rollouts.prompts[row].tools)
    tokens, ends = encode_steps(template.tokenizer, [text for text, _ in steps], separator)
    drawn = rollouts.episodes[row].last_chain.tokens.tolist()
    places = last_tokens(decode, drawn, [end for _, end in steps])
    return ScorerInput((*begin, *tokens), tuple(len(begin) + end for end in ends), tuple(places))


def whole_chat(rollouts: Rollouts, row: int) -> list[Message]:
    """Return the messages of a prompt and what followed it.

    Raises:
        Unreadable: the prompt was given as tokens.
    """
    episode, messages = rollouts.episodes[row], rollouts.prompts[row].messages
    if episode.messages:
        return list(episode.messages)
    if not messages:
        raise Unreadable("its prompt has no messages, only tokens")
    return [*messages, {"role": "assistant", "content": rollouts.texts[row]}]


@contextlib.contextmanager
def unreadable() -> Iterator[None]:
    """Say why a chat template refuses a chat."""
    try:
        yield
    except ValueError as error:
        raise Unreadable(str(error)) from error


def scorer_batch(
    rollouts: Rollouts, encode: Encode, width: int
) -> tuple[Batch, list[ScorerInput | None], dict[int, str]]:
    """Encode prompts and answers, and lay them out side by side.

    Args:
        rollouts: B answers.
        encode: one of them.
        width: the most tokens of a sequence.

    Returns:
        All as a reward model reads them: what can't be read is one token. The inputs, None of what
        can't be read; and why it can't, by row.
    """
    count = len(rollouts.prompts)
    tokens, sizes = np.zeros((count, width), np.int32), np.ones(count, np.int32)
    inputs: list[ScorerInput | None] = [None] * count
    failures = {}
    for row in range(count):
        try:
            given = encode(rollouts, row)
        except Unreadable as error:
            failures[row] = str(error)
            continue
        if len(given.tokens) > width:
            failures[row] = (
                f"{len(given.tokens)} tokens of the reward model, more than its {width}: raise "
                "reward.max_tokens"
            )
            continue
        inputs[row], sizes[row] = given, len(given.tokens)
        tokens[row, : sizes[row]] = given.tokens
    return Batch(tokens, sizes, {}), inputs, failures


# The forward pass of a reward model that is given: it scores prompt and answer, untrained.


log = logging.getLogger(__name__)

AGGREGATES: dict[str, Callable[[np.ndarray], Any]] = {
    "min": np.min,
    "product": np.prod,
    "last": lambda scores: scores[-1],
    "mean": np.mean,
}
"""From the scores of an answer's steps to its own, by the names of reward.aggregate."""


def score_pass(
    model: ForwardConfig, shape: RowShape, layout: Layout, *, of_tokens: bool = False
) -> Inference:
    """Return a function from a reward model's parameters and a batch to its `scores`, by name.

    They are [B T], and of a model that scores whole sequences in the first column.

    Args:
        model: how the model is run.
        shape: of the micro-batches.
        layout: where it runs.
        of_tokens: whether each token has a score, of a value head.
    """

    def compute(params: Params, rest: Params, rows: Rows) -> dict[str, Array]:
        del rest
        hidden, _ = hidden_states(params, rows, model, layout.mesh)
        if of_tokens:
            return {"scores": token_scores_from_hidden(params, hidden, rows, model)}
        hidden = layout.merge_context(hidden)
        scores = model.model.sequence_scores(params, hidden, *map(jnp.asarray, rows.places))
        return {"scores": scores[:, None]}

    label = "process reward model" if of_tokens else "reward model"
    return Inference(compute, shape, layout.mesh, {}, model, label)


def open_reward_model(
    config: TrainConfig, path: str, tokenizer: Any, actor: Model, layout: Layout
) -> tuple[Params, Callable[[Rollouts], ModelScores]]:
    """Load a reward model in the compute dtype; return its parameters, and what scores answers.

    Args:
        config: of the run.
        path: Hugging Face directory or hub id of a sequence classifier with one label, or of a
            process reward model, a token classifier with one label.
        tokenizer: of the policy.
        actor: the policy.
        layout: where it stands.

    Raises:
        ConfigError: there is no such model, or it can't be given the answers.
    """
    reward, dtype = config.reward, config.model.dtype
    with config_errors_at("reward.classifier"):
        spec = read_spec(path)
        if not spec.reward_head and not spec.value_head:
            raise ValueError(
                f"{path} gives no score; expected a …ForSequenceClassification, or a process "
                "reward model, a …ForTokenClassification"
            )
        encode = choose_encoder(
            reward, path, spec, tokenizer, actor, has_episodes=config.rollout.has_episodes
        )
        longest = longest_input(
            reward,
            path,
            spec,
            longest=config.longest_sequence,
            row_tokens=config.batch.max_tokens_per_device,
            reads_text=encode is not policy_tokens,
        )
        spec = spec.for_length(longest)
        params = read_model(path, spec, layout).params
    if dtype != "float32":
        params = reshard(params, layout.of(declare(spec)), dtype=compute_dtypes(spec, dtype))
    forward = ForwardConfig(model=Decoder(spec), dtype=dtype)
    shape = microbatch_shape(
        config.batch, forward, layout, longest=longest, sequences=config.sequences_per_minibatch
    )
    run = score_pass(forward.over(shape), shape, layout, of_tokens=spec.value_head)

    def read(rollouts: Rollouts, row: int) -> ScorerInput:
        given = encode(rollouts, row)
        try:
            check_ids(given.tokens, spec.vocab_size)
        except ValueError as error:
            raise Unreadable(f"{path}: {error}") from error
        return given

    def score(rollouts: Rollouts) -> ModelScores:
        batch, inputs, failures = scorer_batch(rollouts, read, shape.width)
        values = run(params, batch)["scores"]
        if not spec.value_head:
            return ModelScores(values[:, 0].copy(), failures)  # not all of `values`
        ends = [given.step_ends if given else () for given in inputs]
        logits = [values[row, list(places)] for row, places in enumerate(ends)]
        drawn = [given.drawn_ends if given else () for given in inputs]
        return step_scores(logits, drawn, failures, reward)

    return params, score


def longest_input(
    reward: RewardConfig,
    path: str,
    spec: ModelSpec,
    *,
    longest: int,
    row_tokens: int,
    reads_text: bool,
) -> int:
    """Return the most tokens of a prompt and answer that a reward model is given.

    Args:
        reward: how the run scores.
        path: of the reward model.
        spec: of the reward model.
        longest: tokens of the policy's longest prompt and answer.
        row_tokens: capacity of a row.
        reads_text: whether it has its own tokens, of which there may be more than the policy's.

    Raises:
        ValueError: it has fewer positions, or the key for it makes no difference.
    """
    given, drawn = reward.max_tokens, "data.max_prompt_tokens + rollout.max_new_tokens"
    if given is not None and not reads_text:
        raise ValueError(
            f"{path} reads the policy's tokens, which {drawn} bounds: remove reward.max_tokens"
        )
    if given is None and reads_text:
        return min(2 * longest, spec.max_positions, row_tokens)
    if spec.max_positions < (given or longest):
        raise ValueError(
            f"{path} has {spec.max_positions} positions, but the longest sequence is "
            f"{'reward.max_tokens' if given else drawn} = {given or longest}"
        )
    return given or longest


def step_scores(
    logits: Sequence[np.ndarray],
    drawn: Sequence[Sequence[int]],
    failures: dict[int, str],
    reward: RewardConfig,
) -> ModelScores:
    """Return answers' scores from the logits of their steps.

    Args:
        logits: of each answer's steps.
        drawn: index of each step's last token among those that the policy drew.
        failures: answers that were not given.
        reward: says how the steps' scores make up an answer's.
    """
    of_steps = [1 / (1 + np.exp(-z.astype(np.float64))) for z in logits]
    aggregate = AGGREGATES[reward.aggregate]
    values = [0.0 if row in failures else aggregate(s) for row, s in enumerate(of_steps)]
    steps = [
        tuple(zip(places, scores.tolist(), strict=True))
        for places, scores in zip(drawn, of_steps, strict=True)
    ]
    return ModelScores(np.array(values), failures, steps, reward.step_rewards)


def choose_encoder(
    reward: RewardConfig,
    path: str,
    spec: ModelSpec,
    tokenizer: Any,
    actor: Model,
    *,
    has_episodes: bool,
) -> Encode:
    """Return how a reward model is given answers, as `reward.render` says.

    Args:
        reward: how the run scores.
        path: of the reward model.
        spec: of the reward model.
        tokenizer: of the policy.
        actor: the policy.
        has_episodes: whether answers have several turns.

    Raises:
        ValueError: it can't be given them so.
    """
    trained = read_scoring(path)
    if spec.value_head:
        if has_episodes:
            raise ValueError(
                f"{path} is a process reward model, which scores plain answers, but rollout.agent, "
                "rollout.tools or rollout.environment makes episodes of several turns"
            )
        return step_encoder(reward, path, trained.get("step_separator"), tokenizer)
    for key, default in (("aggregate", "min"), ("step_rewards", False), ("step_separator", None)):
        if getattr(reward, key) != default:
            raise ValueError(
                f"{path} scores whole answers, but reward.{key} is of a process reward model: "
                "remove it"
            )
    render, difference = reward.render, None
    if render in ("auto", "ids"):
        difference = other_tokens(path, spec, tokenizer, actor)
    if render == "ids" and difference:
        raise ValueError(difference)
    if render == "auto":
        render = trained.get("render", "chat") if difference else "ids"
    if render == "ids":
        if reward.chat_template_kwargs:
            raise ValueError(
                f"{path} reads the policy's tokens: remove reward.chat_template_kwargs, or set "
                "reward.render to answer or chat"
            )
        return policy_tokens
    template = own_template(path, reward)
    log.info("reward.classifier reads texts by its own tokenizer: reward.render=%s", render)
    return functools.partial(answer_input if render == "answer" else chat_input, template)


def step_encoder(reward: RewardConfig, path: str, trained: str | None, tokenizer: Any) -> Encode:
    """Return how a process reward model is given answers.

    Args:
        reward: how the run scores.
        path: of the reward model.
        trained: the separator that it was trained with, where its directory says so.
        tokenizer: of the policy.

    Raises:
        ValueError: it can't be given them.
    """
    separator = trained or reward.step_separator
    if separator is None:
        raise ValueError(
            f"{path} is a token classifier that does not say what ends a step; if it is a process "
            "reward model and no critic, set reward.step_separator"
        )
    if reward.render != "auto":
        raise ValueError(
            f"{path} is a process reward model, which reads steps by its own tokenizer: leave "
            f"reward.render={reward.render} out"
        )
    return functools.partial(
        steps_input,
        own_template(path, reward),
        separator=separator,
        splits_at=reward.step_separator or separator,
        decode=text_decoder(tokenizer),
    )


def own_template(path: str, reward: RewardConfig) -> ChatTemplate:
    """Load a reward model's chat template; ValueError unless it ends an answer."""
    template = ChatTemplate(load_tokenizer(path), reward.chat_template_kwargs)
    template.answer([USER, {"role": "assistant", "content": "Sure."}])
    return template


def other_tokens(path: str, spec: ModelSpec, tokenizer: Any, actor: Model) -> str | None:
    """Return in which way the policy's tokens mean something else to a reward model; None: in none.

    A directory without a tokenizer is believed if its vocabulary is large enough.
    """
    if not any((resolve(path) / name).is_file() for name in VOCABULARIES):
        if spec.vocab_size >= actor.vocab_size:
            return None
        raise ValueError(
            f"{path} has no tokenizer, and vocab_size={spec.vocab_size}, expected the policy's "
            f"{actor.vocab_size} or more: it would be given the policy's tokens"
        )
    difference = token_difference(path, tokenizer)
    if difference:
        return f"{difference}; reward.render: answer or chat gives it the text"
    if spec.vocab_size < actor.vocab_size:
        raise ValueError(
            f"{path} has vocab_size={spec.vocab_size}, expected the policy's {actor.vocab_size} or "
            "more: it is given the policy's tokens"
        )
    return None


def token_difference(path: str, tokenizer: Any) -> str | None:
    """Return which of the policy's tokens has another number in a directory; None: none has."""
    theirs = load_tokenizer(path).get_vocab()
    for token, number in tokenizer.get_vocab().items():
        if theirs.get(token) != number:
            return (
                f"{path} has another tokenizer: {token!r} is {theirs.get(token)} there and "
                f"{number} for the policy, whose tokens it is given"
            )
    return None
