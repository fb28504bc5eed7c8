"""To which size a family resizes pictures, as a checkpoint's files say it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.data.visuals.pictures import MAX_ASPECT, PictureError
from jaxrl_llm.models.hf.families import FAMILIES
from jaxrl_llm.models.vision.spec import TowerKind

KINDS: dict[str, TowerKind] = {
    family.model_type: family.tower.kind for family in FAMILIES if family.tower is not None
}
"""Of a tower by `model_type` of config.json."""


class Area(NamedTuple):
    """The least and the most pixels that a resized picture, or a video, has."""

    least: int
    most: int

    def capped(self, most: int) -> "Area":
        """Return these bounds with at most so many pixels."""
        return Area(min(self.least, most), min(self.most, most))


@dataclass(frozen=True, kw_only=True)
class Resizing:
    """How a family makes patches of pictures.

    Attributes:
        kind: of the tower.
        patch: side of a patch, in pixels.
        frames_per_patch: frames that a patch spans; a still image is repeated.
        merge: side of the square of patches that become one token.
        resample: number of Pillow's filter.
        image: bounds of an image's area; None: `side` is its size.
        video: bounds of a frame's area (`qwen2_5`) or of all frames' (`qwen3`); None: the family
            reads no videos.
        side: of the square that every image is resized to; 0: the size depends on the image.
    """

    kind: TowerKind
    patch: int
    frames_per_patch: int
    merge: int
    resample: int
    image: Area | None
    video: Area | None
    side: int = 0

    @property
    def unit(self) -> int:
        """Return the side of a token's square, in pixels; sizes are multiples of it."""
        return self.patch * self.merge


class Shape(NamedTuple):
    """What is known of an image or a video before it is decoded; fields as those of `Visual`."""

    grid: tuple[int, int, int]
    merge: int
    seconds: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """Return how many tokens stand for it."""
        return math.prod(self.grid) // self.merge**2


def fit_area(width: int, height: int, unit: int, area: Area) -> tuple[int, int]:
    """Return the width and height, in multiples of `unit`, to which an image is resized.

    Both sides go to the nearest multiple; an area out of bounds is then met by scaling both.

    >>> fit_area(640, 480, 28, Area(3136, 100_000))
    (364, 252)
    """
    sides = [round(side / unit) * unit for side in (width, height)]
    if math.prod(sides) > area.most:
        return fit_within(width, height, unit, area.most)
    if math.prod(sides) < area.least:
        scale = math.sqrt(area.least / (width * height))
        sides = [math.ceil(side * scale / unit) * unit for side in (width, height)]
    return sides[0], sides[1]


def fit_within(width: int, height: int, unit: int, most: int) -> tuple[int, int]:
    """Return the width and height, in multiples of `unit`, nearest below an area of `most` pixels.

    It is larger only where a side would be shorter than `unit`.

    >>> fit_within(640, 480, 28, 100_000)
    (364, 252)
    """
    scale = math.sqrt(width * height / most)
    sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (width, height)]
    return sides[0], sides[1]


def fit_volume(
    frames: int, size: tuple[int, int], resizing: Resizing, area: Area
) -> tuple[int, int]:
    """Return the width and height to which frames are resized where all of them share an area.

    Raises:
        PictureError: the sides are too different.
    """
    width, height = size
    if min(size) < resizing.unit:
        scale = resizing.unit / min(size)
        width, height = int(width * scale), int(height * scale)
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise PictureError(f"expected sides of at most {MAX_ASPECT} to 1, got {size}")
    sides = [round(side / resizing.unit) * resizing.unit for side in (width, height)]
    counted = round(frames / resizing.frames_per_patch) * resizing.frames_per_patch
    if counted * math.prod(sides) > area.most:
        scale = math.sqrt(frames * width * height / area.most)
        sides = [
            max(resizing.unit, math.floor(side / scale / resizing.unit) * resizing.unit)
            for side in (width, height)
        ]
    elif counted * math.prod(sides) < area.least:
        scale = math.sqrt(area.least / (frames * width * height))
        sides = [
            math.ceil(side * scale / resizing.unit) * resizing.unit for side in (width, height)
        ]
    return sides[0], sides[1]


def read_resizing(directory: Path) -> Resizing:
    """Read how a checkpoint's pictures are resized.

    Args:
        directory: holds config.json and preprocessor_config.json, or processor_config.json.
            Settings of videos may stand in video_preprocessor_config.json or the latter.

    Raises:
        ValueError: a file is missing or can't be read, or asks for what this library does not do.
    """
    config = read_model_config(directory)
    image, video = _sections(directory)
    _check(image, directory)
    kind = KINDS[config["model_type"]]
    return _siglip(config, image) if kind == "siglip" else _qwen(kind, image, video)


def read_model_config(directory: Path) -> Mapping[str, Any]:
    """Read the config.json of a model that reads images.

    Raises:
        ValueError: it is missing or can't be read, or the model is of another type.
    """
    config = _read(directory / "config.json")
    if (model_type := config.get("model_type")) not in KINDS:
        raise ValueError(
            f"{directory / 'config.json'}: expected a model that reads images, of the type "
            f"{', '.join(KINDS)}; got {model_type!r}"
        )
    return config


def _sections(directory: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the settings of images and of videos; those of images serve both, as in Qwen2.5-VL."""
    both = _read(directory / "processor_config.json", {})
    image = _read(directory / "preprocessor_config.json", both.get("image_processor"))
    video = _read(directory / "video_preprocessor_config.json", both.get("video_processor", image))
    return image, video


def _siglip(config: Mapping[str, Any], image: Mapping[str, Any]) -> Resizing:
    size = image.get("size") or {}
    side, patch = size.get("height", 896), config.get("vision_config", {}).get("patch_size", 14)
    tokens = config.get("mm_tokens_per_image", 256)
    merge, rest = divmod(side, patch * (math.isqrt(tokens) or 1))
    if size.get("width", side) != side or rest or math.isqrt(tokens) ** 2 != tokens or not merge:
        raise ValueError(
            f"expected a square image of whole patches of {patch} pixels for {tokens} tokens, got "
            f"the size {dict(size)}"
        )
    return Resizing(
        kind="siglip",
        patch=patch,
        frames_per_patch=1,
        merge=merge,
        resample=image.get("resample", 2),
        image=None,
        video=None,
        side=side,
    )


def _qwen(kind: TowerKind, image: Mapping[str, Any], video: Mapping[str, Any]) -> Resizing:
    return Resizing(
        kind=kind,
        patch=image.get("patch_size", 14),
        frames_per_patch=image.get("temporal_patch_size", 2),
        merge=image.get("merge_size", 2),
        resample=image.get("resample", 3),
        image=_area(image, Area(56 * 56, 28 * 28 * 1280)),
        video=_area(video, Area(128 * 32 * 32, 768 * 32 * 32)),
    )


def _area(section: Mapping[str, Any], default: Area) -> Area:
    size = section.get("size") or {}
    least = section.get("min_pixels") or size.get("shortest_edge") or default.least
    most = section.get("max_pixels") or size.get("longest_edge") or default.most
    return Area(int(least), int(most))


def _check(section: Mapping[str, Any], directory: Path) -> None:
    """Raise ValueError where images would be made otherwise than here."""
    # what is done to colors is checked where a tower's spec is read
    expected = {"do_resize": True, "do_pan_and_scan": False}
    expected |= {"do_center_crop": False, "do_pad": False}
    for name, value in expected.items():
        if section.get(name) not in (None, value):
            raise ValueError(f"{directory}: {name}: expected {value}, got {section[name]!r}")


def _read(path: Path, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    if not path.is_file():
        if default is None:
            raise ValueError(f"{path}: there is no such file, expected one of a model with images")
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value
