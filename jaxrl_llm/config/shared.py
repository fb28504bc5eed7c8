"""The keys and rules that training and SFT share."""

from collections.abc import Iterator, Sequence
from typing import Any

STALL_TIMEOUT = (
    "seconds without a step until the run counts as hung: it prints its "
    "stacks and ends, on a cluster it restarts; must be long enough for "
    "the first step, with loading; null: never"
)
COMPILATION_CACHE = (
    "keep compiled programs in ~/.cache/jaxrl_llm, for later runs, or of "
    "several processes in run_dir; JAX_COMPILATION_CACHE_DIR names another "
    "folder, used in any case"
)


def profiled_steps_are_steps(config: Any) -> Iterator[str]:
    """Require that the steps to profile are steps of the run."""
    for step in config.log.profile_steps:
        if step < 1 or (config.steps is not None and step > config.steps):
            yield (
                f"log.profile_steps: expected numbers from 1 to {config.steps or 'the last step'}, "
                f"got {list(config.log.profile_steps)}, but {step} is not a step of the run"
            )


def adapter_is_new_or_given(config: Any) -> Iterator[str]:
    """Refuse a new adapter beside a given one."""
    if config.model.lora and config.model.adapter:
        yield "model.adapter brings its own rank, alpha and targets: remove model.lora"


def own_model_is_plain(config: Any) -> Iterator[str]:
    """Refuse what can't be done with a model of the user's own."""
    model = config.model
    if model.function is None:
        return
    others = (
        "vision",
        "lora",
        "adapter",
        "attention",
        "experts",
        "router_loss_coef",
        "router_bias_rate",
    )
    yield from set_beside_own_model(model, "model", others)
    if model.remat == "full":
        yield (
            "model.remat=full: the layers of model.function are not known; take none or dots, or "
            "compute them again in the model itself, by nnx.remat or jax.checkpoint"
        )
    if config.mesh.train.stage > 1:
        yield (
            f"mesh.train.stage={config.mesh.train.stage}: the layers of model.function are not "
            "known, so they can't be split into stages: take 1"
        )


def set_beside_own_model(section: Any, prefix: str, names: Sequence[str]) -> Iterator[str]:
    """Refuse keys that are only for models of a Hugging Face directory."""
    for name in names:
        value, default = getattr(section, name), getattr(type(section), name)
        if value != default:
            yield (
                f"{prefix}.{name}={value!r} is for models of a Hugging Face directory, but "
                f"model.function is set: remove {prefix}.{name}"
            )


def adapter_has_a_kept_base(config: Any) -> Iterator[str]:
    """Refuse an adapter of a model whose weights are drawn anew by every run."""
    model = config.model
    if model.random_init and (model.lora or model.adapter):
        yield (
            "model.random_init draws a model that is not kept, so that no adapter fits it later: "
            "remove model.lora and model.adapter, or name a model that has weights"
        )
