"""The forward pass of a reward model that is given: it scores prompt and answer, untrained."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm.compiler_options import Task, compiler_options
from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.data.chat import VOCABULARIES, load_tokenizer
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.model import Model, model_of
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.sampling import Rollouts, side_by_side
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.forward import ForwardConfig, hidden_states
from jaxrl_llm.training.load_model import read_model
from jaxrl_llm.training.microbatches import BucketPrograms
from jaxrl_llm.types import Batch, Rows


def score_pass(
    model: ForwardConfig, shape: RowShape, layout: Layout
) -> Callable[[Params, Batch], np.ndarray]:
    """Return a function from a reward model's parameters and a batch to its scores [B].

    Args:
        model: how the model is run.
        shape: of the micro-batches.
        layout: where it runs.
    """

    options = compiler_options(Task.TRAIN, layout.mesh.devices.flat)

    @functools.partial(jax.jit, compiler_options=options)
    def compute(params: Params, rows: Rows) -> Array:
        hidden, _ = hidden_states(params, rows, model, layout.mesh)
        hidden = layout.merge_context(hidden)
        return model.model.sequence_scores(params, hidden, *map(jnp.asarray, rows.places))

    programs = BucketPrograms("reward model", compute, shape, layout.mesh)

    def score(params: Params, batch: Batch) -> np.ndarray:
        cut = programs.microbatches(batch, (), params, lambda micro: (params, micro.rows))
        pending = [(indices, compute(params, micro.rows)) for indices, micro in cut]
        scores = np.zeros(len(batch.sequence_lengths), np.float32)
        for indices, values in pending:
            scores[indices] = distributed.fetch(values)[: len(indices)]
        return scores

    return score


class RewardModel(NamedTuple):
    """A loaded reward model.

    Attributes:
        params: its parameters, in the compute dtype.
        score: from rollouts to its scores of the answers [B].
    """

    params: Params
    score: Callable[[Rollouts], np.ndarray]


def open_reward_model(
    path: str, dtype: str, tokenizer: Any, actor: Model, layout: Layout, shape: RowShape
) -> RewardModel:
    """Load a reward model in the compute dtype.

    It reads the tokens of prompt and answer as they are, the stop token included.

    Args:
        path: Hugging Face directory or hub id of a sequence classifier with one label.
        dtype: compute dtype.
        tokenizer: of the policy.
        actor: the policy.
        layout: where it stands.
        shape: of micro-batches.

    Raises:
        ConfigError: there is no such model, or it does not know the policy's tokens.
    """
    with config_errors_at("reward.classifier"):
        spec = read_spec(path)
        if not spec.reward_head:
            raise ValueError(f"{path} gives no score; expected a …ForSequenceClassification")
        if spec.max_positions < shape.width:
            raise ValueError(
                f"{path} has {spec.max_positions} positions, but the longest sequence is "
                f"data.max_prompt_tokens + rollout.max_new_tokens = {shape.width}"
            )
        check_vocabulary(path, spec, tokenizer, actor)
        params = read_model(path, spec, layout).params
    if dtype != "float32":
        params = reshard(params, layout.of(declare(spec)), dtype=compute_dtypes(spec, dtype))
    forward = ForwardConfig(model=model_of(spec), dtype=dtype).over(shape)
    run = score_pass(forward, shape, layout)

    def score(rollouts: Rollouts) -> np.ndarray:
        return run(params, Batch(*side_by_side(rollouts, shape.width), {}))

    return RewardModel(params, score)


def check_vocabulary(path: str, spec: ModelSpec, tokenizer: Any, actor: Model) -> None:
    """Raise ValueError unless the policy's tokens mean the same to a reward model.

    A directory without a tokenizer is believed if its vocabulary is large enough.
    """
    if spec.vocab_size < actor.vocab_size:
        raise ValueError(
            f"{path} has vocab_size={spec.vocab_size}, expected the policy's {actor.vocab_size} or "
            "more: it is given the policy's tokens"
        )
    if any((resolve(path) / name).is_file() for name in VOCABULARIES):
        check_same_tokens(path, tokenizer)


def check_same_tokens(path: str, tokenizer: Any) -> None:
    """Raise ValueError unless each of the policy's tokens has its number in a directory, too."""
    theirs = load_tokenizer(path).get_vocab()
    for token, number in tokenizer.get_vocab().items():
        if theirs.get(token) != number:
            raise ValueError(
                f"{path} has another tokenizer: {token!r} is {theirs.get(token)} there and "
                f"{number} for the policy, whose tokens it is given"
            )
