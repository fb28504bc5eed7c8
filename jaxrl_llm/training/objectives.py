"""What an update minimises: a loss per token, summed with the weights of a reduction.

An objective runs a model over packed rows, calls a loss function with the fields that it asks for,
and returns the part of a micro-batch in the mini-batch's loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
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
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.functions import asks_for, call, name_of
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.moe.routing import RouterStats
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.forward import (
    ForwardConfig,
    Inference,
    by_sequence,
    hidden_states,
    split_head,
    token_axes,
    token_scores_from_hidden,
    token_stats_from_hidden,
    values_from_hidden,
)
from jaxrl_llm.training.microbatches import MEANS, Fields, MicroBatch
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


@runtime_checkable
class Objective(Protocol):
    """What an update minimises.

    Where the model has experts, the loss of a micro-batch has its part of their load-balance loss,
    weighted by `coefs["balance_weights"]` if they are given, and its metrics hold the statistics of
    the routers as `router`. Metrics add up over micro-batches but for those under `largest` and
    `smallest`, of which the update keeps the largest and the smallest.
    """

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        ...

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
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

    loss: Callable[..., Any] | None
    share: float = 1.0
    kl: Callable[..., Any] | None = None
    entropy: bool = False
    corrected: bool = False
    on_policy: bool = False
    distillation: Distillation | None = None

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        names = {name for f in (self.loss, self.kl) if f for name in asks_for(f)}
        names |= self.distillation.asks_for() if self.distillation else set()
        known = {"logprobs", "entropy"} | ({"old_logprobs"} if self.on_policy else set())
        return (names - known) | ({"correction"} if self.corrected else set())

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
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


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """The loss of a critic's value: asks for `values`, and what else the batch holds."""

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        return set(asks_for(self.loss)) - {"values"}

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
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


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective:
    """The mean over pairs, or over answers with a label, of a loss that asks for fields [P].

    The mean is over the whole mini-batch: `weights` [P W] add up to one share for each sequence.

    Attributes:
        loss: asks for `ANSWER_FIELDS`, returns PairLoss or an array [P].
    """

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        names = set(asks_for(self.loss))
        is_of_pairs = not names <= OF_LABELLED
        given = names & (OF_REFERENCE | OF_ROWS | OF_MINIBATCH)
        return given | ({"second_start"} if is_of_pairs else set())

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
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


@dataclass(frozen=True, kw_only=True)
class StepObjective:
    """The mean over all steps of a mini-batch of a loss that asks for `OF_STEPS`.

    `mask` is true on the last token of each step, `weights` add up to 1 over the mini-batch, and
    so does `answer_share` [P].

    Attributes:
        loss: returns TokenLoss or an array [P W].
    """

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        return (set(asks_for(self.loss)) - {LOGITS}) | {"step_labels", "answer_share"}

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
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
