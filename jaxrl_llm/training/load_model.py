"""Where each model of a run stands, and how it gets there from its directory.

Meshes, rules, the shape of micro-batches on them; weights in the training layout, and how a model
is run there.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import FunctionSpec, closest, load_function, signature_of
from jaxrl_llm.config.sections import (
    BatchConfig,
    LoraConfig,
    MeshConfig,
    MeshSizes,
    ModelConfig,
    RolloutConfig,
    SftBatchConfig,
    SftMeshConfig,
)
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.data.packing import RowShape, row_shape, sequence_cost
from jaxrl_llm.kernel_choice import choose_attention, choose_experts, choose_tower_attention
from jaxrl_llm.models.decoder import Decoder, with_reward_head, with_value_head
from jaxrl_llm.models.flops import active_parameters
from jaxrl_llm.models.hf.adapter import load_adapter, read_adapter_spec
from jaxrl_llm.models.hf.config import config_to_save, read_spec
from jaxrl_llm.models.hf.load import load_arrays, load_params
from jaxrl_llm.models.lora import (
    combine_params,
    find_targets,
    merge_adapter,
    split_adapter,
    without_adapter,
)
from jaxrl_llm.models.model import Model, decoder_spec, for_length
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.nnx import from_module
from jaxrl_llm.models.parameters import compute_dtypes, declare, init_params
from jaxrl_llm.models.spec import LoraSpec, ModelSpec
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import (
    AXES,
    DEFAULT_RULES,
    ROLLOUT_RULES,
    UNSPLIT,
    Layout,
    Rules,
    batch_shards,
    fallbacks,
    make_mesh,
)
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.forward import ForwardConfig, FrozenTower, VisualPacker, vision_of

log = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """A model in the training layout.

    Attributes:
        model: the functions.
        params: float32 master weights of what is trained: all, or the adapter.
        like: shape, dtype and sharding of each of these arrays.
        frozen: the model that an adapter is beside, in the compute dtype; None without one.
        tower: the vision tower, if it is frozen.
    """

    model: Model
    params: Any
    like: Any
    frozen: Any = None
    tower: FrozenTower | None = None

    @property
    def spec(self) -> ModelSpec:
        """Return the architecture, of a model that a Hugging Face directory describes."""
        return decoder_spec(self.model)

    @property
    def tower_params(self) -> Any:
        """Return the parameters of a frozen vision tower; None without one."""
        return self.tower and self.tower.params

    def for_length(self, longest: int) -> "LoadedModel":
        """Return it as it is run where no sequence is longer; see `ModelSpec.for_length`."""
        return self._replace(model=for_length(self.model, longest))


@activity("loading the weights")
def open_model(config: ModelConfig, layout: Layout, *, seed: int) -> LoadedModel:
    """Load a Hugging Face directory, or draw its weights at random, in the training layout.

    Raises:
        ConfigError: the directory can't be read, or holds a critic.
    """
    if config.function is not None:
        return open_own_model(config, config.function, layout, seed=seed)
    with config_errors_at("model.path"):
        spec = model_spec(config)
        if spec.value_head or spec.reward_head:
            raise ValueError(f"{config.path} ends in a value head, expected a language model")
        is_adapted = config.lora is not None or config.adapter is not None
        check_expert_keys(config, spec, is_adapted=is_adapted)
        whole = dataclasses.replace(spec, vision_apart=False)
        if config.random_init:
            split = layout.of(declare(whole))
            draw = jax.jit(lambda key: init_params(whole, key=key), out_shardings=split)
            model = laid_out(Decoder(whole), draw(jax.random.key(seed)), layout)
        else:
            model = read_model(config.path, whole, layout)
        if spec.vision_apart:
            model = with_frozen_tower(model, spec, layout, config)
        return with_adapter(model, config, layout, seed=seed) if is_adapted else model


def model_spec(config: ModelConfig) -> ModelSpec:
    """Read the spec of a model as it is trained: without its tower, if that is not.

    Raises:
        ConfigError: a tower is asked for that is not there, or can't be read.
        ValueError: as for `read_spec`, as FileNotFoundError.
    """
    spec = read_spec(config.path)  # what is wrong here is not the tower's
    if config.vision == "none":
        return spec
    with config_errors_at(f"model.vision={config.vision}"):
        spec = read_spec(config.path, vision=True)
    return dataclasses.replace(spec, vision_apart=config.vision == "frozen")


def with_frozen_tower(
    model: LoadedModel, spec: ModelSpec, layout: Layout, config: ModelConfig
) -> LoadedModel:
    """Return a model without its vision tower, and that beside it in the compute dtype.

    Args:
        model: with its tower.
        spec: of the same without.
        layout: where it stands.
        config: of the model.
    """
    decoder, params = Decoder(spec), dict(model.params)
    homes, dtypes = layout.of(declare(model.spec)), compute_dtypes(model.spec, config.dtype)
    tower = reshard(params.pop("vision"), homes["vision"], dtype=dtypes["vision"])
    alone = laid_out(decoder, params, layout)
    choice = choose_tower_attention(config.attention, vision_of(decoder), layout, config.dtype)
    own = dataclasses.replace(layout, kernel=choice.kernel)
    return alone._replace(tower=FrozenTower(tower, decoder, own, config.dtype))


def open_scorer(
    config: ModelConfig, layout: Layout, *, seed: int, of_steps: bool = False
) -> LoadedModel:
    """Load a reward model, or another model with a new head in place of its own.

    That of a process reward model, `of_steps`, is a value head, whose logit of a step is what it
    says of the step's last token; a new one is zeros.

    Raises:
        ConfigError: the directory can't be read, or holds a critic or a model of one's own.
    """
    if config.function is not None:
        raise ConfigError("model.function gives no reward model: name a Hugging Face directory")
    with config_errors_at("model.path"):
        spec = read_spec(config.path)
        if spec.value_head if of_steps else spec.reward_head:
            return read_model(config.path, spec, layout)
        heads = {"value_head": True, "reward_head": False} if of_steps else {"reward_head": True}
        # this refuses a head for which transformers' code of the family has no class
        config_to_save(dataclasses.replace(spec, **heads), config.path, np.dtype(np.float32))
        if spec.reward_head:
            base = read_model(config.path, spec, layout)
        else:
            base = open_model(config, layout, seed=seed)
        if of_steps:
            params, spec = with_value_head(base.params, spec)
        else:
            params, spec = with_reward_head(base.params, spec, key=jax.random.key(seed))
        kind = "process reward model" if of_steps else "reward model"
        log.info("a %s starts from %s, with a new head", kind, config.path)
        return laid_out(Decoder(spec), distributed.put(params, layout.of(declare(spec))), layout)


def open_own_model(
    config: ModelConfig, function: FunctionSpec, layout: Layout, *, seed: int
) -> LoadedModel:
    """Make the model that a function returns, and load or draw its weights.

    Raises:
        ConfigError: there is no such model, or its directory has not its weights.
    """
    model = make_model(function, config.path, seed=seed)
    with config_errors_at(KEY):
        declared = model.declare()
    check_axes(model, layout)
    with config_errors_at("model.path"):
        split = layout.of(declared)
        if config.random_init:
            params = jax.jit(model.init_params, out_shardings=split)(jax.random.key(seed))
        else:
            params = load_arrays(config.path, declared, shardings=split)
    return laid_out(model, params, layout)


def check_expert_keys(config: ModelConfig, spec: ModelSpec, *, is_adapted: bool) -> None:
    """Raise ConfigError for a key of experts that are not there, or of routers not trained."""
    for name in ("router_loss_coef", "experts"):
        value = getattr(config, name)
        if value != getattr(ModelConfig, name) and spec.moe is None:
            raise ConfigError(f"model.{name}={value}, but {config.path} has no experts: remove it")
    has_bias = spec.moe is not None and isinstance(spec.moe.router, SigmoidRouter)
    rate = config.router_bias_rate
    if rate != ModelConfig.router_bias_rate and (is_adapted or not has_bias):
        raise ConfigError(
            f"model.router_bias_rate={rate}, but in {config.path} no bias of a router is trained: "
            "remove it"
        )


def with_adapter(
    base: LoadedModel, config: ModelConfig, layout: Layout, *, seed: int
) -> LoadedModel:
    """Freeze a model, and put an adapter beside it: a new one, or that of model.adapter.

    The base is held in the compute dtype: nothing is added to it, so it needs no float32 masters.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    spec = adapted_spec(base.spec, config.lora, config.adapter)
    split, _ = split_adapter(layout.of(declare(spec)))
    if config.adapter is None:
        draw = jax.jit(
            lambda key: split_adapter(init_params(spec, key=key))[0], out_shardings=split
        )
        adapter = draw(jax.random.key(seed))
    else:
        with config_errors_at("model.adapter"):
            adapter = distributed.put(load_adapter(config.adapter, spec), split)
    frozen = base.params
    if config.dtype != "float32":
        dtypes = compute_dtypes(base.spec, config.dtype)
        frozen = reshard(frozen, layout.of(declare(base.spec)), dtype=dtypes)
    like = like_of(adapter, split)
    return LoadedModel(Decoder(spec), adapter, like, frozen, base.tower)


def adapted_spec(base: ModelSpec, lora: LoraConfig | None, adapter: str | None) -> ModelSpec:
    """Return the spec of a model with the adapter that its config asks for, if it does.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    if adapter is not None:
        with config_errors_at("model.adapter"):
            return read_adapter_spec(adapter, base)
    if lora is None:
        return base
    with config_errors_at("model.lora"):
        adapter_spec = LoraSpec(
            rank=lora.rank,
            alpha=lora.alpha,
            targets=find_targets(lora.targets, base),
            rslora=lora.rslora,
        )
        return dataclasses.replace(base, lora=adapter_spec)


def merged_into_base(
    adapter: Any, model: Model, path: str, shardings: Any = None
) -> tuple[Any, Model]:
    """Merge an adapter into the float32 weights of its base's directory, without a second copy.

    Args:
        adapter: its arrays.
        model: with the adapter.
        path: Hugging Face directory of the base.
        shardings: of the base's arrays.

    Returns:
        Parameters and functions of the model without an adapter.
    """
    spec = decoder_spec(model)
    alone = without_adapter(spec)
    base = load_params(path, alone, shardings=shardings)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(base: Any, adapter: Any) -> Any:
        return merge_adapter(combine_params(adapter, base), spec)[0]

    return run(base, adapter), Decoder(alone)


def read_model(path: str, spec: ModelSpec, layout: Layout) -> LoadedModel:
    """Load the weights of a Hugging Face directory in a layout."""
    params = load_params(path, spec, shardings=layout.of(declare(spec)))
    return laid_out(Decoder(spec), params, layout)


def laid_out(model: Model, params: Any, layout: Layout) -> LoadedModel:
    """Return parameters that are in a layout as a LoadedModel; log where its rules don't apply."""
    declared = model.declare()
    for name, left in fallbacks(declared, layout.mesh, layout.rules).items():
        log.warning("%s is not split as the rules say: %s", name, left)
    return LoadedModel(model, params, like_of(params, layout.of(declared)))


def like_of(params: Any, layout: Any) -> Any:
    """Return shape, dtype and sharding of each array."""
    return jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, layout
    )


def forward_config(
    config: ModelConfig,
    model: Model,
    layout: Layout,
    temperature: float = 1.0,
    tower: FrozenTower | None = None,
    max_pixels: int | None = None,
) -> ForwardConfig:
    """Return how the model is run in training.

    Args:
        config: of the model.
        model: the functions.
        layout: where it stands.
        temperature: that logits are divided by.
        tower: what has features of images, if that is not trained.
        max_pixels: of an image, or of a frame of a video; None: any number.

    Raises:
        ConfigError: its layers, experts or heads can't be split over the mesh, or it can't attend
            or multiply rows of experts as the config says.
    """
    check_split(config, model, layout)
    spec = model.spec if isinstance(model, Decoder) else None  # another model attends by itself
    return ForwardConfig(
        model=model,
        dtype=config.dtype,
        remat=config.remat,
        logprob_chunk=config.logprob_chunk,
        router_loss_coef=config.router_loss_coef,
        router_bias_rate=config.router_bias_rate,
        temperature=temperature,
        context=layout.context,
        kernel=spec and choose_attention(config.attention, spec, layout, config.dtype).kernel,
        grouped_kernels=spec and choose_experts(config.experts, spec, layout, config.dtype),
        rules=layout.rules if spec is None else DEFAULT_RULES,
        visuals=VisualPacker(model, tower, max_pixels) if spec and spec.vision else None,
    )


def check_split(config: ModelConfig, model: Model, layout: Layout) -> None:
    """Raise ConfigError where a model can't be run on a mesh, before anything is compiled."""
    rows = jax.ShapeDtypeStruct((batch_shards(layout.mesh) * layout.pieces, 1), jnp.int32)
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0)))
    is_own = not isinstance(model, Decoder)
    remat = config.remat if is_own else "none"
    with config_errors_at(KEY if is_own else "mesh"):
        jax.eval_shape(
            lambda params, rows: model.hidden_states(
                params, rows, rows, rows, dtype="float32", remat=remat, layout=layout
            ),
            params,
            rows,
        )


# The model that a function of the config returns, instead of one of a Hugging Face directory.


KEY = "model.function"

PASSED = ("rngs", "vocab_size")
"""What the trainer gives a function that asks for it: an `nnx.Rngs`, and how many tokens the
tokenizer has."""


def make_model(spec: FunctionSpec, path: str, *, seed: int) -> Model:
    """Call the function that makes a model; one that asks for `rngs` returns an `nnx.Module`.

    Args:
        spec: the function.
        path: directory or repository of the tokenizer.
        seed: for the variables of a module that are not trained.

    Raises:
        ConfigError: there is no such function, it returns no model, or flax is not installed.
    """
    make = load_function(spec, functions.MODELS, passed=PASSED, key=KEY)
    asked = signature_of(make.func if isinstance(make, functools.partial) else make).parameters
    with config_errors_at("model.path"):
        given = {"vocab_size": len(load_tokenizer(path))} if "vocab_size" in asked else {}
    if "rngs" in asked:
        try:
            import flax  # noqa: F401
        except ImportError as error:
            hint = "install the extra, pip install -e '.[flax]'"
            raise ConfigError(f"{KEY}: {error}: {hint}") from error
    with config_errors_at(KEY):
        make = functools.partial(make, **given)
        model = from_module(make, seed=seed) if "rngs" in asked else make()
        if not isinstance(model, Model):
            raise TypeError(
                f"{spec.fn} returned {type(model).__name__}, expected an nnx.Module, of a function "
                "that takes rngs, or an object of a class that derives from models.model.Model, "
                "such as models.functional.FunctionalModel"
            )
        _ = model.vocab_size, model.declare()  # what is no model fails here, and not in a step
    return model


def check_axes(model: Model, layout: Layout) -> None:
    """Require a rule for each logical axis of a model, and an array for each rule of the config's.

    Raises:
        ConfigError: a rule is missing, or of no array.
    """
    axes = {axis for array in jax.tree.leaves(model.declare()) for axis in array.axes}
    for axis in sorted(layout.rules.keys() - DEFAULT_RULES.keys() - axes):
        raise ConfigError(f"mesh.rules.{axis}: no array of {KEY} has it; {closest(axis, axes)}")
    for axis in sorted(axes - layout.rules.keys()):
        if not axis.startswith(UNSPLIT):
            raise ConfigError(
                f"{KEY}: there is no rule for the logical axis {axis!r}, so say what splits it, as "
                f"in mesh.rules.{axis}: null; {closest(axis, layout.rules)}"
            )


# Where the models of a run stand: meshes, rules, and the shape of micro-batches on them.


CHEAP_ATTENTION = 0.1
"""Of what a token costs outside attention, the most that long rows may add."""


class Layouts(NamedTuple):
    """Where each model of a run stands."""

    train: Layout
    rollout: Layout
    critic: Layout
    reference: Layout
    reward_model: Layout
    teacher: Layout

    def of(self, role: str) -> Layout:
        """Return where a role's model stands; reward models of both kinds share a mesh."""
        meshes = {"actor": "train", "implicit_reward_model": "reward_model"}
        return getattr(self, meshes.get(role, role))


def overlaps_training(rollout: RolloutConfig, layouts: Layouts) -> bool:
    """Return whether a run's engine samples while its models are trained.

    It does where answers may be stale, and the engine has devices of its own: nodes, a mesh apart
    from all others, or vLLM's.

    Raises:
        ConfigError: it does not, but the config gives it turns to take; or several processes train,
            which would have to take the same turns.
    """
    if rollout.nodes:
        return rollout.staleness > 0
    if rollout.engine == "vllm":
        return rollout.staleness > 0 and not rollout.vllm.sleep
    others = {
        device
        for name in layouts._fields
        if name != "rollout"
        for device in getattr(layouts, name).mesh.devices.flat
    }
    overlaps = rollout.staleness > 0 and others.isdisjoint(layouts.rollout.mesh.devices.flat)
    keys = {"turns": rollout.turns is not None, "at_push": rollout.at_push == "keep"}
    for key in (key for key, is_set in keys.items() if is_set and not overlaps):
        raise ConfigError(
            f"rollout.{key}={getattr(rollout, key)} is of an engine with devices of its own: give "
            "it such by mesh.rollout.first_device and mesh.rollout.devices, and the others by "
            "mesh.train"
        )
    if overlaps and distributed.process_count() > 1:
        raise ConfigError(
            f"rollout.staleness={rollout.staleness} with a mesh of the engine's own (mesh.rollout) "
            f"needs one training process, got {distributed.process_count()}"
        )
    return overlaps


def all_devices() -> Sequence[Any]:
    """Return all devices that jax has.

    A run opens them before it calls a function of a user's, which would be blamed otherwise.

    Raises:
        ConfigError: it can't open the platform that it is to use.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin is not installed
        reason = str(error).strip() or "its plugin is not installed; install it, or name another"
        settings: Any = jax.config
        raise ConfigError(
            f"JAX_PLATFORMS={settings.jax_platforms}: jax can't open this platform: "
            f"{reason.splitlines()[0]}"
        ) from error


def open_layouts(
    config: MeshConfig, devices: Sequence[Any] | None = None, *, has_own_axes: bool = False
) -> Layouts:
    """Lay the devices out as the config says, for each model; by default all that jax has."""
    place = functools.partial(open_layout, config, devices=devices, has_own_axes=has_own_axes)

    def other(name: str, sizes: MeshSizes | None) -> Layout:
        return train if sizes is None else place(name, sizes)

    train = place("train", config.train)
    return Layouts(
        train,
        rollout=other("rollout", config.rollout),
        critic=other("critic", config.critic),
        reference=other("reference", config.reference),
        reward_model=other("reward_model", config.reward_model),
        teacher=other("teacher", config.teacher),
    )


def open_layout(
    config: SftMeshConfig,
    name: str,
    sizes: MeshSizes,
    devices: Sequence[Any] | None = None,
    *,
    has_own_axes: bool = False,
) -> Layout:
    """Lay the devices out as one of the config's meshes says; by default all that jax has.

    Args:
        config: of the meshes.
        name: of the mesh.
        sizes: of its axes.
        devices: to take some of.
        has_own_axes: as for `own_rules`.

    Raises:
        ConfigError: the devices don't make up this mesh, leave a process out, or a rule is none.
    """
    devices = all_devices() if devices is None else devices
    end = None if sizes.devices is None else sizes.first_device + sizes.devices
    chosen = devices[sizes.first_device : end]
    if not chosen or (end or 0) > len(devices):
        raise ConfigError(
            f"mesh.{name}: first_device={sizes.first_device} with devices={sizes.devices}, but "
            f"there are {len(devices)} devices"
        )
    if left_out := {d.process_index for d in devices} - {d.process_index for d in chosen}:
        raise ConfigError(
            f"mesh.{name}: first_device={sizes.first_device} with devices={sizes.devices} has no "
            f"device of process {min(left_out)}: name devices of every process, or start one"
        )
    with config_errors_at(f"mesh.{name}"):
        along = {
            "stage": sizes.stage,
            "expert": sizes.expert,
            "data": sizes.data,
            "fsdp": sizes.fsdp,
            "context": sizes.context,
            "tensor": sizes.tensor,
        }
        mesh = make_mesh(along, chosen)
    defaults = ROLLOUT_RULES if name == "rollout" else DEFAULT_RULES
    rules = own_rules(config.rules, defaults, has_own_axes=has_own_axes)
    return Layout(mesh, config.context_by, rules)


def own_rules(
    changed: Mapping[str, Any], defaults: Rules = DEFAULT_RULES, *, has_own_axes: bool = False
) -> Rules:
    """Return rules with a config's own in their place.

    Args:
        changed: the config's rules.
        defaults: the others.
        has_own_axes: whether there may be rules for logical axes of a user's own model.

    >>> own_rules({"embed": None})["embed"]
    >>> own_rules({"vocab": ["tensor"]})["vocab"]
    ('tensor',)

    Raises:
        ConfigError: there is no such logical axis, or the rule is none.
    """
    for axis, rule in changed.items():
        if axis not in DEFAULT_RULES and not has_own_axes:
            raise ConfigError(f"mesh.rules.{axis}: {closest(axis, DEFAULT_RULES)}")
        names = [rule] if isinstance(rule, str) else rule or []
        if not isinstance(names, list) or any(name not in AXES for name in names):
            raise ConfigError(f"mesh.rules.{axis}={rule!r}, expected null or some of {list(AXES)}")
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()}
    return {**defaults, **lists}


def packed_shape(
    layout: Layout,
    model: Model,
    *,
    tokens: int,
    longest: int,
    sequences: int,
    long_rows: bool = False,
    visual_tokens: int | None = None,
) -> RowShape:
    """Return the shape of the micro-batches of a pass.

    Args:
        layout: where it runs.
        model: which says what a sequence costs.
        tokens: the most on each device.
        longest: sequence, in tokens; a row is as long, or longer if several devices share it.
        sequences: in all.
        long_rows: whether a row may be several times as long; see `takes_long_rows`.
        visual_tokens: the most on each device that stand for images and videos; None: all.

    Raises:
        ConfigError: a device can't hold its part of a row.
    """
    share = layout.pieces * layout.stages
    length = -(-longest // share) * share
    if tokens * layout.pieces < length:
        raise ConfigError(
            f"batch.max_tokens_per_device={tokens} can't hold a device's part of a row of {length} "
            f"tokens, which context={layout.pieces} share: expected "
            f"{length // layout.pieces} or more"
        )
    shape = row_shape(
        tokens * layout.shards,
        length,
        sequences=sequences,
        multiple_of=batch_shards(layout.mesh),
        cost=sequence_cost(model),
        unit=share,
        long_rows=long_rows,
    )
    return shape._replace(visual_share=min(1.0, (visual_tokens or tokens) / tokens))


def takes_long_rows(forward: ForwardConfig, layout: Layout, longest: int) -> bool:
    """Tell whether rows may be several times as long as the longest sequence.

    Attention then costs up to 2 · `longest` keys for a token, twice as much or more. So it has to
    be cheap, it must be ours, no devices may share a row, and a kernel has its own limits.

    Args:
        forward: how the model is run.
        layout: where.
        longest: sequence, in tokens.
    """
    if not isinstance(forward.model, Decoder) or forward.kernel is not None:
        return False
    spec = forward.model.spec
    pairs = spec.layers * spec.heads * spec.head_dim  # XLA computes those beyond a window, too
    is_cheap = 2 * longest * pairs <= CHEAP_ATTENTION * sum(active_parameters(spec))
    return is_cheap and layout.pieces == layout.stages == 1


def microbatch_shape(
    batch: BatchConfig | SftBatchConfig,
    forward: ForwardConfig,
    layout: Layout,
    *,
    longest: int,
    sequences: int,
) -> RowShape:
    """Return the shape of the micro-batches of a run's updates and passes in one layout.

    Args:
        batch: of the run.
        forward: how the model is run.
        layout: where it stands.
        longest: sequence, in tokens.
        sequences: of a mini-batch.
    """
    return packed_shape(
        layout,
        forward.model,
        tokens=batch.max_tokens_per_device,
        longest=longest,
        sequences=sequences,
        long_rows=takes_long_rows(forward, layout, longest),
        visual_tokens=batch.max_visual_tokens_per_device,
    )
