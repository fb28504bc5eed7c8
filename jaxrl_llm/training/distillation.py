"""A policy compared with a teacher, token by token, in its update."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Num

from jaxrl_llm.algorithms.distillation import (
    Comparison,
    DivergenceStats,
    TeacherHidden,
    TeacherTop,
    divergence_stats,
    divergence_stats_from_logits,
    likeliest_tokens,
)
from jaxrl_llm.algorithms.logprobs import HeadProjection
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.fields import name_of
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.forward import (
    ForwardConfig,
    by_sequence,
    hidden_states,
    split_head,
    token_axes,
    token_stats_from_hidden,
)
from jaxrl_llm.training.inference import Inference
from jaxrl_llm.training.microbatches import Fields, MicroBatch
from jaxrl_llm.types import Rows

OF_TOP = ("teacher_ids", "teacher_top_logprobs")
"""The fields [B T K] of a teacher that gives its likeliest tokens."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How an update compares the policy with a teacher. The policy is taken at temperature 1.

    Attributes:
        divergence: (student_logprobs, teacher_logprobs), [x V] each -> [x].
        of_top: whether the batch holds the teacher's likeliest tokens, which are compared, and all
            others as one class. Else the update runs the teacher over the same rows, and the whole
            vocabulary is compared.
        teacher: how it is run; it is known when the teacher is loaded.
        vocab: the tokens that both have; None: all.
    """

    divergence: Callable[..., Any]
    of_top: bool = False
    teacher: ForwardConfig | None = None
    vocab: int | None = None

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        return set(OF_TOP) if self.of_top else set()

    def __call__(
        self,
        params: Params,
        hidden: Float[Array, "P l D"],
        micro: MicroBatch,
        coefs: Fields,
        model: ForwardConfig,
        mesh: Mesh,
    ) -> DivergenceStats:
        """Compare the tokens of a micro-batch, each device its own; return [b T].

        Args:
            params: of the policy.
            hidden: its hidden states of the rows.
            micro: the micro-batch.
            coefs: hold the teacher's weights as `teacher`, if it is run here.
            model: how the policy is run.
            mesh: the devices.
        """
        rows, layout = micro.rows, Layout(mesh, model.context)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        needed = None if rows.scored is None else jnp.asarray(rows.scored).reshape(-1)
        axes = token_axes(layout, len(hidden))
        head, head_spec, student = _head(params, model, layout)
        if self.of_top:
            ids, logprobs = (to_rows(micro.fields[name], rows) for name in OF_TOP)
            teacher: Any = TeacherTop(ids, logprobs)
            teacher_spec: Any = PartitionSpec(axes)
            projection = HeadProjection()
        else:
            assert self.teacher is not None, "a teacher is loaded before it is run"
            weights = coefs["teacher"]
            states = hidden_states(weights, rows, self.teacher, mesh)[0]
            states = states.reshape(-1, states.shape[-1])
            matrix, matrix_spec, projection = _head(weights, self.teacher, layout)
            assert matrix is not None, "a model of a Hugging Face directory has a head"
            teacher = TeacherHidden(states, matrix)
            teacher_spec = _specs(PartitionSpec(axes), matrix_spec)
        comparison = Comparison(
            divergence=self.checked, student=student, teacher=projection, vocab=self.vocab
        )

        def compare(hidden: Array, needed: Any, head: Any, teacher: Any) -> DivergenceStats:
            if head is None:
                return divergence_stats_from_logits(comparison, hidden, teacher, needed)
            return divergence_stats(comparison, hidden, head, teacher, needed)

        specs = PartitionSpec(axes), PartitionSpec(axes), head_spec, teacher_spec
        run = layout.by_tokens(compare, in_specs=specs, axes=axes)
        return by_sequence(run(hidden, needed, head, teacher), rows, model)

    def checked(self, student_logprobs: Array, teacher_logprobs: Array) -> Array:
        """Return what the divergence returns, if it is one number per token.

        Raises:
            DivergenceError: it is something else.
        """
        result = self.divergence(student_logprobs, teacher_logprobs)
        got, tokens = type(result).__name__, student_logprobs.shape[:1]
        if isinstance(result, jax.Array):
            got = f"{result.dtype}{list(result.shape)}"
            if result.shape == tokens and jnp.issubdtype(result.dtype, jnp.floating):
                return result.astype(jnp.float32)
        raise DivergenceError(
            f"divergence {name_of(self.divergence)!r} returned {got} for log-probs "
            f"{list(student_logprobs.shape)}; expected a floating-point array {list(tokens)}: one "
            "number per token"
        )


class DivergenceError(RunError, TypeError):
    """A divergence that returned something else than one number per token."""


def _specs(*parts: Any) -> Any:
    """Return how the arrays of a teacher are split."""
    return TeacherHidden(*parts)


def _head(
    params: Params, model: ForwardConfig, layout: Layout
) -> tuple[Array | None, PartitionSpec, HeadProjection]:
    """Return a model's output projection, how it is split, and how logits are made by it."""
    head = split_head(params, model, layout)
    if head is None:
        return None, PartitionSpec(), HeadProjection()
    axes = PartitionSpec(head.embed_axes, head.vocab_axes)
    return head.array, axes, model.projection(head)


def top_pass(
    model: ForwardConfig, shape: RowShape, mesh: Mesh, *, count: int, vocab: int | None = None
) -> Inference:
    """Return a function from a teacher's parameters and a batch to what it says of its tokens.

    These are `logprobs` [B T] and `OF_TOP` [B T K], by name.

    Args:
        model: how the teacher is run.
        shape: of the micro-batches.
        mesh: the devices.
        count: K.
        vocab: the ids that student and teacher both have; None: all.
    """

    def infer(params: Params, rest: Params, rows: Rows) -> dict[str, Array]:
        del rest
        layout = Layout(mesh, model.context)
        hidden = hidden_states(params, rows, model, mesh)[0]
        logprobs = token_stats_from_hidden(params, hidden, rows, model, mesh).logprobs
        states = hidden.reshape(-1, hidden.shape[-1])
        needed = None if rows.scored is None else jnp.asarray(rows.scored).reshape(-1)
        head, head_spec, projection = _head(params, model, layout)
        axes = token_axes(layout, len(states))
        find = partial(likeliest_tokens, projection, count=count, vocab=vocab)
        run = layout.by_tokens(
            find,
            in_specs=(PartitionSpec(axes), head_spec, PartitionSpec(axes)),
            axes=axes,
        )
        top = by_sequence(run(states, head, needed), rows, model, axes=1)
        return {"logprobs": logprobs, **dict(zip(OF_TOP, top, strict=True))}

    return Inference(infer, shape, mesh, {}, model)


def to_rows(values: Num[Array, "b T K"], rows: Rows) -> Num[Array, "X K"]:
    """Lay what is known of each token out at the place before it in the rows, which predicts it.

    The inverse of `forward.by_sequence`; other places hold 0.

    Args:
        values: entry (i, t) belongs to token t of sequence i.
        rows: R rows of L tokens, X = R · L places.
    """
    row, start, size = map(jnp.asarray, rows.places)
    count, length = jnp.shape(rows.tokens)
    steps = jnp.arange(values.shape[1])
    inside = (steps > 0) & (steps < size[:, None])
    place = (row * length + start)[:, None] + steps - 1
    places = jnp.where(inside, place, count * length)  # one past all, which is dropped
    zeros = jnp.zeros((count * length, values.shape[2]), values.dtype)
    return zeros.at[places].set(values, mode="drop")
