"""Rules of training on pairs or on some of the answers, and of a reference that is refreshed."""

from collections.abc import Iterator
from typing import Any

OF_ADVANTAGES = (
    *("advantage", "loss", "reduce", "kl_loss", "kl_reward", "kl_coef", "kl_controller"),
    *(
        "distillation",
        "entropy_coef",
        "correction",
        "use_rollout_logprobs",
        "high_covariance",
        "answer_filter",
    ),
)
"""Keys of the algorithm that a loss of pairs has no use for."""


def pairs_have_a_loss(config: Any) -> Iterator[str]:
    """Require a loss of pairs where pairs are made, and only there."""
    pairs, loss = config.algorithm.pairs, config.algorithm.pair_loss
    if pairs is not None and loss is None:
        yield (
            f"algorithm.pairs={pairs.fn} makes pairs, but algorithm.pair_loss is null: name a loss "
            "of pairs, as in algorithm.pair_loss=dpo"
        )
    if pairs is None and loss is not None:
        yield (
            f"algorithm.pair_loss={loss.fn} is of pairs, but algorithm.pairs is null: name what "
            "makes them, as in algorithm.pairs=best_and_worst"
        )


def pairs_stand_alone(config: Any) -> Iterator[str]:
    """Refuse keys of advantages and of a loss of tokens beside pairs."""
    algorithm = config.algorithm
    if algorithm.pairs is None:
        return
    for name in OF_ADVANTAGES:
        if getattr(algorithm, name) != getattr(type(algorithm), name):
            yield (
                f"algorithm.{name} has no effect on pairs: algorithm.pair_loss takes the place of "
                f"advantages and losses of tokens; remove algorithm.{name}, or algorithm.pairs"
            )
    if config.rollout.samples_per_prompt < 2:
        yield (
            "rollout.samples_per_prompt=1, but algorithm.pairs needs a better and a worse answer "
            "to a prompt: take 2 or more"
        )


def longest_pair_of_answers_fits(config: Any) -> Iterator[str]:
    """Require room for the longest pair, unless devices share a row."""
    room, data = config.batch.max_tokens_per_device, config.data
    longest = 2 * (data.max_prompt_tokens + config.rollout.max_new_tokens)
    if config.algorithm.pairs and config.mesh.train.context == 1 and room < longest:
        yield (
            f"batch.max_tokens_per_device={room} can't hold the longest pair of algorithm.pairs: "
            f"twice data.max_prompt_tokens + rollout.max_new_tokens, {longest}"
        )


def mix_is_of_a_refresh(config: Any) -> Iterator[str]:
    """Refuse a mix where nothing is refreshed, and where it is no mean of models."""
    reference, model = config.reference, config.model
    if reference.mix == 1:
        return
    if reference.refresh_every is None:
        yield (
            f"reference.mix={reference.mix} is of a reference that is refreshed: set "
            "reference.refresh_every"
        )
    if model.lora or model.adapter:
        yield (
            f"reference.mix={reference.mix}: expected 1 with an adapter, for the mean of two "
            "adapters' factors is no mean of the models"
        )
