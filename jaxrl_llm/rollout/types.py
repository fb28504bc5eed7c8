"""Requests to an engine, its answers, and what bounds them: the records of every engine."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from jaxrl_llm.models.vision.inputs import Visual


class Receipt(NamedTuple):
    """What an engine answers when it has loaded weights.

    Attributes:
        version: of the weights.
        checksum: of the weights as it holds them; None of an engine that holds arrays of other
            shapes, and has compared the checksum of each with that of what was sent.
        moved_bytes: what had to travel to devices that did not hold it.
    """

    version: int
    checksum: int | None
    moved_bytes: int = 0


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one answer. What is cut is cut in this order: top-k, top-p, min-p.

    Attributes:
        max_new_tokens: the longest answer.
        temperature: softmax temperature; 0 takes the likeliest token.
        top_p: sample from the smallest set of tokens with this mass.
        top_k: sample from the k likeliest tokens; 0 means all.
        min_p: sample from tokens at least this share as likely as the likeliest; 0 means all.
        repetition_penalty: logits of tokens that prompt or answer hold are divided by it where
            positive and multiplied where negative; 1 changes none.
        logit_bias: pairs of a token and what is added to its logit.
        stop_ids: tokens that end the answer; the one that did is part of it.
        stop: texts that end the answer; the token that completes one is the answer's last. One that
            is a special token's is as good as its id among `stop_ids`.
        top_logprobs: how many of the likeliest tokens are reported at each step.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0

    @property
    def asks_for_extras(self) -> bool:
        """Return whether logits are changed or reported, beyond drawing from them."""
        return bool(self.repetition_penalty != 1 or self.logit_bias or self.top_logprobs)


LEAST_LOGPROB = -9999.0
"""What stands for the log-prob of a token of no probability: JSON has no infinity."""


class ScoredTokens(NamedTuple):
    """Log-probs of given tokens, each given those before it, before any temperature.

    The first token has none: its numbers are 0.

    Attributes:
        logprobs: of each token, in nats.
        top_ids: the likeliest tokens in its place, likeliest first.
        top_logprobs: their log-probs.
    """

    logprobs: Float32[np.ndarray, " T"]
    top_ids: Int[np.ndarray, "T K"]
    top_logprobs: Float32[np.ndarray, "T K"]


class Completion(NamedTuple):
    """One sampled answer, or a piece of one.

    Attributes:
        tokens: token ids, the stop token included.
        logprobs: log-probs of these tokens under softmax(logits / temperature), before top-k, top-p
            and min-p cut it (at temperature 0: under softmax(logits)).
        versions: of the weights that sampled each token.
        finish: "stop", "length", or "" for a piece that others follow and an answer that is not
            whole.
        stopped_by: the token or the text that ended it, if one did.
        top: the likeliest tokens of each step and their log-probs, likeliest first, where the
            request asks for them.
        routes: the experts to which the engine has sent the tokens of the prompt and of the answer,
            in order and but for the last, of a whole answer where the engine records them
            (`models.moe.routing.replay_routes`); None: it does not.
    """

    tokens: Int[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    versions: Int[np.ndarray, " T"]
    finish: str
    stopped_by: int | str | None = None
    top: tuple[Int[np.ndarray, "T top"], Float32[np.ndarray, "T top"]] | None = None
    routes: Int[np.ndarray, "N M experts"] | None = None


@dataclass(frozen=True)
class Request:
    """One answer to sample. The answer depends on the seed, not on what else is in flight.

    Attributes:
        prompt: token ids.
        sampling: how to sample.
        seed: of the answer.
        drawn: what has been drawn of the answer, if it was begun before: its tokens are read, and
            it goes on after them. The answer holds them, too.
        visuals: images and videos of the prompt, in the order of their placeholder tokens, of which
            the prompt has one for each token of a visual.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    drawn: Completion | None = field(default=None, compare=False)
    visuals: tuple[Visual, ...] = ()


class EpisodeLimits(NamedTuple):
    """What bounds one episode.

    Attributes:
        new_tokens: tokens after the prompt, drawn and told; of each chain. A later chain and its
            prompt have `prompt_tokens` + `new_tokens` together.
        prompt_tokens: tokens of the prompt, with what an environment says first.
        turns: that the policy draws, in all chains.
        turn_tokens: drawn in one turn; None: as many as are left.
        observation_tokens: of what a tool or an environment says at once; the middle of a longer
            text is left out.
        parallel_calls: in one turn; further ones are answered with an error.
        visual_tokens: of images and videos of a chain, with those of its prompt; None: any number.
    """

    new_tokens: int
    prompt_tokens: int
    turns: int = 8
    turn_tokens: int | None = None
    observation_tokens: int = 512
    parallel_calls: int = 4
    visual_tokens: int | None = None
