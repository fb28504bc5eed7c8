"""What users write: `my_file.py:name` in a config. Copied beside the configs of the tests."""

import time
from pathlib import Path

import jax.numpy as jnp

from jaxrl_llm.algorithms.losses import TokenLoss


def digit_sum(data_source, solution_str, ground_truth, extra_info=None):
    """Score every answer differently, so that no group is without spread."""
    return sum(int(c) for c in solution_str if c in "0123456789") / 10


def same_for_all(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5


def unhurried_digit_sum(data_source, solution_str, ground_truth, extra_info=None):
    """Takes so long that no run is over before the test has looked at it."""
    time.sleep(0.005)
    return digit_sum(data_source, solution_str, ground_truth, extra_info)


def few_tokens(data_source, solution_str, ground_truth, extra_info=None):
    """Score short answers higher, and none as another."""
    return 1 / (1 + len(solution_str)) + digit_sum(data_source, solution_str, ground_truth) / 100


def few_tokens_slowly(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.005)
    return few_tokens(data_source, solution_str, ground_truth, extra_info)


def reward_with_more(data_source, solution_str, ground_truth, extra_info, *, bonus=0.0):
    return {
        "score": digit_sum(data_source, solution_str, ground_truth) + bonus,
        "acc": float(solution_str == ground_truth),
        "seen": f"{data_source}/{extra_info['index']}",
    }


def spread_if_even(data_source, solution_str, ground_truth, extra_info, *, log=None):
    """Score the answers of every other prompt alike; note each call in a file."""
    if log:
        with Path(log).open("ab") as file:
            file.write(b".")
    return 0.5 if extra_info["index"] % 2 else digit_sum(data_source, solution_str, ground_truth)


def loss(logprobs, advantages, *, weight):
    metrics = {"my_weight": jnp.full_like(logprobs, weight)}
    return TokenLoss(-weight * logprobs * advantages, metrics)


def advantage(scores, mask, *, shift):
    return jnp.where(mask, scores[:, None] - shift, 0.0)


def greedy_mean(greedy_scores, mask, response_lengths):
    """An advantage whose mean over tokens is the mean of the greedy scores over answers."""
    share = greedy_scores / jnp.maximum(response_lengths, 1) * mask.sum() / mask.shape[0]
    return jnp.where(mask, share[:, None], 0.0)


def reduce(mask, *, total):
    return total * mask / jnp.maximum(mask.sum(), 1)


def kl(logprobs, ref_logprobs):
    return 0.5 * (logprobs - ref_logprobs) ** 2 + 1.0


class Rows(list):
    """A dataset as a class: a sequence of rows."""

    def __init__(self, paths, *, source="class"):
        for i in range(24):
            row = {"prompt": [{"role": "user", "content": f"{i % 10}+{i // 10}="}]}
            row |= {"data_source": source, "extra_info": {"index": i, "paths": list(paths)}}
            self.append(row | {"reward_model": {"ground_truth": str(i % 10 + i // 10)}})


def loss_nan_for_group_0(logprobs, advantages, group_ids):
    bad = (group_ids == 0)[:, None]
    return jnp.where(bad, jnp.inf, 1.0) * -logprobs * advantages


def reward_raises(data_source, solution_str, ground_truth, extra_info=None):
    raise LookupError("no such answer")


def raises_on_odd(data_source, solution_str, ground_truth, extra_info):
    score = reward_raises if extra_info["index"] % 2 else digit_sum
    return score(data_source, solution_str, ground_truth)


def tracker_without_key(run):
    raise KeyError("MY_KEY")
