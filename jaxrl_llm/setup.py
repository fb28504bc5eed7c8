"""What `train` and `sft` set up: files made on demand, meshes, models and optimizers."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm import keys
from jaxrl_llm.functions import ConfigError, FunctionSpec, load_function
from jaxrl_llm.keys import (
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
)
from jaxrl_llm.models.hf import load_params
from jaxrl_llm.models.hf_adapter import load_adapter, read_adapter_spec
from jaxrl_llm.models.hf_config import read_spec
from jaxrl_llm.models.lora import (
    find_targets,
    join,
    merge,
    split_adapter,
    without_adapter,
)
from jaxrl_llm.models.spec import LoraSpec, ModelSpec, compute_dtypes, declare, initialize
from jaxrl_llm.objective import Forward
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.sharding.rules import DEFAULT_RULES, fallbacks, shardings

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


@contextlib.contextmanager
def blamed_on(key: str) -> Iterator[None]:
    """Turn a TypeError, ValueError or OSError into a one-line ConfigError that begins with `key`.

    For what runs functions with keywords of the config, which are the likely cause.
    """
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, OSError) as error:
        text = str(error).strip() or type(error).__name__
        raise ConfigError(f"{key}: {text.splitlines()[0]}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def prepare_files(spec: FunctionSpec | None, wanted: tuple[str, ...]) -> None:
    """Run a preparation if any of the files it should write is missing.

    Raises:
        ConfigError: it failed, or left a file unwritten.
    """
    if spec is None:
        return
    stamp = Path(wanted[0]).parent / ".prepared_by"
    recipe = digest(json.dumps(spec.as_config(), sort_keys=True, default=str))
    if all(Path(path).exists() for path in wanted):
        if stamp.exists() and stamp.read_text() != recipe:
            raise ConfigError(
                f"data.prepare: the files in {str(stamp.parent)!r} were prepared with other "
                "keywords; remove that folder, or name another one"
            )
        return
    print(f"preparing data: {spec.fn}", flush=True)  # noqa: T201
    with blamed_on("data.prepare"):
        load_function(spec, keys.PREPARATIONS, key="data.prepare")()
    missing = [path for path in wanted if not Path(path).exists()]
    if missing:
        raise ConfigError(
            f"data.prepare: {spec.fn!r} did not write {', '.join(missing)}; "
            "make its `out` the folder of these files"
        )
    write_text(stamp, recipe)


def open_mesh(config: MeshConfig) -> Mesh:
    """Lay this process's devices out as the config says."""
    try:
        return make_mesh({"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor})
    except ValueError as error:
        raise ConfigError(f"mesh: {error}") from error


def open_model(config: ModelConfig, mesh: Mesh, *, seed: int) -> Model:
    """Load a Hugging Face directory, or draw its weights at random, in the training layout.

    Raises:
        ConfigError: the directory can't be read, or holds a critic.
    """
    with blamed_on("model.path"):
        spec = read_spec(config.path)
        if spec.value_head or spec.reward_head:
            raise ValueError(f"{config.path} ends in a value head, wanted a language model")
        if config.router_loss_coef and spec.moe is None:
            raise ConfigError(
                f"model.router_loss_coef={config.router_loss_coef}, but {config.path} has no "
                "experts: remove it"
            )
        if not config.random_init:
            model = read_model(config.path, spec, mesh)
            is_adapted = config.lora is not None or config.adapter is not None
            return with_adapter(model, config, mesh, seed=seed) if is_adapted else model
        layout = split(spec, mesh)
        draw = jax.jit(lambda key: initialize(spec, key=key), out_shardings=layout)
        return laid_out(spec, draw(jax.random.key(seed)), mesh)


def with_adapter(base: Model, config: ModelConfig, mesh: Mesh, *, seed: int) -> Model:
    """Freeze a model, and put an adapter beside it: a new one, or that of model.adapter.

    The base is held in the compute dtype: nothing is added to it, so it needs no float32 masters.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    spec = adapted_spec(base.spec, config.lora, config.adapter)
    layout, _ = split_adapter(split(spec, mesh))
    if config.adapter is None:
        draw = jax.jit(
            lambda key: split_adapter(initialize(spec, key=key))[0], out_shardings=layout
        )
        adapter = draw(jax.random.key(seed))
    else:
        with blamed_on("model.adapter"):
            adapter = jax.device_put(load_adapter(config.adapter, spec), layout)
    frozen = base.params
    if config.dtype != "float32":
        dtypes = compute_dtypes(base.spec, config.dtype)
        frozen = reshard(frozen, split(base.spec, mesh), dtype=dtypes)
    return Model(spec, adapter, like_of(adapter, layout), frozen)


def adapted_spec(base: ModelSpec, lora: LoraConfig | None, adapter: str | None) -> ModelSpec:
    """Return the spec of a model with the adapter that its config asks for, if it does.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    if adapter is not None:
        with blamed_on("model.adapter"):
            return read_adapter_spec(adapter, base)
    if lora is None:
        return base
    with blamed_on("model.lora"):
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


def read_model(path: str, spec: ModelSpec, mesh: Mesh) -> Model:
    """Load the weights of a Hugging Face directory in the training layout."""
    return laid_out(spec, load_params(path, spec, shardings=split(spec, mesh)), mesh)


def split(spec: ModelSpec, mesh: Mesh) -> Any:
    """Return the training layout of a model."""
    return shardings(declare(spec), mesh)


def laid_out(spec: ModelSpec, params: Any, mesh: Mesh) -> Model:
    """Return parameters that are in the training layout as a Model; log where rules don't apply."""
    for name, left in fallbacks(declare(spec), mesh, DEFAULT_RULES).items():
        log.warning("%s is not split as the rules say: %s", name, left)
    return Model(spec, params, like_of(params, split(spec, mesh)))


def like_of(params: Any, layout: Any) -> Any:
    """Return shape, dtype and sharding of each array."""
    return jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, layout
    )


def forward_settings(config: ModelConfig, spec: ModelSpec, temperature: float = 1.0) -> Forward:
    """Return how the model is run in training."""
    return Forward(
        spec=spec,
        dtype=config.dtype,
        remat=config.remat,
        logprob_chunk=config.logprob_chunk,
        router_loss_coef=config.router_loss_coef,
        router_bias_rate=config.router_bias_rate,
        temperature=temperature,
    )


def make_optimizer(
    config: OptimConfig, key: str = "optim"
) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
    """Return the optimizer, with clipping and learning rate in it, and its schedule.

    Raises:
        ConfigError: one of the functions is no such thing, or does not work with its keywords.
    """
    with blamed_on(f"{key}.schedule: {config.schedule.fn!r} does not work"):
        schedule = load_function(config.schedule, keys.SCHEDULES, key=f"{key}.schedule")()
        rate = schedule(jnp.zeros((), jnp.int32)) if callable(schedule) else None
        if not isinstance(rate, int | float | np.generic | jax.Array) or np.ndim(rate) != 0:
            raise ConfigError(
                f"{key}.schedule: {config.schedule.fn!r} is not an optax schedule: got {rate!r} as "
                "the learning rate of update 0, wanted a number; did you mean constant_schedule?"
            )
    with blamed_on(f"{key}.optimizer: {config.optimizer.fn!r} does not work"):
        optimizer = load_function(
            config.optimizer, keys.OPTIMIZERS, passed=("learning_rate",), key=f"{key}.optimizer"
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
        make: writes the directory, whole or not at all.
    """
    stamp = directory.with_name(directory.name + ".made_by")
    if directory.exists():
        if stamp.exists() and stamp.read_text() != digest(recipe):
            raise ConfigError(
                f"{directory} was made by another config than the one given now: "
                "remove it, or name another directory"
            )
        return
    make()
    write_text(stamp, digest(recipe))


def quiet_libraries() -> None:
    """Keep libraries' chatter off the screen; warnings and errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax raises its errors, too
    logging.getLogger("jaxrl_llm").setLevel(logging.INFO)
