"""What `train` and `sft` set up: files made on demand, meshes, models and optimizers."""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.config import kinds
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import FunctionSpec, closest, load_function
from jaxrl_llm.config.sections.mesh import MeshConfig, MeshSizes, SftMeshConfig
from jaxrl_llm.config.sections.model import LoraConfig, ModelConfig
from jaxrl_llm.config.sections.optim import OptimConfig
from jaxrl_llm.data.balance import model_cost
from jaxrl_llm.data.files import atomic_write, remove_partials
from jaxrl_llm.data.packing import RowShape, row_shape
from jaxrl_llm.models.hf import load_params
from jaxrl_llm.models.hf_adapter import load_adapter, read_adapter_spec
from jaxrl_llm.models.hf_config import read_spec
from jaxrl_llm.models.kernels import Choice, choose, heads_on, this_machine
from jaxrl_llm.models.lora import (
    find_targets,
    join,
    merge,
    split_adapter,
    without_adapter,
)
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.parameters import compute_dtypes, declare, initialize
from jaxrl_llm.models.spec import LoraSpec, ModelSpec
from jaxrl_llm.models.transformer import forward
from jaxrl_llm.monitoring.streams import log_to_stderr
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import AXES, batch_shards, make_mesh
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.sharding.rules import DEFAULT_RULES, ROLLOUT_RULES, Rules, fallbacks
from jaxrl_llm.training.objective import Forward

log = logging.getLogger(__name__)


class Model(NamedTuple):
    """A model in the training layout.

    Attributes:
        spec: the architecture.
        params: float32 master weights of what is trained: all, or the adapter.
        like: shape, dtype and sharding of each of these arrays.
        frozen: the model that an adapter is beside, in the compute dtype; None without one.
    """

    spec: ModelSpec
    params: Any
    like: Any
    frozen: Any = None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with atomic_write(path) as file:
        file.write(text.encode())


def prepare_files(spec: FunctionSpec | None, wanted: tuple[str, ...]) -> None:
    """Run a preparation if any of the files it should write is missing; in the first process.

    Raises:
        ConfigError: it failed, or left a file unwritten.
    """
    if spec is not None:
        distributed.once(functools.partial(_prepare_files, spec, wanted))


def _prepare_files(spec: FunctionSpec, wanted: tuple[str, ...]) -> None:
    stamp = Path(wanted[0]).parent / ".prepared_by"
    recipe = digest(json.dumps(spec.as_config(), sort_keys=True, default=str))
    if all(Path(path).exists() for path in wanted):
        remove_partials(stamp.parent)
        if stamp.exists() and stamp.read_text() != recipe:
            raise ConfigError(
                f"data.prepare: the files in {str(stamp.parent)!r} were prepared with other "
                "keywords; remove that folder, or name another one"
            )
        return
    print(f"preparing data: {spec.fn}", flush=True)  # noqa: T201
    with config_errors_at("data.prepare"):
        load_function(spec, kinds.PREPARATIONS, key="data.prepare")()
    missing = [path for path in wanted if not Path(path).exists()]
    if missing:
        raise ConfigError(
            f"data.prepare: {spec.fn!r} did not write {', '.join(missing)}; "
            "make its `out` the folder of these files"
        )
    write_text(stamp, recipe)


class Layouts(NamedTuple):
    """Where each model of a run stands."""

    train: Layout
    rollout: Layout
    critic: Layout
    reference: Layout
    reward_model: Layout

    def of(self, role: str) -> Layout:
        """Return where a role's model stands; reward models of both kinds share a mesh."""
        meshes = {"actor": "train", "implicit_reward_model": "reward_model"}
        return getattr(self, meshes.get(role, role))


def open_layouts(config: MeshConfig) -> Layouts:
    """Lay the devices out as the config says, for each model."""

    def other(name: str, sizes: MeshSizes | None) -> Layout:
        return train if sizes is None else open_layout(config, name, sizes)

    train = open_layout(config, "train", config.train)
    return Layouts(
        train,
        other("rollout", config.rollout),
        other("critic", config.critic),
        other("reference", config.reference),
        other("reward_model", config.reward_model),
    )


def open_layout(config: SftMeshConfig, name: str, sizes: MeshSizes) -> Layout:
    """Lay the devices out as one of the config's meshes says.

    Raises:
        ConfigError: the devices don't make up this mesh, or a rule is none.
    """
    devices = jax.devices()
    end = None if sizes.devices is None else sizes.first_device + sizes.devices
    chosen = devices[sizes.first_device : end]
    if not chosen or (end or 0) > len(devices):
        raise ConfigError(
            f"mesh.{name}: first_device={sizes.first_device} with devices={sizes.devices}, but "
            f"there are {len(devices)} devices"
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
    return Layout(mesh, config.context_by, own_rules(config.rules, defaults))


def own_rules(changed: Mapping[str, Any], defaults: Rules = DEFAULT_RULES) -> Rules:
    """Return rules with a config's own in their place.

    >>> own_rules({"embed": None})["embed"]
    >>> own_rules({"vocab": ["tensor"]})["vocab"]
    ('tensor',)

    Raises:
        ConfigError: there is no such logical axis, or the rule is none.
    """
    for axis, rule in changed.items():
        if axis not in DEFAULT_RULES:
            raise ConfigError(f"mesh.rules.{axis}: {closest(axis, DEFAULT_RULES)}")
        names = [rule] if isinstance(rule, str) else rule or []
        if not isinstance(names, list) or any(name not in AXES for name in names):
            raise ConfigError(f"mesh.rules.{axis}={rule!r}, wanted null or some of {list(AXES)}")
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()}
    return {**defaults, **lists}


def open_model(config: ModelConfig, layout: Layout, *, seed: int) -> Model:
    """Load a Hugging Face directory, or draw its weights at random, in the training layout.

    Raises:
        ConfigError: the directory can't be read, or holds a critic.
    """
    with config_errors_at("model.path"):
        spec = read_spec(config.path)
        if spec.value_head or spec.reward_head:
            raise ValueError(f"{config.path} ends in a value head, wanted a language model")
        is_adapted = config.lora is not None or config.adapter is not None
        check_router_keys(config, spec, is_adapted=is_adapted)
        if not config.random_init:
            model = read_model(config.path, spec, layout)
            return with_adapter(model, config, layout, seed=seed) if is_adapted else model
        split = layout.of(declare(spec))
        draw = jax.jit(lambda key: initialize(spec, key=key), out_shardings=split)
        return laid_out(spec, draw(jax.random.key(seed)), layout)


def check_router_keys(config: ModelConfig, spec: ModelSpec, *, is_adapted: bool) -> None:
    """Raise ConfigError for a key of routers that the model does not have, or does not train."""
    if config.router_loss_coef and spec.moe is None:
        raise ConfigError(
            f"model.router_loss_coef={config.router_loss_coef}, but {config.path} has no "
            "experts: remove it"
        )
    has_bias = spec.moe is not None and isinstance(spec.moe.router, SigmoidRouter)
    rate = config.router_bias_rate
    if rate != ModelConfig.router_bias_rate and (is_adapted or not has_bias):
        raise ConfigError(
            f"model.router_bias_rate={rate}, but in {config.path} no bias of a router is trained: "
            "remove it"
        )


def with_adapter(base: Model, config: ModelConfig, layout: Layout, *, seed: int) -> Model:
    """Freeze a model, and put an adapter beside it: a new one, or that of model.adapter.

    The base is held in the compute dtype: nothing is added to it, so it needs no float32 masters.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    spec = adapted_spec(base.spec, config.lora, config.adapter)
    split, _ = split_adapter(layout.of(declare(spec)))
    if config.adapter is None:
        draw = jax.jit(lambda key: split_adapter(initialize(spec, key=key))[0], out_shardings=split)
        adapter = draw(jax.random.key(seed))
    else:
        with config_errors_at("model.adapter"):
            adapter = distributed.put(load_adapter(config.adapter, spec), split)
    frozen = base.params
    if config.dtype != "float32":
        dtypes = compute_dtypes(base.spec, config.dtype)
        frozen = reshard(frozen, layout.of(declare(base.spec)), dtype=dtypes)
    return Model(spec, adapter, like_of(adapter, split), frozen)


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
        found = LoraSpec(
            rank=lora.rank,
            alpha=lora.alpha,
            targets=find_targets(lora.targets, base),
            rslora=lora.rslora,
        )
        return dataclasses.replace(base, lora=found)


def merged_into_base(
    adapter: Any, spec: ModelSpec, path: str, shardings: Any = None
) -> tuple[Any, ModelSpec]:
    """Merge an adapter into the float32 weights of its base's directory, without a second copy.

    Args:
        adapter: its arrays.
        spec: of the model with the adapter.
        path: Hugging Face directory of the base.
        shardings: of the base's arrays.

    Returns:
        Parameters and spec of a model without an adapter.
    """
    alone = without_adapter(spec)
    base = load_params(path, alone, shardings=shardings)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(base: Any, adapter: Any) -> Any:
        return merge(join(adapter, base), spec)[0]

    return run(base, adapter), alone


def read_model(path: str, spec: ModelSpec, layout: Layout) -> Model:
    """Load the weights of a Hugging Face directory in a layout."""
    return laid_out(spec, load_params(path, spec, shardings=layout.of(declare(spec))), layout)


def laid_out(spec: ModelSpec, params: Any, layout: Layout) -> Model:
    """Return parameters that are in a layout as a Model; log where its rules don't apply."""
    for name, left in fallbacks(declare(spec), layout.mesh, layout.rules).items():
        log.warning("%s is not split as the rules say: %s", name, left)
    return Model(spec, params, like_of(params, layout.of(declare(spec))))


def like_of(params: Any, layout: Any) -> Any:
    """Return shape, dtype and sharding of each array."""
    return jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, layout
    )


def forward_settings(
    config: ModelConfig, spec: ModelSpec, layout: Layout, temperature: float = 1.0
) -> Forward:
    """Return how the model is run in training.

    Raises:
        ConfigError: its layers, experts or heads can't be split over the mesh, or it can't attend
            as the config says.
    """
    check_split(spec, layout)
    return Forward(
        spec=spec,
        dtype=config.dtype,
        remat=config.remat,
        logprob_chunk=config.logprob_chunk,
        router_loss_coef=config.router_loss_coef,
        router_bias_rate=config.router_bias_rate,
        temperature=temperature,
        context=layout.context,
        kernel=attention(config, spec, layout).kernel,
    )


_DECIDED: dict[tuple[Any, ...], Choice] = {}
_DECIDING = threading.Lock()  # steps are also lowered by the thread that compiles ahead


def attention(config: ModelConfig, spec: ModelSpec, layout: Layout) -> Choice:
    """Decide how a model attends to packed rows in training, and log it, once.

    Several processes decide alike: cuDNN's kernel is taken where it is possible in all of them.

    Raises:
        ConfigError: model.attention=cudnn, which is not possible.
    """
    case = config.attention, config.dtype, heads_on(spec, layout)
    with _DECIDING:
        if case not in _DECIDED:
            with config_errors_at(f"model.attention={config.attention}"):
                own = choose(config.attention, spec, layout, config.dtype, machine=this_machine())
            others = distributed.gather((own.name, own.reason))
            against = [reason for name, reason in others if name == "xla"]
            _DECIDED[case] = Choice("xla", against[0]) if against else own
            log.info("attention by %s: %s", *_DECIDED[case][:2])
        return _DECIDED[case]


def check_split(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError where a model can't be run on a mesh, before anything is compiled."""
    rows = jax.ShapeDtypeStruct((batch_shards(layout.mesh) * layout.pieces, 1), jnp.int32)
    params = jax.eval_shape(lambda: initialize(spec, key=jax.random.key(0)))
    with config_errors_at("mesh"):
        jax.eval_shape(
            lambda params, rows: forward(params, spec, rows, rows, rows, layout=layout),
            params,
            rows,
        )


def packed_shape(
    layout: Layout, spec: ModelSpec, *, tokens: int, longest: int, sequences: int
) -> RowShape:
    """Return the shape of the micro-batches of a pass.

    Args:
        layout: where it runs.
        spec: the model, which says what a sequence costs.
        tokens: the most on each device.
        longest: sequence, in tokens; a row is as long, or longer if several devices share it.
        sequences: in all.

    Raises:
        ConfigError: a device can't hold its part of a row.
    """
    share = layout.pieces * layout.stages
    length = -(-longest // share) * share
    if tokens * layout.pieces < length:
        raise ConfigError(
            f"batch.max_tokens_per_device={tokens} can't hold a device's part of a row of {length} "
            f"tokens, which context={layout.pieces} share: wanted {length // layout.pieces} or more"
        )
    return row_shape(
        tokens * layout.shards,
        length,
        sequences=sequences,
        multiple_of=batch_shards(layout.mesh),
        cost=model_cost(spec),
        unit=share,
    )


def make_optimizer(
    config: OptimConfig, key: str = "optim"
) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
    """Return the optimizer, with clipping and learning rate in it, and its schedule.

    Raises:
        ConfigError: one of the functions is no such thing, or does not work with its keywords.
    """
    with config_errors_at(f"{key}.schedule: {config.schedule.fn!r} does not work"):
        schedule = load_function(config.schedule, kinds.SCHEDULES, key=f"{key}.schedule")()
        rate = schedule(jnp.zeros((), jnp.int32)) if callable(schedule) else None
        if not isinstance(rate, int | float | np.generic | jax.Array) or np.ndim(rate) != 0:
            raise ConfigError(
                f"{key}.schedule: {config.schedule.fn!r} is not an optax schedule: got {rate!r} as "
                "the learning rate of update 0, wanted a number; did you mean constant_schedule?"
            )
    with config_errors_at(f"{key}.optimizer: {config.optimizer.fn!r} does not work"):
        optimizer = load_function(
            config.optimizer, kinds.OPTIMIZERS, passed=("learning_rate",), key=f"{key}.optimizer"
        )(learning_rate=schedule)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ConfigError(
                f"{key}.optimizer: {config.optimizer.fn!r} is not an optax optimizer; "
                "did you mean adamw?"
            )
        tried = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}  # optax checks when it is used
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), tried)
    if config.grad_clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.grad_clip), optimizer)
    return optimizer, schedule


def digest(text: str) -> str:
    """Return a text's SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def made_once(directory: Path, recipe: str, make: Callable[[], None]) -> None:
    """Make a directory if it does not exist; refuse one that was made by another recipe.

    Args:
        directory: what `make` writes.
        recipe: everything that decides the result.
        make: writes the directory, whole or not at all; all processes call it.
    """
    stamp = directory.with_name(directory.name + ".made_by")

    def is_made() -> bool:
        if directory.exists() and stamp.exists() and stamp.read_text() != digest(recipe):
            raise ConfigError(
                f"{directory} was made by another config than the one given now: "
                "remove it, or name another directory"
            )
        if directory.exists():
            remove_partials(directory.parent)
        return directory.exists()

    if not distributed.once(is_made):
        make()
        distributed.once(lambda: write_text(stamp, digest(recipe)))


def quiet_libraries() -> None:
    """Keep libraries' chatter off the screen; warnings and errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    who = f"process {distributed.number()} " if distributed.count() > 1 else ""
    log_to_stderr(logging.WARNING, f"%(levelname)s {who}%(name)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax raises its errors, too
    logging.getLogger("jaxrl_llm").setLevel(
        logging.INFO if distributed.is_first() else logging.WARNING
    )
