"""Rules between keys: functions that yield a line for each contradiction.

Those here are of several programs or of a subject of its own; the others stand below the config
whose keys they compare, in `programs`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jaxrl_llm.config.errors import ConfigError

Config = TypeVar("Config")


def check(config: Config, *rules: Callable[[Config], Iterator[str]]) -> None:
    """Apply all rules.

    Raises:
        ConfigError: a line for each contradiction.
    """
    if lines := [line for rule in rules for line in rule(config)]:
        raise ConfigError(*lines)


# Of training and SFT.


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


# Of training on pairs or on some of the answers, and of a reference that is refreshed.


OF_ADVANTAGES = (
    *("advantage", "loss", "reduce", "kl_loss", "kl_reward", "kl_coef", "kl_controller"),
    *(
        "distillation",
        "entropy_coef",
        "correction",
        "use_rollout_logprobs",
        "high_covariance",
        "answer_filter",
    ),
)
"""Keys of the algorithm that a loss of pairs has no use for."""


def pairs_have_a_loss(config: Any) -> Iterator[str]:
    """Require a loss of pairs where pairs are made, and only there."""
    pairs, loss = config.algorithm.pairs, config.algorithm.pair_loss
    if pairs is not None and loss is None:
        yield (
            f"algorithm.pairs={pairs.fn} makes pairs, but algorithm.pair_loss is null: name a loss "
            "of pairs, as in algorithm.pair_loss=dpo"
        )
    if pairs is None and loss is not None:
        yield (
            f"algorithm.pair_loss={loss.fn} is of pairs, but algorithm.pairs is null: name what "
            "makes them, as in algorithm.pairs=best_and_worst"
        )


def pairs_stand_alone(config: Any) -> Iterator[str]:
    """Refuse keys of advantages and of a loss of tokens beside pairs."""
    algorithm = config.algorithm
    if algorithm.pairs is None:
        return
    for name in OF_ADVANTAGES:
        if getattr(algorithm, name) != getattr(type(algorithm), name):
            yield (
                f"algorithm.{name} has no effect on pairs: algorithm.pair_loss takes the place of "
                f"advantages and losses of tokens; remove algorithm.{name}, or algorithm.pairs"
            )
    if config.rollout.samples_per_prompt < 2:
        yield (
            "rollout.samples_per_prompt=1, but algorithm.pairs needs a better and a worse answer "
            "to a prompt: take 2 or more"
        )


def longest_pair_of_answers_fits(config: Any) -> Iterator[str]:
    """Require room for the longest pair, unless devices share a row."""
    room, data = config.batch.max_tokens_per_device, config.data
    longest = 2 * (data.max_prompt_tokens + config.rollout.max_new_tokens)
    if config.algorithm.pairs and config.mesh.train.context == 1 and room < longest:
        yield (
            f"batch.max_tokens_per_device={room} can't hold the longest pair of algorithm.pairs: "
            f"twice data.max_prompt_tokens + rollout.max_new_tokens, {longest}"
        )


def mix_is_of_a_refresh(config: Any) -> Iterator[str]:
    """Refuse a mix where nothing is refreshed, and where it is no mean of models."""
    reference, model = config.reference, config.model
    if reference.mix == 1:
        return
    if reference.refresh_every is None:
        yield (
            f"reference.mix={reference.mix} is of a reference that is refreshed: set "
            "reference.refresh_every"
        )
    if model.lora or model.adapter:
        yield (
            f"reference.mix={reference.mix}: expected 1 with an adapter, for the mean of two "
            "adapters' factors is no mean of the models"
        )


# Of models that read images and videos.


def images_are_seen(config: Any) -> Iterator[str]:
    """Refuse what does not go with model.vision: models that see no images, rows that are shared.

    Args:
        config: of RL or supervised training.
    """
    room = config.batch.max_visual_tokens_per_device
    if config.model.vision != "none":
        yield from _rows_are_whole(config)
        yield from _tower_is_trained(config)
        yield from _others_see(config)
    elif room is not None:
        yield (
            f"batch.max_visual_tokens_per_device={room}, but model.vision=none reads no images: "
            "remove it, or set model.vision to frozen"
        )


def _rows_are_whole(config: Any) -> Iterator[str]:
    """Refuse meshes whose devices share rows or layers, and more room for images than for all."""
    for name in ("train", "critic", "reference", "teacher"):
        sizes = getattr(config.mesh, name, None)
        for axis in ("context", "stage"):
            if sizes is not None and getattr(sizes, axis) > 1:
                yield (
                    f"mesh.{name}.{axis}={getattr(sizes, axis)}: expected 1 with model.vision="
                    f"{config.model.vision}, as rows with images can't be shared yet"
                )
    room, tokens = config.batch.max_visual_tokens_per_device, config.batch.max_tokens_per_device
    if room is not None and room > tokens:
        yield (
            f"batch.max_visual_tokens_per_device={room}: expected at most "
            f"batch.max_tokens_per_device={tokens}, of which they are"
        )


def _tower_is_trained(config: Any) -> Iterator[str]:
    """Refuse to train a tower beside an adapter, which has none, and to freeze a random one."""
    model = config.model
    if model.vision == "frozen" and model.random_init:
        yield (
            "model.vision=frozen with model.random_init would keep a vision tower of random "
            "weights: set model.vision to trained, or name a model that has weights"
        )
    if model.vision == "trained" and (model.lora or model.adapter):
        yield (
            "model.vision=trained, but an adapter trains no vision tower: set it to frozen, or "
            "remove model.lora and model.adapter"
        )


def _others_see(config: Any) -> Iterator[str]:
    """Refuse models of other directories, which would read placeholders and see nothing."""
    keys = {
        "teacher.path": config.teacher.path,
        **{
            f"{name}.path": getattr(config, name).path
            for name in ("critic", "implicit_reward_model")
            if hasattr(config, name)
        },
    }
    if hasattr(config, "reward"):
        keys |= {
            "reward.classifier": config.reward.classifier,
            "teacher.url": config.teacher.url,
            "teacher.prompt": config.teacher.prompt,
            "algorithm.pairs": config.algorithm.pairs,
        }
    for key, value in keys.items():
        if value is not None:
            yield (
                f"{key} is set, but with model.vision={config.model.vision} images are read by the "
                "policy and what begins as a copy of it, in whole answers: remove it, or set "
                "model.vision to none"
            )
