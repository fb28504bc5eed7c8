"""Rules of models that read images and videos."""

from collections.abc import Iterator
from typing import Any


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
