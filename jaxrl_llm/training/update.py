"""An update: a loss per token, its gradients over micro-batches, then one step of the optimizer.

An objective runs a model over packed rows, calls a loss function with the fields that it asks for,
and returns the part of a micro-batch in the mini-batch's loss.

A mini-batch is cut into micro-batches of packed rows. The reduction's weights are computed over
the whole mini-batch first, so a micro-batch adds `sum(weights * loss)` and the sum over them is
exactly the mini-batch's loss, however it is cut. Routers of experts add their load-balance loss and
the moves of their bias.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Num

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
from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.algorithms.preferences import PairLoss
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.compilation import AheadOfCall, Task, abstract, compiler_options
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.functions import asks_for, call, name_of
from jaxrl_llm.data.dataset import check_ids
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.lora import combine_params
from jaxrl_llm.models.moe.routing import RouterStats, load_balance_loss, router_metrics, update_bias
from jaxrl_llm.sharding.layout import Layout, replicated
from jaxrl_llm.sharding.reshard import on_device, reshard, to_device
from jaxrl_llm.training.forward import (
    Fields,
    ForwardConfig,
    Inference,
    MicroBatch,
    MicroBatchStep,
    balance_pass,
    by_sequence,
    hidden_states,
    merge_microbatches,
    split_head,
    token_axes,
    token_scores_from_hidden,
    token_stats_from_hidden,
    values_from_hidden,
)
from jaxrl_llm.training.load_model import LoadedModel
from jaxrl_llm.training.optimizer import OptimizerOf
from jaxrl_llm.types import Batch, Rows

OF_TOP = ("teacher_ids", "teacher_top_logprobs")
"""The fields [B T K] of a teacher that gives its likeliest tokens."""

EXTREMES = {"largest": (-jnp.inf, jnp.maximum), "smallest": (jnp.inf, jnp.minimum)}
"""Names of an objective's metrics that do not add up: what to begin with, and how to merge them."""

MEANS = "means"
"""Name of an objective's metrics that are means over some of the rows: pairs of a sum and of what
it is to be divided by, both of which add up."""


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
            teacher_spec = type(teacher)(PartitionSpec(axes), matrix_spec)
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
        tokens = student_logprobs.shape[:1]
        if is_floating(result, tokens):
            return result.astype(jnp.float32)
        raise DivergenceError(
            f"divergence {name_of(self.divergence)!r} returned {shape_text(result)} for log-probs "
            f"{list(student_logprobs.shape)}; expected a floating-point array {list(tokens)}: one "
            "number per token"
        )


class DivergenceError(RunError, TypeError):
    """A divergence that returned something else than one number per token."""


def shape_text(value: Any) -> str:
    """Return what a function returned, for messages: an array's dtype and shape, or a type."""
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def is_floating(value: Any, shape: tuple[int, ...]) -> bool:
    """Tell whether what a function returned is a floating-point array of a shape."""
    is_array = isinstance(value, jax.Array) and value.shape == shape
    return is_array and jnp.issubdtype(value.dtype, jnp.floating)


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
            find, in_specs=(PartitionSpec(axes), head_spec, PartitionSpec(axes)), axes=axes
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


# What an update minimises: a loss per token, summed with the weights of a reduction.


COEFS = {"kl_coef": 0.0, "entropy_coef": 0.0, "distillation_coef": 0.0}
"""The coefficients of a loss's terms; a compiled update takes any."""


class LossError(RunError, TypeError):
    """A loss function that returned something else than one loss per token."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What an update minimises.

    Where the model has experts, the loss of a micro-batch has its part of their load-balance loss,
    weighted by `coefs["balance_weights"]` if they are given, and its metrics hold the statistics of
    the routers as `router`. Metrics add up over micro-batches but for those under `largest` and
    `smallest`, of which the update keeps the largest and the smallest.

    Attributes:
        loss: of the objective's kind.
    """

    loss: Callable[..., Any] | None

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        raise NotImplementedError

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective):
    """The loss of a policy's token.

    It is `share * correction * loss + kl_coef * kl - entropy_coef * entropy`, and to that
    `distillation_coef * divergence` from a teacher.

    Attributes:
        loss: policy loss; asks for fields, returns TokenLoss or an array [B T]. None: there is none
            but the other terms.
        share: of the loss; with 0 it has no gradient.
        kl: estimator (logprobs, ref_logprobs) -> [B T], or None.
        entropy: whether there is an entropy bonus.
        corrected: whether the batch holds weights `correction` [B T] of the loss.
        on_policy: whether the policy is the one at the start of the step, as where a step is one
            update. `old_logprobs` are then the log-probs without their gradient, and `policy` in
            the metrics holds the tokens' log-probs and entropies [b T].
        distillation: how the policy is compared with a teacher, or None. The weights of a teacher
            whose hidden states are asked for are `teacher` among the coefficients.
    """

    share: float = 1.0
    kl: Callable[..., Any] | None = None
    entropy: bool = False
    corrected: bool = False
    on_policy: bool = False
    distillation: Distillation | None = None

    def asks_for(self) -> set[str]:
        names = {name for f in (self.loss, self.kl) if f for name in asks_for(f)}
        names |= self.distillation.asks_for() if self.distillation else set()
        known = {"logprobs", "entropy"} | ({"old_logprobs"} if self.on_policy else set())
        return (names - known) | ({"correction"} if self.corrected else set())

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        stats = token_stats_from_hidden(params, hidden, micro.rows, model, mesh)
        mask, weights = micro.fields["mask"], micro.fields["weights"]
        logprobs = jnp.where(mask, stats.logprobs, 0.0)
        entropy = jnp.where(mask, stats.entropy, 0.0)
        fields = micro.fields | {"logprobs": logprobs, "entropy": entropy}
        policy_stats = {}
        if self.on_policy:
            fields["old_logprobs"] = jax.lax.stop_gradient(logprobs)
            policy_stats = {"policy": {"logprobs": stats.logprobs, "entropy": stats.entropy}}
        loss, metrics = self._policy_loss(fields, micro)
        if self.kl:
            kl = per_token(call(self.kl, fields), self.kl, "kl", mask.shape)
            metrics["kl_loss"] = weighted_total(kl, weights, mask)
            loss = loss + coefs["kl_coef"] * metrics["kl_loss"]
        if self.entropy:
            metrics["entropy_loss"] = weighted_total(stats.entropy, weights, mask)
            loss = loss - coefs["entropy_coef"] * metrics["entropy_loss"]
        if self.distillation:
            compared = self.distillation(params, hidden, micro, coefs, model, mesh)
            metrics |= divergence_metrics(compared, micro, of_top=self.distillation.of_top)
            loss = loss + coefs["distillation_coef"] * metrics["distillation_loss"]
        loss, routed = with_balance(loss, router, coefs)
        return loss, metrics | routed | policy_stats | {"loss": loss}

    def _policy_loss(self, fields: Fields, micro: MicroBatch) -> tuple[Array, Fields]:
        """Return the term of the loss function, and its metrics."""
        if self.loss is None:
            return jnp.zeros(()), {}
        mask, weights = micro.fields["mask"], micro.fields["weights"]
        policy = as_token_loss(call(self.loss, fields), self.loss, mask.shape)
        corrected = weights * fields["correction"] if self.corrected else weights
        loss = weighted_total(policy.loss, corrected, mask)
        metrics = {"pg_loss": loss} | _diagnostics(policy, micro)
        return self.share * (loss if self.share else jax.lax.stop_gradient(loss)), metrics


class ValueObjective(Objective):
    """The loss of a critic's value: asks for `values`, and what else the batch holds."""

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        return set(asks_for(self.loss)) - {"values"}

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        mask = micro.fields["mask"]
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        values = jnp.where(mask, values_from_hidden(params, hidden, micro.rows, model), 0.0)
        result = call(self.loss, micro.fields | {"values": values})
        regression = as_token_loss(result, self.loss, mask.shape)
        loss = weighted_total(regression.loss, micro.fields["weights"], mask)
        mean = weighted_total(values, micro.fields["token_weights"], mask)
        metrics = {"vf_loss": loss, "vpred_mean": mean} | _diagnostics(regression, micro)
        loss, routed = with_balance(loss, router, coefs)
        return loss, metrics | routed


def with_balance(
    loss: Array, router: RouterStats | None, coefs: Fields
) -> tuple[Float32[Array, ""], Fields]:
    """Add the load-balance loss of the experts, if there are any, and return what they did."""
    if router is None:
        return loss, {}
    if "balance_weights" in coefs:
        loss = loss + jnp.sum(coefs["balance_weights"] * router.probabilities)
    return loss, {"router": router}


def weighted_total(values: Array, weights: Array, mask: Array) -> Float32[Array, ""]:
    """Return the sum of weighted values [B T] under a mask; what lies off it is not read.

    Neither of the values nor of the weights: 0 times NaN is NaN, in a gradient, too.
    """
    return jnp.sum(jnp.where(mask, weights, 0.0) * jnp.where(mask, values, 0.0))


def divergence_metrics(compared: DivergenceStats, micro: MicroBatch, *, of_top: bool) -> Fields:
    """Return the distillation's part of a loss as `distillation_loss`, and what it compared.

    Args:
        compared: of each token.
        micro: with weights.
        of_top: whether the teacher gave its likeliest tokens only.
    """
    mask, weights = micro.fields["mask"], micro.fields["token_weights"]
    means = {"divergence/mean": compared.divergence, "top1_agreement": compared.agreement}
    if of_top:
        means |= {
            "student_top_mass": compared.student_mass,
            "teacher_top_mass": compared.teacher_mass,
        }
    metrics: Fields = {name: weighted_total(x, weights, mask) for name, x in means.items()}
    loss = weighted_total(compared.divergence, micro.fields["weights"], mask)
    return metrics | {
        "distillation_loss": loss,
        "largest": {"divergence/max": jnp.where(mask, compared.divergence, -jnp.inf).max()},
        "smallest": {"divergence/min": jnp.where(mask, compared.divergence, jnp.inf).min()},
    }


def _diagnostics(loss: TokenLoss, micro: MicroBatch) -> Fields:
    weights, mask = micro.fields["token_weights"], micro.fields["mask"]
    return {name: weighted_total(value, weights, mask) for name, value in loss.diagnostics.items()}


def as_token_loss(result: Any, function: Callable[..., Any], shape: tuple[int, ...]) -> TokenLoss:
    """Check what a loss function returned: TokenLoss, or an array [B T] without diagnostics.

    Raises:
        LossError: for anything else, and for a wrong shape or dtype.
    """
    loss = result if isinstance(result, TokenLoss) else TokenLoss(result, {})
    for name, value in {"loss": loss.loss, **loss.diagnostics}.items():
        per_token(value, function, "loss", shape, part=f" as {name!r}")
    return loss


def per_token(
    value: Any, function: Callable[..., Any], kind: str, shape: tuple[int, ...], *, part: str = ""
) -> Array:
    """Return what a function returned if it is one number per token.

    Args:
        value: what it returned.
        function: for the message, as are `kind` and `part`, which of its results it is.
        shape: [B T].

    Raises:
        LossError: it is no floating-point array of this shape.
    """
    if is_floating(value, shape):
        return value
    got = shape_text(value) + part
    raise LossError(
        f"{kind} {name_of(function)!r} returned {got}; expected a floating-point array "
        f"[B T], here {list(shape)}: one {ONE_OF.get(kind, 'number')} per token"
    )


ONE_OF = {"loss": "loss", "reduce": "weight"}


# What an update on preferences minimises: a loss of pairs, or of answers with a label.


SUMS = frozenset({"chosen_logps", "rejected_logps", "logps"})
LENGTHS = frozenset({"chosen_lengths", "rejected_lengths", "lengths"})
SCORES = frozenset({"chosen_scores", "rejected_scores", "scores"})
OF_REFERENCE = frozenset({"ref_chosen_logps", "ref_rejected_logps", "ref_logps"})
OF_ROWS = frozenset({"margins", "labels"})
OF_MINIBATCH = frozenset({"kl_baseline"})
ANSWER_FIELDS = SUMS | LENGTHS | SCORES | OF_REFERENCE | OF_ROWS | OF_MINIBATCH
"""What a loss of pairs or of answers with a label may ask for, [P] each."""

OF_LABELLED = frozenset({"logps", "lengths", "scores", "ref_logps", "labels", "kl_baseline"})
"""Those of answers with a label; the others are of pairs."""


class PreferenceObjective(Objective):
    """The mean over pairs, or over answers with a label, of a loss that asks for fields [P].

    The mean is over the whole mini-batch: `weights` [P W] add up to one share for each sequence.

    Attributes:
        loss: asks for `ANSWER_FIELDS`, returns PairLoss or an array [P].
    """

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        names = set(asks_for(self.loss))
        is_of_pairs = not names <= OF_LABELLED
        given = names & (OF_REFERENCE | OF_ROWS | OF_MINIBATCH)
        return given | ({"second_start"} if is_of_pairs else set())

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        names, mask = set(asks_for(self.loss)), micro.fields["mask"]
        fields = dict(micro.fields)
        if names & SUMS:
            stats = token_stats_from_hidden(params, hidden, micro.rows, model, mesh)
            logprobs = jnp.where(mask, stats.logprobs, 0.0)
            fields |= split_sums(logprobs, fields, ("chosen_logps", "rejected_logps"), "logps")
        if names & LENGTHS:
            on = mask.astype(jnp.int32)
            fields |= split_sums(on, fields, ("chosen_lengths", "rejected_lengths"), "lengths")
        if names & SCORES:
            fields |= _scores(params, hidden, micro, model)
        result = as_pair_loss(call(self.loss, fields), self.loss, mask.shape[:1])
        weights = micro.fields["weights"].sum(axis=1)
        loss = _total(result.loss, weights)
        metrics: Fields = {"pg_loss": loss, MEANS: {}}
        for name, shown in result.diagnostics.items():
            if isinstance(shown, tuple):
                own = jnp.where(shown[1], weights, 0.0)
                metrics[MEANS][name] = _total(shown[0], own), jnp.sum(own)
            else:
                metrics[name] = _total(shown, weights)
        loss, routed = with_balance(loss, router, coefs)
        return loss, metrics | routed | {"loss": loss}


def split_sums(
    values: Any, fields: Fields, of_pair: tuple[str, str], of_one: str
) -> dict[str, Any]:
    """Add values [P W] up over each answer, by the names of the sums [P]."""
    if "second_start" not in fields:
        return {of_one: values.sum(axis=1)}
    steps = jnp.arange(values.shape[1])
    is_second: Bool[Array, "P W"] = steps >= fields["second_start"][:, None]
    sums = (jnp.where(is_it, values, 0).sum(axis=1) for is_it in (~is_second, is_second))
    return dict(zip(of_pair, sums, strict=True))


def as_pair_loss(result: Any, function: Callable[..., Any], shape: tuple[int, ...]) -> PairLoss:
    """Check what a loss of preferences returned: PairLoss, or an array [P] without diagnostics.

    Raises:
        LossError: for anything else, and for a wrong shape or dtype.
    """
    loss = result if isinstance(result, PairLoss) else PairLoss(result, {})
    for name, given in {"loss": loss.loss, **loss.diagnostics}.items():
        value = given[0] if isinstance(given, tuple) else given
        is_array = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
        if not is_array or value.shape != shape:
            got = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)
            raise LossError(
                f"loss {name_of(function)!r} returned {got} as {name!r}; expected a floating-point "
                f"array [P], here {list(shape)}: one number for each pair or answer"
            )
    return loss


def _scores(params: Params, hidden: Any, micro: MicroBatch, model: ForwardConfig) -> Fields:
    """Return a reward model's scores of each answer."""
    row, start, size = map(jnp.asarray, micro.rows.places)
    counts = micro.fields["weights"].sum(axis=1) > 0

    def score(start: Array, size: Array) -> Array:
        scores = model.model.sequence_scores(params, hidden, row, start, size)
        return jnp.where(counts, scores, 0.0)  # a loss may have no gradient in padding

    if "second_start" not in micro.fields:
        return {"scores": score(start, size)}
    second = micro.fields["second_start"]
    return {
        "chosen_scores": score(start, second),
        "rejected_scores": score(start + second, size - second),
    }


def _total(values: Array, weights: Array) -> Float32[Array, ""]:
    return jnp.sum(weights * jnp.where(weights > 0, values, 0.0))


# What an update of a process reward model minimises: a loss of each step of an answer.


LOGITS = "step_logits"
OF_STEPS = frozenset({LOGITS, "step_labels"})
"""What a loss of steps may ask for, [P W] each."""


class StepObjective(Objective):
    """The mean over all steps of a mini-batch of a loss that asks for `OF_STEPS`.

    `mask` is true on the last token of each step, `weights` add up to 1 over the mini-batch, and
    so does `answer_share` [P].

    Attributes:
        loss: returns TokenLoss or an array [P W].
    """

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        return (set(asks_for(self.loss)) - {LOGITS}) | {"step_labels", "answer_share"}

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        mask, weights = micro.fields["mask"], micro.fields["weights"]
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        z = jnp.where(mask, token_scores_from_hidden(params, hidden, micro.rows, model), 0.0)
        result = as_token_loss(call(self.loss, micro.fields | {LOGITS: z}), self.loss, mask.shape)

        right_steps, right_answers = step_correctness(z, micro.fields["step_labels"], mask)
        loss = weighted_total(result.loss, weights, mask)
        shown = result.diagnostics | {"accuracy/steps": right_steps.astype(jnp.float32)}
        metrics = {name: weighted_total(x, weights, mask) for name, x in shown.items()}
        metrics |= {"pg_loss": loss}
        metrics["accuracy/answers"] = jnp.sum(micro.fields["answer_share"] * right_answers)
        loss, routed = with_balance(loss, router, coefs)
        return loss, metrics | routed | {"loss": loss}


def step_correctness(
    logits: Float[Array, "P W"], labels: Float[Array, "P W"], mask: Bool[Array, "P W"]
) -> tuple[Bool[Array, "P W"], Bool[Array, " P"]]:
    """Return where a step is judged as its label says, and in which answers the first wrong one is.

    A step is judged right where its logit is above 0, and is right where its label is above 1/2.
    An answer without a wrong step counts where none is found, as in ProcessBench
    (https://arxiv.org/abs/2412.06559).

    >>> labels, mask = jnp.array([[1.0, 0.0, 0.0]]), jnp.ones((1, 3), bool)
    >>> steps, answers = step_correctness(jnp.array([[2.0, -1.0, 3.0]]), labels, mask)
    >>> steps.tolist(), answers.tolist()
    ([[True, True, False]], [True])
    """
    judged, wrong = (mask & ~is_right for is_right in (logits > 0, labels > 0.5))
    first, expected = (_first(x) for x in (judged, wrong))
    return judged == wrong, first == expected


def _first(marks: Bool[Array, "P W"]) -> Array:
    """Return the first place that is marked; one past the last where none is."""
    return jnp.where(marks.any(axis=1), jnp.argmax(marks, axis=1), marks.shape[1])


# How: gradients over micro-batches, then one step of the optimizer.


ROUTER = "router"
"""The name of the routers' statistics in an objective's metrics, which add up."""


class TrainState(NamedTuple):
    """What an update changes.

    Attributes:
        params: float32 master weights of what is trained: the whole model, or its adapter.
        opt_state: the optimizer's.
        updates: updates that were applied.
        skipped: updates in a row that were skipped because the gradient was not finite.
    """

    params: Params
    opt_state: Any
    updates: jax.Array
    skipped: jax.Array


States = dict[str, TrainState]
"""The states of a run's models, by name."""


class TrainingError(RunError):
    """A run that must not go on."""


@dataclass(frozen=True, eq=False)
class Learner:
    """The update of a model for one objective; its jitted parts are made when first used.

    Attributes:
        objective: what an update minimises.
        model: how the model is run.
        optimizer: with gradient clipping and learning rate already in it.
        reduce: mask [B T] -> weights [B T], over a whole mini-batch.
        shape: of the micro-batches.
        mesh: the devices.
        params_like: shape, dtype and sharding of each parameter; gradients and moments follow it.
        frozen: the model's other parameters, which have neither. They are read, never donated, so
            that others may share them.
    """

    objective: Objective
    model: ForwardConfig
    optimizer: optax.GradientTransformation
    _: KW_ONLY
    reduce: Callable[..., Any]
    shape: RowShape
    mesh: Mesh
    params_like: Any
    frozen: Params | None = None

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """The layout of a TrainState."""
        return _state_shardings(self.optimizer, self.params_like, self.mesh)

    @functools.cached_property
    def init(self) -> Callable[[Params], TrainState]:
        """The jitted function from parameters to the state to start from."""

        @functools.partial(jax.jit, out_shardings=self.state_shardings)
        def init(params: Params) -> TrainState:
            zero, copy = jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params)
            return TrainState(copy, self.optimizer.init(params), zero, zero)

        return init

    @functools.cached_property
    def _make_zeros(self) -> Callable[[], tuple[Params, Fields]]:
        total = functools.partial(empty_total, self._shapes["total"])
        return jax.jit(total, out_shardings=self._total_shardings)

    def zeros(self, *inputs: Any) -> tuple[Params, Fields]:
        """Return the sum of gradients and metrics over no micro-batches.

        Args:
            *inputs: parameters, frozen ones, a micro-batch and coefficients.
        """
        self.total_like(*inputs)
        return self._make_zeros()

    def total_like(self, *inputs: Any) -> tuple[Params, Fields]:
        """Return the shapes of the sum of gradients and metrics, by the inputs of `zeros`."""
        if "total" not in self._shapes:
            metrics: Any = jax.eval_shape(self._loss, *inputs)[1]
            metrics.pop("policy", None)
            params, everywhere = self._total_shardings
            self._shapes["total"] = (
                jax.tree.map(shape_in, self.params_like, params),
                jax.tree.map(lambda x: shape_in(x, everywhere), metrics),
            )
        return self._shapes["total"]

    def state_like(self) -> TrainState:
        """Return the shapes of a TrainState."""
        state = jax.eval_shape(self.init, self.params_like)
        return jax.tree.map(shape_in, state, self.state_shardings)

    def compile_ahead(self, micro_like: Callable[[RowShape], MicroBatch], coefs: Fields) -> None:
        """Begin to compile what the first update needs in all likelihood.

        Args:
            micro_like: bucket -> a micro-batch as shapes.
            coefs: coefficients of the objective, all of them.
        """
        params, rest = abstract(self.params_like), abstract(self._rest)

        def inputs(bucket: RowShape) -> tuple[Any, ...]:
            given = params, rest, micro_like(bucket), coefs
            return self.total_like(*given), *given

        self._accumulate.begin(params, inputs)
        largest = self.shape.buckets[-1]
        self._apply.begin(lambda: (self.state_like(), *_split(inputs(largest)[0])))

    @functools.cached_property
    def accumulate(self) -> Any:
        """(sum, params, frozen, micro, coefficients) -> (sum of gradients and metrics, the policy's
        statistics of the tokens [b T] by name), jitted. Donates the sum.

        The backward pass adds each layer's gradient to the sum where that stands, so no second
        gradient of the whole model exists."""
        evaluate = self._loss

        @functools.partial(
            jax.jit,
            donate_argnums=0,
            out_shardings=(self._total_shardings, None),
            compiler_options=compiler_options(Task.TRAIN, self.mesh.devices.flat),
        )
        def accumulate(
            total: tuple[Params, Fields],
            params: Params,
            rest: Params,
            micro: MicroBatch,
            coefs: Fields,
        ) -> tuple[tuple[Params, Fields], Fields]:
            def loss(params: Params) -> tuple[Array, Fields]:
                return evaluate(params, rest, micro, coefs)

            linearized: Any = jax.vjp(loss, params, has_aux=True)
            value, backward, metrics = linearized
            sums = jax.tree.map(jax.new_ref, total[0])
            backward.with_refs(sums)(jnp.ones_like(value))
            policy_stats = metrics.pop("policy", {})
            metrics = merge_metrics(total[1], metrics)
            return (jax.tree.map(jax.freeze, sums), metrics), policy_stats

        return accumulate

    @functools.cached_property
    def apply(self) -> Any:
        """(state, gradients, router statistics) -> (state, metrics), jitted. Donates the state."""
        shardings = self.state_shardings, replicated(self.mesh)

        @functools.partial(
            jax.jit,
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=compiler_options(Task.TRAIN, self.mesh.devices.flat),
        )
        def apply(state: TrainState, grads: Params, router: Any) -> tuple[TrainState, Fields]:
            if router is None:
                return apply_gradients(state, grads, self.optimizer)
            rate = self.model.router_bias_rate
            change = functools.partial(move_router_bias, router=router, rate=rate)
            state, metrics = apply_gradients(state, grads, self.optimizer, change)
            return state, metrics | summarize_routers(router)

        return apply

    def update(
        self, state: TrainState, batch: Batch, coefs: dict[str, float]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Update on a mini-batch; return the new state and metrics. Donates the state.

        Where the objective reports the policy's statistics of each token, the metrics hold them as
        `policy`, [B T] by name.
        """
        check_ids(batch.tokens, self.model.model.vocab_size)  # rows were: the last line
        weights, token_weights = map(np.asarray, self._weigh(batch["mask"]))
        if not np.isfinite(weights[batch["mask"]]).all():
            raise LossError(f"reduce {name_of(self.reduce)!r} returned NaN or infinity as a weight")
        batch = batch.add(weights=weights, token_weights=token_weights)
        coefs = coefs | self._balance(state.params, batch)
        names = self.objective.asks_for() | {"mask", "weights", "token_weights", *self.model.marks}
        total, parts = None, []
        for indices, micro in self._accumulate.microbatches(batch, names):
            inputs = state.params, self._rest, micro, coefs
            if total is None:
                total_like = self.total_like(*inputs)
                self._accumulate.compile(total_like, *inputs)  # before the sum takes its memory
                like = abstract(state), *_split(total_like)
                self._apply.begin(lambda given=like: given)
                total = self.zeros(*inputs)
            total, policy_stats = self._accumulate(total, *inputs)
            parts.append((indices, policy_stats))
        assert total is not None, "a mini-batch holds at least one sequence"
        state, applied = self._apply(state, *_split(total))
        metrics = {name: value for name, value in total[1].items() if name != ROUTER}
        policy = merge_microbatches(parts, batch)
        return state, finished_metrics(metrics) | applied | ({"policy": policy} if policy else {})

    @functools.cached_property
    def _rest(self) -> Params:
        return self.frozen or {}

    @functools.cached_property
    def _shapes(self) -> dict[str, Any]:
        return {}

    @functools.cached_property
    def _balance(self) -> Callable[[Params, Batch], Fields]:
        return balance_pass(self.model, self.shape, self.mesh, self._rest)

    @functools.cached_property
    def _apply(self) -> AheadOfCall:
        return AheadOfCall("optimizer", self.apply, self.mesh.devices.flat)

    @functools.cached_property
    def _total_shardings(self) -> tuple[Any, Any]:
        params = jax.tree.map(lambda like: like.sharding, self.params_like)
        return params, replicated(self.mesh)

    def _loss(
        self, params: Params, rest: Params, micro: MicroBatch, coefs: Fields
    ) -> tuple[Array, Fields]:
        """Return a micro-batch's loss and metrics; `policy` are statistics of its tokens."""
        everything = combine_params(params, rest)
        return self.objective(everything, micro, coefs, self.model, self.mesh)

    @functools.cached_property
    def _accumulate(self) -> MicroBatchStep:
        return MicroBatchStep(
            "update",
            self.accumulate,
            self.shape,
            self.mesh,
            place=3,
            params=1,
            visuals=self.model.visuals,
        )

    @functools.cached_property
    def _weigh(self) -> Callable[..., tuple[Array, Array]]:
        reduce = self.reduce

        @jax.jit
        def weigh(mask: Array) -> tuple[Array, Array]:
            return per_token(reduce(mask), reduce, "reduce", mask.shape), token_mean(mask)

        return weigh


class UpdateSpec(NamedTuple):
    """How a model learns: what it minimises, how tokens are weighed, and the optimizer."""

    objective: Objective
    reduce: Callable[..., Any]
    optimizer: OptimizerOf
    schedule: Callable[[int], Any]
    max_skipped: int

    def learner(
        self,
        forward: ForwardConfig,
        shape: RowShape,
        layout: Layout,
        params_like: Any,
        frozen: Params | None = None,
    ) -> Learner:
        """Build the update of a model.

        Args:
            forward: how the model is run.
            shape: of its micro-batches.
            layout: where it stands.
            params_like: shape, dtype and sharding of each parameter that is trained.
            frozen: its other parameters.
        """
        return Learner(
            self.objective,
            forward.over(shape),
            self.optimizer(forward.model.declare(), params_like),
            reduce=self.reduce,
            shape=shape,
            mesh=layout.mesh,
            params_like=params_like,
            frozen=frozen,
        )


def _split(total: tuple[Params, Fields]) -> tuple[Params, RouterStats | None]:
    """Return gradients and the routers' statistics of a sum; None where it has none."""
    return total[0], total[1].get(ROUTER)


def shape_in(array: Any, layout: Any) -> jax.ShapeDtypeStruct:
    """Return an array as a shape in a layout."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout)


def apply_gradients(
    state: TrainState,
    grads: Params,
    optimizer: optax.GradientTransformation,
    change: Callable[[Params, Params], Params] | None = None,
) -> tuple[TrainState, Fields]:
    """Apply an update, or skip it where the gradient is not finite.

    Args:
        state: before the update.
        grads: of its parameters.
        optimizer: with gradient clipping and learning rate already in it.
        change: (params before, params after the optimizer's step) -> params, of an applied update.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))

    def move(state: TrainState) -> TrainState:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        if change is not None:
            params = change(state.params, params)
        return TrainState(params, opt_state, state.updates + 1, jnp.zeros_like(state.skipped))

    def skip(state: TrainState) -> TrainState:
        return state._replace(skipped=state.skipped + 1)

    # a branch updates in place; choosing between whole trees would hold both
    state = jax.lax.cond(jnp.isfinite(norm), move, skip, state)
    return state, {"grad_norm": norm, "skipped": state.skipped}


def check_skipped(skipped: int, limit: int, key: str = "optim") -> None:
    """Raise TrainingError when more than `limit` updates in a row were skipped.

    Args:
        skipped: updates in a row.
        limit: the most that may be.
        key: the config key of the optimizer.
    """
    if skipped > limit:
        raise TrainingError(
            f"{skipped} updates in a row had a gradient that is not finite "
            f"({key}.max_skipped={limit}); the last checkpoint is untouched. "
            "Look at the loss's inputs, lower the learning rate, or compute in float32"
        )


def _state_shardings(
    optimizer: optax.GradientTransformation, params_like: Any, mesh: Mesh
) -> TrainState:
    """Place what an optimizer has of a parameter, in its shape, where that lies."""
    everywhere: Any = replicated(mesh)
    places = dict(jax.tree_util.tree_flatten_with_path(params_like)[0])

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        ends = (places.get(path[start:]) for start in range(len(path)))
        like = next((like for like in ends if like is not None), None)
        return everywhere if like is None or like.shape != leaf.shape else like.sharding

    opt_state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params_like))
    shardings = jax.tree.map(lambda like: like.sharding, params_like)
    return TrainState(shardings, opt_state, everywhere, everywhere)


# What routers of experts add to an update: their load-balance loss, and the moves of their bias.


def move_router_bias(before: Params, after: Params, router: RouterStats, *, rate: float) -> Params:
    """Return parameters after an update, with the routers' bias moved from what it was before.

    Args:
        before: the parameters before the update.
        after: those that the optimizer made of them.
        router: statistics of the mini-batch, by layer.
        rate: how far the bias is moved.
    """
    bias = before.get("layers", {}).get("router_bias")
    if bias is None:  # another router, or frozen beside an adapter
        return after
    moved = update_bias(bias, router.choices, rate=rate)
    return after | {"layers": after["layers"] | {"router_bias": moved}}


def summarize_routers(router: RouterStats) -> Fields:
    """Return the busiest expert's load, idle experts and entropy over all layers, and the loss.

    Where recorded choices were replayed, also which share of them the routers would not have made.
    """
    by_layer, replayed = router_metrics(router), {}
    if router.replayed is not None and router.replaced is not None:
        share = router.replaced.sum() / jnp.maximum(router.replayed.sum(), 1)
        replayed["router_replaced"] = share
    return replayed | {
        "router_loss": load_balance_loss(router),
        "router_max_load": by_layer["max_load"].max(),
        "router_idle": jnp.mean(by_layer["tokens_per_expert"] == 0),
        "router_entropy": by_layer["router_entropy"].mean(),
    }


# Metrics: of micro-batches, added up to those of an update; and of a step's updates.


def empty_total(like: tuple[Params, Fields]) -> tuple[Params, Fields]:
    """Return gradients and metrics of no micro-batches, by their shapes."""

    def start(path: Any, leaf: Any) -> Array:
        value, _ = EXTREMES.get(path[0].key, (0.0, jnp.add))
        return jnp.full(leaf.shape, value, leaf.dtype)

    grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like[0])
    return grads, jax.tree.map_with_path(start, like[1])


def merge_metrics(total: Fields, metrics: Fields) -> Fields:
    """Add the metrics of a micro-batch to those of others, or keep their extremes."""

    def merge(path: Any, total: Array, value: Array) -> Array:
        _, function = EXTREMES.get(path[0].key, (0.0, jnp.add))
        return function(total, value)

    return jax.tree.map_with_path(merge, total, metrics)


def finished_metrics(metrics: Fields) -> Fields:
    """Return metrics in which extremes and means stand among the others; no mean of no rows."""
    kinds = (*EXTREMES, MEANS)
    sums = {name: value for name, value in metrics.items() if name not in kinds}
    extremes = {name: x for kind in EXTREMES for name, x in metrics.get(kind, {}).items()}
    means = jax.device_get(metrics.get(MEANS, {})).items()
    return sums | extremes | {name: total / share for name, (total, share) in means if share > 0}


OVER_UPDATES = {"divergence/max": np.max, "divergence/min": np.min}
"""How the metrics of a step's updates become one number; all others are means."""


def over_updates(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a step from those of its updates; skipped ones are only counted.

    >>> of_each = [{"skipped": 0, "loss": x, "divergence/max": x} for x in (1.0, 3.0)]
    >>> over_updates(of_each)
    {'skipped': 0.0, 'loss': 2.0, 'divergence/max': 3.0}
    """
    applied = [m for m in updates if not m["skipped"]] or updates
    names = dict.fromkeys(name for metrics in applied for name in metrics)
    values = {name: [m[name] for m in applied if name in m] for name in names}
    of_step = {name: float(OVER_UPDATES.get(name, np.mean)(x)) for name, x in values.items()}
    return of_step | {"skipped": float(sum(m["skipped"] > 0 for m in updates))}


# The moving average of a policy's weights, which follows it from step to step.


class MovingAverage:
    """The exponential moving average of a policy's trained weights, in float32.

    Args:
        rate: the share of the policy's weights that it takes over in each step.
        params_like: shape, dtype and sharding of each parameter.
        layout: where they stand.
    """

    def __init__(self, rate: float, params_like: Any, layout: Layout) -> None:
        """Begin without any weights."""
        everywhere: Any = replicated(layout.mesh)
        shardings = jax.tree.map(lambda like: like.sharding, params_like)
        self._like = params_like
        self.state_shardings = TrainState(shardings, (), everywhere, everywhere)

        @functools.partial(jax.jit, out_shardings=self.state_shardings)
        def init(params: Params) -> TrainState:
            zero = jnp.zeros((), jnp.int32)
            return TrainState(jax.tree.map(jnp.copy, params), (), zero, zero)

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
        def move(average: Params, params: Params) -> Params:
            return jax.tree.map(lambda a, p: a + rate * (p - a), average, params)

        self.init, self._move = init, move

    def state_like(self) -> TrainState:
        """Return the shapes of the average's state."""
        return jax.tree.map(shape_in, jax.eval_shape(self.init, self._like), self.state_shardings)

    def follow(self, state: TrainState, policy: TrainState) -> TrainState:
        """Return the state after a step of the policy. Donates the old one."""
        target = self.state_shardings.params
        with on_device(policy.params) as params:
            same = jax.tree.map(lambda p, there: p.sharding == there, params, target)
            here = params if jax.tree.all(same) else reshard(params, target)
            average = self._move(to_device(state.params), here)
        return state._replace(params=average, updates=state.updates + 1)


class TrainableModel(NamedTuple):
    """A model that changes in a run: one that is trained, or follows such a one.

    Attributes:
        model: the weights to start from.
        learner: makes its state, and changes it.
        key: of the config, that names the model.
    """

    model: LoadedModel
    learner: Learner | MovingAverage
    key: str = "model.path"
