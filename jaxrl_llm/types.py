"""The axis legend and the records that cross module borders.

Axes: P prompts, G samples per prompt, B = P·G sequences, T tokens, R packed rows, L row length,
V vocabulary, D model width, N query heads, K key/value heads, H head width, F feed-forward width,
E experts.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float32, Int, Num

FIELDS: Mapping[str, str] = {
    "scores": "[B] score of each answer, with the penalties where there are some",
    "raw_scores": "[B] score of each answer as its scorer gave it",
    "rewards": "[B T] reward of each token: the score on the last one, with the penalties",
    "group_ids": "[B] which answers share a prompt",
    "mask": "[B T] true on tokens that the policy generated",
    "lengths": "[B] tokens that the policy generated",
    "logprobs": "[B T] log-probs under the policy that is being updated",
    "old_logprobs": "[B T] log-probs under the policy at the start of the step",
    "rollout_logprobs": "[B T] log-probs that the engine reported",
    "ref_logprobs": "[B T] log-probs under the reference",
    "reward_logprobs": "[B T] log-probs under the implicit reward model at the start of the step",
    "advantages": "[B T] what the advantage function returned",
    "returns": "[B T] what it returned besides: the targets of the critic",
    "values": "[B T] value of the state before each token; in the critic's loss, as it is updated",
    "old_values": "[B T] the same at the start of the step",
    "entropy": "[B T] entropy of the policy; in its loss, as it is updated",
    "sum_pi_squared": "[B T] sum of the squared probabilities of all tokens, at the step's start",
    "high_covariance": "[B T] the tokens that algorithm.high_covariance marks in a mini-batch",
    "greedy_scores": "[B] score of the greedy answer to the same prompt",
    "score_components": "[B C] the numbers of reward.components",
}
"""Fields that a function may ask for by parameter name."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of a step, on the host: prompt and answer side by side, padded to T.

    Attributes:
        tokens: token ids, prompt first, padding last.
        sizes: tokens in each sequence, the prompt's included.
        fields: arrays [B] or [B T] by name; see FIELDS.
    """

    tokens: Int[np.ndarray, "B T"]
    sizes: Int[np.ndarray, " B"]
    fields: Mapping[str, Num[np.ndarray, "B ..."] | np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a field."""
        return self.fields[name]

    def add(self, **fields: np.ndarray) -> "Batch":
        """Return the batch with more fields."""
        return dataclasses.replace(self, fields={**self.fields, **fields})

    def take(self, rows: Any) -> "Batch":
        """Return some of the sequences, by index array or slice."""
        return Batch(
            self.tokens[rows], self.sizes[rows], {k: v[rows] for k, v in self.fields.items()}
        )


class Rows(NamedTuple):
    """Sequences packed into rows, for the model, and where each of them lies.

    Row tokens outside every sequence have segment 0. The b sequence slots that are not used have
    size 0.
    """

    tokens: Int[Array | np.ndarray, "R L"]
    positions: Int[Array | np.ndarray, "R L"]
    segment_ids: Int[Array | np.ndarray, "R L"]
    row: Int[Array | np.ndarray, " b"]
    start: Int[Array | np.ndarray, " b"]
    size: Int[Array | np.ndarray, " b"]


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
class Sampling:
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
        stop: texts that end the answer; the token that completes one is the answer's last.
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


@dataclass(frozen=True)
class Request:
    """One answer to sample. The answer depends on the seed, not on what else is in flight."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int


class Completion(NamedTuple):
    """One sampled answer, or a piece of one.

    Attributes:
        tokens: token ids, the stop token included.
        logprobs: log-probs of these tokens under softmax(logits / temperature), before top-k, top-p
            and min-p cut it (at temperature 0: under softmax(logits)).
        versions: of the weights that sampled each token.
        finish: "stop", "length", or "" for a piece that others follow.
        stopped_by: the token or the text that ended it, if one did.
        top: the likeliest tokens of each step and their log-probs, likeliest first, where the
            request asks for them.
    """

    tokens: Int[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    versions: Int[np.ndarray, " T"]
    finish: str
    stopped_by: int | str | None = None
    top: tuple[Int[np.ndarray, "T top"], Float32[np.ndarray, "T top"]] | None = None
