"""The models of a run that are trained: the actor, the critic, the implicit reward model."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config.errors import ConfigError, RunError, config_errors_at
from jaxrl_llm.config.fields import call
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.heads import with_value_head
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.model import Model, model_of
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.runs.resume import TrainableModel
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.bind import AlgorithmFunctions, UpdateSpec, check_marks, with_key
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.inference import Inference, logprob_pass, value_pass
from jaxrl_llm.training.layouts import Layouts, update_shape
from jaxrl_llm.training.load_model import LoadedModel, forward_config, laid_out, read_model
from jaxrl_llm.training.objectives import PolicyObjective
from jaxrl_llm.training.teachers import TeacherModel
from jaxrl_llm.training.update import Learner, TrainState, router_hooks
from jaxrl_llm.types import ROUTES, Batch

log = logging.getLogger(__name__)


def unannotated(state: TrainState, batch: Batch) -> Batch:
    """Return the same mini-batch."""
    del state
    return batch


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model that is trained: the actor, the critic or the implicit reward model.

    Attributes:
        name: of its metrics and in checkpoints.
        learner: its update.
        infer: (params, batch) -> what it says of each token [B T], by name.
        learning_rate: of an update, by its number.
        max_skipped: updates in a row that may be skipped.
        annotate_minibatch: (state, mini-batch) -> the mini-batch with fields that are computed
            from the whole of it.
        teacher: weights of the teacher that an update runs; None: it runs none.
    """

    name: str
    learner: Learner
    infer: Callable[[Any, Batch], dict[str, np.ndarray]]
    learning_rate: Callable[[int], Any]
    max_skipped: int
    annotate_minibatch: Callable[[TrainState, Batch], Batch] = unannotated
    teacher: Any = None


def make_roles(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    actor: LoadedModel,
    layouts: Layouts,
    shape_on: Callable[[ForwardConfig, Layout], RowShape],
    teacher: TeacherModel | None = None,
) -> tuple[dict[str, Role], dict[str, TrainableModel]]:
    """Build every model that is trained, and say what it starts from.

    Args:
        config: of the run.
        functions: that it names.
        actor: the policy's model.
        layouts: where each model stands.
        shape_on: shape of micro-batches of a model's passes in a layout.
        teacher: that the actor's update runs; None: it runs none.
    """
    roles, trainable = {}, {}
    paths = {
        "critic": config.critic.path,
        "implicit_reward_model": config.implicit_reward_model.path,
    }
    for name, update in functions.updates.items():
        is_critic, path = name == "critic", paths.get(name)
        layout = layouts.of(name)
        key = f"{name}.path" if path else "model.path"
        if actor.frozen is not None and name != "actor":
            path = path or config.model.path  # these begin at the base, and have no adapter
        model = actor
        if path:
            model = read_role(path, key, layout, actor.model, value_head=is_critic)
            model = model.for_length(config.data.max_prompt_tokens + config.rollout.max_new_tokens)
        elif layout is not layouts.train:
            placed = reshard(actor.params, layout.of(actor.model.declare()))
            model = laid_out(actor.model, placed, layout)
        if is_critic:
            model = as_critic(model, key, layout)
        settings = forward_config(
            *(config.model, model.model, layout, config.rollout.temperature),
            *(actor.tower, config.data.max_pixels),
        )
        settings = replaying(settings, config) if name == "actor" else settings
        shape = shape_on(settings, layout)
        updates = update_shape(config, settings, layout, shape)
        own_teacher = teacher if name == "actor" else None
        spec = taught_by(own_teacher, update, updates) if own_teacher else update
        learner = learner_of(spec, settings, updates, layout, model.like, model.frozen)
        infer = inference_of(name, functions, settings, shape, layout, model.frozen)
        roles[name] = Role(
            name=name,
            learner=learner,
            infer=infer,
            learning_rate=update.schedule,
            max_skipped=update.max_skipped,
            teacher=own_teacher and own_teacher.params,
        )
        trainable[name] = TrainableModel(model, learner, key)
    return annotating(roles, functions, config.seed), trainable


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


def annotating(roles: dict[str, Role], functions: AlgorithmFunctions, seed: int) -> dict[str, Role]:
    """Return roles that compute fields from whole mini-batches, where functions ask for such."""
    annotate = {}
    if functions.select_covariant:
        infer = roles["actor"].infer
        annotate["actor"] = covariance_annotator(functions.select_covariant, infer, seed)
    if functions.learns_labels:
        annotate["implicit_reward_model"] = check_labels
    changed = {
        name: dataclasses.replace(roles[name], annotate_minibatch=function)
        for name, function in annotate.items()
    }
    return roles | changed


def taught_by(teacher: TeacherModel, update: UpdateSpec, shape: RowShape) -> UpdateSpec:
    """Return the actor's update with the teacher that it runs."""
    objective = update.objective
    assert isinstance(objective, PolicyObjective) and objective.distillation is not None
    how = teacher.compared_by(objective.distillation.divergence, shape)
    return update._replace(objective=dataclasses.replace(objective, distillation=how))


def learner_of(
    update: UpdateSpec,
    settings: ForwardConfig,
    shape: RowShape,
    layout: Layout,
    params_like: Any,
    frozen: Any = None,
) -> Learner:
    """Build the update of a model as its functions say; the last two are `Learner`'s."""
    settings = settings.over(shape)
    return Learner(
        update.objective,
        settings,
        update.optimizer(settings.model.declare(), params_like),
        reduce=update.reduce,
        shape=shape,
        mesh=layout.mesh,
        params_like=params_like,
        frozen=frozen,
        hooks=router_hooks(settings, shape, layout.mesh, frozen),
    )


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
    names = ("logprobs", "entropy", *sorted(functions.needs & {"sum_pi_squared"}))
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
    return laid_out(model_of(spec), distributed.put(params, layout.of(declare(spec))), layout)


class LabelError(RunError):
    """Marks or labels that an update can't learn from."""


def check_labels(state: TrainState, batch: Batch) -> Batch:
    """Raise LabelError unless every score can be the label of an implicit reward model."""
    del state
    scores = batch["raw_scores"]
    if scores.min() < 0 or scores.max() > 1:
        raise LabelError(
            f"implicit_reward_model: scores from {scores.min()} to {scores.max()}; an implicit "
            "reward model learns from labels in [0, 1]: rescale what the reward function returns, "
            "or reward.on_error"
        )
    return batch


def covariance_annotator(
    select: Callable[..., Any], infer: Callable[..., Any], seed: int
) -> Callable[[TrainState, Batch], Batch]:
    """Return a function that adds `high_covariance` to a mini-batch, by the current log-probs."""

    @jax.jit
    def compute(fields: dict[str, Any], key: Any) -> Any:
        return call(with_key(select, key), fields)

    def annotate(state: TrainState, batch: Batch) -> Batch:
        key = jax.random.fold_in(jax.random.key(seed), int(state.updates))
        fields = {**batch.arrays, "logprobs": infer(state.params, batch)["logprobs"]}
        high = check_marks(compute(fields, key), select, batch.tokens.shape)
        return batch.add(high_covariance=np.asarray(high))

    return annotate


def old_logprob_step(
    infer: Callable[..., dict[str, np.ndarray]], *, use_rollout_logprobs: bool, probe_tokens: int
) -> Callable[[Any, Batch], tuple[Batch, Batch]]:
    """Return the step that adds `old_logprobs` and what else the policy says of a batch.

    Args:
        infer: (params, batch) -> `logprobs` and more [B T].
        use_rollout_logprobs: take the engine's log-probs; the policy then runs over the first
            usable sequences only, to compare the two.
        probe_tokens: the most tokens that these sequences hold.

    Returns:
        (params, batch) -> the batch with the fields, and the part of it that holds `logprobs` and
        `entropy` under the policy.
    """

    def add(params: Any, batch: Batch) -> tuple[Batch, Batch]:
        if use_rollout_logprobs:
            # the same number in every step, or what compares the two would compile again
            count = max(1, probe_tokens // batch.tokens.shape[1])
            part = batch.take(np.argsort(~batch["mask"].any(1), kind="stable")[:count])
            probe = part.add(**infer(params, part))
            return batch.add(old_logprobs=batch["rollout_logprobs"]), probe
        stats = infer(params, batch)
        rest = {name: values for name, values in stats.items() if name != "logprobs"}
        return batch.add(old_logprobs=stats["logprobs"], **rest), batch.add(**stats)

    return add
