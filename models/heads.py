"""Heads: logits over the vocabulary, a critic's value per token, a reward model's score."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.gather import SplitMatrix, split_matrix
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout

NEVER = -1e30
"""Logit of a token that is never drawn: finite, so that its products with 0 are."""


def head_matrix(
    params: Params, spec: ModelSpec, layout: Layout | None = None
) -> Float[Array, "D V"] | SplitMatrix:
    """Return the output projection: the transposed embedding when tied, else its own array.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        layout: How activations are split over a mesh. The devices that split tokens may then hold
            parts of the matrix.

    Raises:
        ValueError: The model ends in a value head or in a reward head.

    >>> spec = tiny_spec()
    >>> head_matrix({"embed": jnp.ones((8, 4))}, spec).shape
    (4, 8)
    """
    if spec.value_head or spec.reward_head:
        head = "value" if spec.value_head else "reward"
        raise ValueError(f"a model with a {head} head has no logits; expected a language model")
    name = "embed" if spec.tied_embeddings else "head"
    if layout is None:
        return params[name].T if spec.tied_embeddings else params[name]
    matrix = split_matrix(params, spec, name, layout)
    return matrix._replace(array=matrix.array.T) if spec.tied_embeddings else matrix


def logits(params: Params, spec: ModelSpec, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
    """Project hidden states onto the vocabulary: inputs in the dtype of `hidden`, sums in float32.

    With a soft-cap c the product z becomes c·tanh(z/c), in float32 (Gemma 2,
    https://arxiv.org/abs/2408.00118, section 2). Those of tokens that stand for images alone are
    `NEVER`.

    Args:
        params: Parameters nested as `declare(spec)`.
        spec: The model.
        hidden: Hidden states after the final norm.

    Returns:
        Logits in float32.

    >>> spec = tiny_spec()
    >>> logits({"embed": jnp.ones((8, 4))}, spec, jnp.ones((2, 4), jnp.bfloat16)).dtype
    dtype('float32')
    """
    head: Any = head_matrix(params, spec)
    z = jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    cap = spec.logit_softcap
    z = z if cap is None else cap * jnp.tanh(z / cap)
    if spec.vision is None:
        return z
    # a comparison splits over a sharded vocabulary; a scatter would gather the logits
    words = jnp.arange(z.shape[-1])[:, None]
    return jnp.where((words == jnp.array(spec.vision.never_sampled)).any(axis=1), NEVER, z)


def token_values(params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B"]:
    r"""Compute the value of each token's state from its hidden state, $v = h \cdot w + b$.

    The critic of PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), as a linear head on
    the decoder. It is computed in float32 whatever the dtype of `hidden`.

    Args:
        params: Parameters nested as `declare(spec)`, where `spec.value_head` is True.
        hidden: Hidden states after the final norm, usually [R L D].

    Returns:
        Values in float32. The one at index t has seen tokens 0 to t.

    Raises:
        KeyError: The parameters have no `score`.

    >>> head = {"score": jnp.array([[2.0], [3.0]]), "score_bias": jnp.array([0.5])}
    >>> token_values(head, jnp.array([[[1.0, 0.0], [1.0, 1.0]]])).tolist()
    [[2.5, 5.5]]
    """
    return _scores(params, hidden) + params["score_bias"].astype(jnp.float32)[0]


def sequence_scores(
    params: Params,
    hidden: Float[Array, "R L D"],
    row: Int[Array, " B"],
    start: Int[Array, " B"],
    size: Int[Array, " B"],
) -> Float32[Array, " B"]:
    r"""Compute the score of each sequence from its last token's hidden state, $r = h_T \cdot w$.

    The reward model of Ouyang et al. 2022 (https://arxiv.org/abs/2203.02155, section 3.5), as
    `transformers` has it in its `…ForSequenceClassification`: no bias, and the last token that is
    not padding. It is computed in float32 whatever the dtype of `hidden`.

    Args:
        params: Parameters nested as `declare(spec)`, where `spec.reward_head` is True.
        hidden: Hidden states of packed rows after the final norm.
        row: The row that holds each sequence.
        start: Index of each sequence's first token in its row.
        size: Number of tokens of each sequence; one of 0 tokens scores 0.

    Returns:
        Scores in float32.

    Raises:
        KeyError: The parameters have no `score`.

    >>> hidden, ones = jnp.array([[[1.0], [2.0], [5.0]]]), jnp.array([1, 1])
    >>> head = {"score": jnp.array([[3.0]])}
    >>> sequence_scores(head, hidden, 0 * ones, ones - 1, ones + 1).tolist()
    [6.0, 6.0]
    """
    last = hidden[row, jnp.maximum(start + size - 1, 0)]
    return jnp.where(size > 0, _scores(params, last), 0.0)


def _scores(params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B"]:
    wide, weights = hidden.astype(jnp.float32), params["score"].astype(jnp.float32)
    return jnp.matmul(wide, weights, precision=jax.lax.Precision.HIGHEST)[..., 0]


def with_value_head(params: Params, spec: ModelSpec) -> tuple[Params, ModelSpec]:
    """Turn a language model into a critic that predicts 0 at first, a reward model into its critic.

    A reward model keeps its weights, as Ouyang et al. 2022 begin (appendix C.4); the bias is 0.

    Args:
        params: Parameters nested as `declare(spec)`, in any layout.
        spec: A model without a value head.

    Returns:
        Parameters nested as the new spec declares, and that spec. The output projection is left
        out; the other arrays are shared with `params`. What is new is zeros on the default device,
        for the caller to lay out.

    Raises:
        ValueError: The model has a value head already.

    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec(tied_embeddings=False)
    >>> critic, critic_spec = with_value_head(init_params(spec, key=jax.random.key(0)), spec)
    >>> critic["score"].shape, "head" in critic, critic_spec.value_head
    ((4, 1), False, True)
    """
    if spec.value_head:
        raise ValueError("the model has a value head already; expected a language model")
    dtype = params["final_norm"].dtype
    body = {name: arrays for name, arrays in params.items() if name != "head"}
    head = {"score": jnp.zeros((spec.hidden_size, 1), dtype), "score_bias": jnp.zeros(1, dtype)}
    return head | body, dataclasses.replace(spec, value_head=True, reward_head=False)


def with_reward_head(
    params: Params, spec: ModelSpec, *, key: PRNGKeyArray
) -> tuple[Params, ModelSpec]:
    """Turn a language model into a reward model whose head is drawn from N(0, `init_std`²).

    Args:
        params: Parameters nested as `declare(spec)`, in any layout.
        spec: A model without a value head or reward head.
        key: Of the draw.

    Returns:
        Parameters nested as the new spec declares, and that spec. The output projection is left
        out; the other arrays are shared with `params`. What is new is on the default device, for
        the caller to lay out.

    Raises:
        ValueError: The model has a value head or a reward head already.

    >>> from jaxrl_llm.models.parameters import init_params
    >>> spec = tiny_spec()
    >>> key = jax.random.key(0)
    >>> scorer, scorer_spec = with_reward_head(init_params(spec, key=key), spec, key=key)
    >>> scorer["score"].shape, scorer_spec.reward_head
    ((4, 1), True)
    """
    if spec.value_head or spec.reward_head:
        raise ValueError("the model ends in another head already; expected a language model")
    dtype = params["final_norm"].dtype
    body = {name: arrays for name, arrays in params.items() if name != "head"}
    draw = spec.init_std * jax.random.normal(key, (spec.hidden_size, 1), dtype)
    return {"score": draw} | body, dataclasses.replace(spec, reward_head=True)
