"""The models of a run: the actor, the critic, the implicit reward model, and the reference."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config.errors import ConfigError, RunError, config_errors_at
from jaxrl_llm.config.functions import call, fields_of_model
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ReferenceConfig
from jaxrl_llm.data.chat import ChatTemplate
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.decoder import Decoder, with_value_head
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.model import Model, is_adapted
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout, over_batch, replicated
from jaxrl_llm.sharding.reshard import on_device, reshard, to_host
from jaxrl_llm.training.bind import AlgorithmFunctions, abstract_fields, abstract_pairs
from jaxrl_llm.training.experience import check_marks, with_key
from jaxrl_llm.training.forward import (
    ForwardConfig,
    FrozenTower,
    Inference,
    MicroBatch,
    logprob_pass,
    value_pass,
)
from jaxrl_llm.training.load_model import (
    Layouts,
    LoadedModel,
    forward_config,
    laid_out,
    microbatch_shape,
    packed_shape,
    read_model,
)
from jaxrl_llm.training.teachers import (
    AVERAGE,
    PolicyTeacher,
    TeacherModel,
    TeacherPrompts,
    Teachers,
    open_policy_teacher,
)
from jaxrl_llm.training.update import (
    COEFS,
    Learner,
    PolicyObjective,
    States,
    TrainableModel,
    TrainState,
    shape_in,
)
from jaxrl_llm.types import ROUTES, Batch, Rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model that is trained: the actor, the critic or the implicit reward model.

    Attributes:
        name: of its metrics and in checkpoints.
        learner: its update.
        infer: (params, batch) -> what it says of each token [B T], by name.
        learning_rate: of an update, by its number.
        max_skipped: updates in a row that may be skipped.
        mark_covariant: (fields of a mini-batch, random key) -> its field `high_covariance` [B T],
            jitted; None where no loss asks for it.
        learns_labels: whether its update takes the scores as labels.
        seed: of the run.
        teacher: weights of the teacher that an update runs; None: it runs none.
    """

    name: str
    learner: Learner
    infer: Callable[[Any, Batch], dict[str, np.ndarray]]
    learning_rate: Callable[[int], Any]
    max_skipped: int
    mark_covariant: Callable[..., Any] | None = None
    learns_labels: bool = False
    seed: int = 0
    teacher: Any = None

    def annotate(self, state: TrainState, minibatch: Batch) -> Batch:
        """Return a mini-batch with the fields that are computed from the whole of it.

        Raises:
            LabelError: its scores can't be labels.
        """
        if self.learns_labels:
            check_labels(minibatch)
        if self.mark_covariant is None:
            return minibatch
        key = jax.random.fold_in(jax.random.key(self.seed), int(state.updates))
        logprobs = self.infer(state.params, minibatch)["logprobs"]
        marks = self.mark_covariant({**minibatch.arrays, "logprobs": logprobs}, key)
        return minibatch.add(high_covariance=np.asarray(marks))


REFERENCE = "reference"
"""The name of a reference that is refreshed among the states of a run."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The reference policy of a run: the policy as it began, or as it was at the last refresh.

    Attributes:
        infer: (params, batch) -> its log-probs of each token [B T], by name.
        params: that stay; None: they are among the run's states, as they are refreshed.
        copy: parameters of the policy -> those of a reference like it.
        mix: (old reference, new one) -> what a refresh makes of them.
        settings: when it is refreshed, and how.
        on_host: whether it waits in the host's memory until it is used.
    """

    infer: Callable[[Any, Batch], dict[str, np.ndarray]]
    params: Params | None
    copy: Callable[[Params], Params]
    mix: Callable[[Params, Params], Params]
    settings: ReferenceConfig
    on_host: bool = False

    def logprobs(self, states: States, batch: Batch) -> np.ndarray:
        """Return its log-probs of each token [B T]; its routers choose their experts."""
        held = states[REFERENCE].params if self.params is None else self.params
        with on_device(held) as params:
            return self.infer(params, batch.without(ROUTES))["logprobs"]

    def is_due(self, step: int) -> bool:
        """Tell whether the reference is refreshed after a step."""
        every = self.settings.refresh_every
        return every is not None and step % every == 0

    def refreshed(self, state: TrainState, policy: TrainState) -> TrainState:
        """Return the state after a refresh by the policy's."""
        params = self.copy(policy.params)
        if self.settings.mix != 1:
            with on_device(state.params) as before:
                params = self.mix(before, params)
        params = to_host(params) if self.on_host else params
        return state._replace(params=params, updates=state.updates + 1)


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models of a run: those that are trained, and those that are asked about its answers.

    Attributes:
        roles: that are trained, by name, in the order of their updates: the actor is the last one.
        tower: the frozen vision tower, whose features all models read; None: there is none.
        reference: None where no function asks for its log-probs.
        teacher: the policy itself, or others by the answers' data source; None where no function
            asks for its log-probs.
        teacher_prompts: that teachers read; None: those of the answers.
    """

    roles: dict[str, Role]
    tower: FrozenTower | None
    reference: Reference | None
    teacher: PolicyTeacher | Teachers | None
    teacher_prompts: TeacherPrompts | None

    @property
    def actor(self) -> Role:
        """The policy."""
        return self.roles["actor"]

    @property
    def critic(self) -> Role | None:
        """The critic, if there is one."""
        return self.roles.get("critic")

    def to_update(self, step: int, warmup_steps: int) -> list[Role]:
        """Return the roles that a step updates; the actor only when the critic has warmed up."""
        is_warm = self.critic is None or step > warmup_steps
        return [role for name, role in self.roles.items() if name != "actor" or is_warm]


@activity("building the models")
def open_models(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    model: LoadedModel,
    layouts: Layouts,
    teachers: Teachers | None,
    tokenizer: Any,
) -> tuple[Models, dict[str, TrainableModel], States]:
    """Build every model that is trained, the reference and the policy as its own teacher.

    Args:
        config: of the run.
        functions: that it names.
        model: the policy's.
        layouts: where each model stands.
        teachers: that were loaded.
        tokenizer: of the policy.

    Returns:
        The models, what training starts from, and the state of a reference that is refreshed.
    """
    run_by_update = None if teachers is None else teachers.run_in_update
    made, trainable = make_roles(config, functions, model, layouts, run_by_update)
    order = ("implicit_reward_model", "critic", "actor")
    infer = made["actor"].infer
    initial = functools.cache(functools.partial(initial_weights, config, model))
    reference, refreshed = None, {}
    if functions.needs_reference:
        reference, start = open_reference(config, model, layouts, infer, initial)
        refreshed = {} if start is None else {REFERENCE: start}
    teacher = teachers if functions.needs_teacher else None
    if functions.needs_teacher and config.teacher.weights != "given":
        teacher, average = open_policy_teacher(config, model, layouts, infer, initial)
        trainable |= {AVERAGE: average} if average else {}
    teacher_prompts = None
    if functions.teacher_prompt is not None:
        longest = config.longest_teacher_sequence
        teacher_prompts = TeacherPrompts(
            function=functions.teacher_prompt,
            encode=ChatTemplate(tokenizer, config.data.chat_template_kwargs).prompt,
            samples=config.rollout.samples_per_prompt,
            max_prompt_tokens=longest - config.rollout.max_new_tokens,
            max_tokens=longest,
        )
    models = Models(
        roles={name: made[name] for name in order if name in made},
        tower=model.tower,
        reference=reference,
        teacher=teacher,
        teacher_prompts=teacher_prompts,
    )
    return models, trainable, refreshed


def make_roles(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    actor: LoadedModel,
    layouts: Layouts,
    teacher: TeacherModel | None = None,
) -> tuple[dict[str, Role], dict[str, TrainableModel]]:
    """Build every model that is trained, and say what it starts from.

    Args:
        config: of the run.
        functions: that it names.
        actor: the policy's model.
        layouts: where each model stands.
        teacher: that the actor's update runs; None: it runs none.
    """
    roles, trainable = {}, {}
    paths = {
        "critic": config.critic.path,
        "implicit_reward_model": config.implicit_reward_model.path,
    }
    for name in functions.updates:
        is_critic, path = name == "critic", paths.get(name)
        layout = layouts.of(name)
        key = f"{name}.path" if path else "model.path"
        if actor.frozen is not None and name != "actor":
            path = path or config.model.path  # these begin at the base, and have no adapter
        model = actor
        if path:
            model = read_role(path, key, layout, actor.model, value_head=is_critic)
            model = model.for_length(config.longest_sequence)
        elif layout is not layouts.train:
            placed = reshard(actor.params, layout.of(actor.model.declare()))
            model = laid_out(actor.model, placed, layout)
        if is_critic:
            model = as_critic(model, key, layout)
        forward = run_forward(config, model.model, layout, actor.tower)
        own_teacher = teacher if name == "actor" else None
        role = make_role(
            config, functions, name, forward, layout, model.like, model.frozen, own_teacher
        )
        roles[name], trainable[name] = role, TrainableModel(model, role.learner, key)
    return roles, trainable


def make_role(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    name: str,
    forward: ForwardConfig,
    layout: Layout,
    params_like: Any,
    frozen: Any,
    teacher: TeacherModel | None = None,
) -> Role:
    """Build a model that is trained.

    Args:
        config: of the run.
        functions: that it names.
        name: of the model.
        forward: how it is run.
        layout: where it stands.
        params_like: shape, dtype and sharding of each parameter that is trained.
        frozen: its other parameters.
        teacher: that its update runs; None: it runs none.
    """
    update, is_actor = functions.updates[name], name == "actor"
    forward = replaying(forward, config) if is_actor else forward
    shape, of_updates = row_shapes(config, forward, layout)
    update = update if teacher is None else teacher.taught(update, of_updates)
    return Role(
        name=name,
        learner=update.learner(forward, of_updates, layout, params_like, frozen),
        infer=inference_of(name, functions, forward, shape, layout, frozen),
        learning_rate=update.schedule,
        max_skipped=update.max_skipped,
        mark_covariant=covariance_marker(functions) if is_actor else None,
        learns_labels=name == "implicit_reward_model" and functions.learns_labels,
        seed=config.seed,
        teacher=teacher and teacher.params,
    )


def run_forward(
    config: TrainConfig, model: Model, layout: Layout, tower: FrozenTower | None
) -> ForwardConfig:
    """Return how a model of a run is run where it is trained, or asked about answers."""
    return forward_config(
        config.model,
        model,
        layout,
        temperature=config.rollout.temperature,
        tower=tower,
        max_pixels=config.data.max_pixels,
    )


def row_shapes(
    config: TrainConfig, forward: ForwardConfig, layout: Layout
) -> tuple[RowShape, RowShape]:
    """Return the shapes of the micro-batches of a model's passes and of its updates.

    An update on pairs has rows for two answers with their prompts, and room for a pair of each
    prompt; where there are more, there are more micro-batches.
    """
    sequences, longest = config.sequences_per_minibatch, config.longest_sequence
    passes = microbatch_shape(config.batch, forward, layout, longest=longest, sequences=sequences)
    if config.algorithm.pairs is None:
        return passes, passes
    pairs = packed_shape(
        layout,
        forward.model,
        tokens=config.batch.max_tokens_per_device,
        longest=2 * longest,
        sequences=sequences // config.rollout.samples_per_prompt,
    )
    return passes, pairs


def replaying(settings: ForwardConfig, config: TrainConfig) -> ForwardConfig:
    """Return how the policy is run where it replays choices of experts.

    Raises:
        ConfigError: it has no experts.
    """
    replay = config.model.router_replay
    if replay != "none" and not settings.model.has_router:
        raise ConfigError(
            f"model.router_replay={replay}, but {config.model.path} has no experts to choose from: "
            "remove it"
        )
    return dataclasses.replace(settings, router_replay=replay)


def inference_of(
    name: str,
    functions: AlgorithmFunctions,
    settings: ForwardConfig,
    shape: RowShape,
    layout: Layout,
    frozen: Any = None,
) -> Inference:
    """Build what says of each token what the functions ask a role for; see `logprob_pass`."""
    settings = settings.over(shape)
    if name == "critic":
        return value_pass(settings, shape, layout.mesh)
    asked = functions.needs & fields_of_model("actor") - {"old_logprobs"}
    names = ("logprobs", *sorted(asked | {"entropy"}))
    names += (ROUTES,) if settings.router_replay == "old_policy" else ()
    return logprob_pass(settings, shape, layout.mesh, names, frozen=frozen)


def read_role(
    path: str, key: str, layout: Layout, actor: Model, *, value_head: bool
) -> LoadedModel:
    """Load the model of a critic or of a reward model.

    Args:
        path: Hugging Face directory.
        key: its config key, for messages.
        layout: where it stands.
        actor: the policy, whose tokens and positions it must know.
        value_head: whether the model may end in a value head.
    """
    with config_errors_at(key):
        spec = read_spec(path)
        if (spec.value_head or spec.reward_head) and not value_head:
            raise ValueError(f"{path} ends in a value head, expected a language model")
        for name in ("vocab_size", "max_positions"):
            got, expected = getattr(spec, name), getattr(actor, name)
            if expected is not None and got < expected:
                raise ValueError(
                    f"{path} has {name}={got}, expected the policy's {expected} or more"
                )
        return read_model(path, spec, layout)


def as_critic(model: LoadedModel, key: str, layout: Layout) -> LoadedModel:
    """Return a model with a value head: its own, or one of zeros.

    Raises:
        ConfigError: it is none of a Hugging Face directory.
    """
    if not isinstance(model.model, Decoder):
        raise ConfigError(
            "critic.path: a value is asked for, but model.function gives no critic; name the "
            "Hugging Face directory of a model that knows the policy's tokens"
        )
    if model.spec.value_head:
        return model
    log.info("the critic starts from %s, with a new value head of zeros", key)
    params, spec = with_value_head(model.params, model.spec)
    return laid_out(Decoder(spec), distributed.put(params, layout.of(declare(spec))), layout)


class LabelError(RunError):
    """Marks or labels that an update can't learn from."""


def check_labels(batch: Batch) -> None:
    """Raise LabelError unless every score can be the label of an implicit reward model."""
    scores = batch["raw_scores"]
    if scores.min() < 0 or scores.max() > 1:
        raise LabelError(
            f"implicit_reward_model: scores from {scores.min()} to {scores.max()}; an implicit "
            "reward model learns from labels in [0, 1]: rescale what the reward function returns, "
            "or reward.on_error"
        )


def covariance_marker(functions: AlgorithmFunctions) -> Callable[..., Any] | None:
    """Return the jitted function that marks tokens of high covariance, if one is asked for."""
    select = functions.select_covariant
    if select is None:
        return None
    compute = jax.jit(lambda fields, key: call(with_key(select, key), fields))

    def mark(fields: dict[str, Any], key: Any) -> jax.Array:
        return check_marks(compute(fields, key), select, fields["mask"].shape)

    return mark


def initial_weights(
    config: TrainConfig, model: LoadedModel, layout: Layout, on_host: bool
) -> Params:
    """Copy the weights that a run begins with, in the compute dtype; of an adapter as they are.

    Args:
        config: of the run.
        model: the policy's.
        layout: where the copy stands.
        on_host: whether it waits there.
    """
    if model.frozen is not None:
        return jax.tree.map(jnp.copy, model.params)
    dtypes = model.model.compute_dtypes(config.model.dtype)
    params = reshard(model.params, layout.of(model.model.declare()), dtype=dtypes)
    return to_host(params) if on_host else params


def open_reference(
    config: TrainConfig,
    model: LoadedModel,
    layouts: Layouts,
    infer: Callable[[Any, Batch], dict[str, np.ndarray]],
    initial: Callable[[Layout, bool], Params],
) -> tuple[Reference, TrainState | None]:
    """Copy the weights that a run begins with, in the compute dtype; return what is done with them.

    With an adapter the reference is the base, and so an adapter of zeros. Where a refresh mixes,
    its weights are in float32, or small shares of the policy would be lost in rounding.

    Args:
        config: of the run.
        model: the policy's.
        layouts: where each model stands.
        infer: the policy's pass.
        initial: (layout, whether they wait on the host) -> weights that the run begins with, which
            others may read, too.

    Returns:
        The reference, and the state that one which is refreshed starts from, whose `updates` count
        refreshes.

    Raises:
        ConfigError: it has a mesh of its own or is offloaded, but there is an adapter.
    """
    layout, settings = layouts.reference, config.reference
    if model.frozen is not None:
        if layout is not layouts.train or config.offload.reference:
            key = "offload.reference" if config.offload.reference else "mesh.reference"
            raise ConfigError(
                f"{key} is set, but beside an adapter the reference is the frozen model "
                "itself, where it is trained: remove it"
            )
        split, dtypes = jax.tree.map(lambda like: like.sharding, model.like), None
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        params = jax.jit(zeros, out_shardings=split)(model.like)
    else:
        split = layout.of(model.model.declare())
        dtypes = model.model.compute_dtypes(reference_dtype(config))
        if layout is not layouts.train:
            forward = run_forward(config, model.model, layout, model.tower)
            shape = row_shapes(config, forward, layout)[0]
            infer = logprob_pass(forward.over(shape), shape, layout.mesh, ("logprobs",))
        if settings.refresh_every is None:
            params = initial(layout, config.offload.reference)
        else:
            params = reshard(model.params, split, dtype=dtypes)

    @functools.partial(jax.jit, donate_argnums=1, out_shardings=split)
    def mix(before: Params, after: Params) -> Params:
        share = settings.mix
        return jax.tree.map(lambda old, new: share * new + (1 - share) * old, before, after)

    copy = functools.partial(reshard, target=split, dtype=dtypes)
    on_host = config.offload.reference
    stays = settings.refresh_every is None
    reference = Reference(
        infer=infer,
        params=params if stays else None,
        copy=copy,
        mix=mix,
        settings=settings,
        on_host=on_host,
    )
    if stays:
        return reference, None
    zero = distributed.put(np.zeros((), np.int32), replicated(layout.mesh))
    return reference, TrainState(params, (), zero, zero)


def reference_dtype(config: TrainConfig) -> str:
    """Return the dtype of a reference's weights."""
    return config.model.dtype if config.reference.mix == 1 else "float32"


# The programs of a run's first step, which begin to be compiled while its data is read.


def abstract_weights(model: Model, layout: Layout, dtype: str = "float32") -> Any:
    """Return any model's parameters as `abstract_params` does."""
    declared = model.declare()
    return jax.tree.map(
        lambda d, s, t: jax.ShapeDtypeStruct(d.shape, t, sharding=s),
        declared,
        layout.of(declared),
        model.compute_dtypes(dtype),
    )


def needs_inference(name: str, functions: AlgorithmFunctions, *, has_adapter: bool) -> bool:
    """Tell whether a step asks a role for more than its updates do."""
    return (
        name != "actor"
        or not functions.on_policy
        or functions.select_covariant is not None
        or (has_adapter and functions.needs_reference)
    )


def abstract_microbatch(
    names: set[str],
    config: TrainConfig,
    shape: RowShape,
    mesh: Mesh,
    model: ForwardConfig | None = None,
) -> MicroBatch:
    """Return a micro-batch with the fields that a loss asks for, as shapes.

    Args:
        names: of the fields.
        config: of the run.
        shape: of the micro-batch.
        mesh: the devices.
        model: how the model is run, which says what rows hold for it beside tokens; None: nothing.
    """
    routes, visuals = (None, None) if model is None else (model.route_shape, model.visuals)
    known = abstract_fields(
        shape.sequences, shape.width, len(config.reward.components), config.teacher.top_k or 1
    )
    per_token = jax.ShapeDtypeStruct((shape.sequences, shape.width), jnp.float32)
    known["correction"] = per_token  # a weight of the loss, no field that a function may ask for
    known |= abstract_pairs(shape.sequences)
    known["second_start"] = jax.ShapeDtypeStruct((shape.sequences,), jnp.int32)
    fields = {name: known[name] for name in names | {"mask"}}
    fields |= {"weights": per_token, "token_weights": per_token}
    row: Any = jax.ShapeDtypeStruct((shape.rows, shape.length), jnp.int32)
    slot: Any = jax.ShapeDtypeStruct((shape.sequences,), jnp.int32)
    scored: Any = jax.ShapeDtypeStruct((shape.rows, shape.length), bool)
    replayed: Any = routes and jax.ShapeDtypeStruct((*row.shape, *routes[:2]), routes.dtype)
    seen: Any = visuals and visuals.without_any(shape)
    micro = MicroBatch(Rows(row, row, row, slot, slot, slot, scored, replayed, seen), fields)
    return jax.tree.map(lambda x: shape_in(x, over_batch(mesh)), micro)


def compile_first_step(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    model: Model,
    models: Models,
    layouts: Layouts,
) -> None:
    """Begin to compile what the models of a run need in their first step, where others can wait.

    It is a guess by the config. A batch for which it is wrong waits for its own programs.

    Args:
        config: of the run.
        functions: that it names.
        model: the policy.
        models: as they are built.
        layouts: where they stand.
    """
    roles, actor = models.roles, models.actor

    def micro_like(role: Role, bucket: RowShape) -> MicroBatch:
        learner = role.learner
        names = learner.objective.asks_for()
        return abstract_microbatch(names, config, bucket, learner.mesh, learner.model)

    def infer_ahead(role: Role, params: Any) -> None:
        if isinstance(role.infer, Inference):
            role.infer.compile_ahead(params, lambda bucket: micro_like(role, bucket).rows)

    for name, role in roles.items():
        if needs_inference(name, functions, has_adapter=is_adapted(model)):
            infer_ahead(role, role.learner.params_like)
    is_copy = not is_adapted(model) and layouts.reference is layouts.train
    if functions.needs_reference and is_copy:
        infer_ahead(actor, abstract_weights(model, layouts.reference, reference_dtype(config)))
    for role in models.to_update(1, config.critic.warmup_steps):
        if not role.learner.model.router_loss_coef:  # which needs a pass of its own first
            coefs, objective = dict[str, Any](COEFS), role.learner.objective
            distillation = isinstance(objective, PolicyObjective) and objective.distillation
            if distillation and distillation.teacher is not None:
                teacher = distillation.teacher.model
                coefs["teacher"] = abstract_weights(teacher, layouts.train, config.model.dtype)
            role.learner.compile_ahead(functools.partial(micro_like, role), coefs)
