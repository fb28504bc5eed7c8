"""From pictures to patches of uint8, as the image processors of `transformers` make them.

Nothing is normalized here: the tower does that on the device. Neither torch nor torchvision is
imported, and Pillow resizes whatever else is installed.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.data.visuals.pictures import (
    MAX_ASPECT,
    PictureError,
    Video,
    open_video,
    read_picture,
    read_size,
)
from jaxrl_llm.models.hf.config import FAMILIES
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.inputs import Visual
from jaxrl_llm.models.vision.spec import TowerKind

KINDS: dict[str, TowerKind] = {
    family.model_type: family.tower.kind for family in FAMILIES if family.tower is not None
}
"""Of a tower by `model_type` of config.json."""

Area = tuple[int, int]
"""The least and the most pixels that a resized picture, or a video, has."""


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


def fit_area(
    width: int, height: int, unit: int, area: Area, *, frames: int = 1, rounded: int = 1
) -> tuple[int, int]:
    """Return the width and height, in multiples of `unit`, to which an image is resized.

    Both sides go to the nearest multiple; an area out of bounds is then met by scaling both.

    Args:
        width: of the image.
        height: of it.
        unit: side of a token's square.
        area: the bounds; those of all frames of a video where they share them.
        frames: that share them.
        rounded: their number in whole patches, which is compared with the bounds.

    >>> fit_area(640, 480, 28, (3136, 100_000))
    (364, 252)
    """
    least, most = area
    sides = [round(side / unit) * unit for side in (width, height)]
    if rounded * math.prod(sides) > most:
        return fit_within(width, height, unit, most, frames=frames)
    if rounded * math.prod(sides) < least:
        scale = math.sqrt(least / (frames * width * height))
        sides = [math.ceil(side * scale / unit) * unit for side in (width, height)]
    return sides[0], sides[1]


def fit_within(
    width: int, height: int, unit: int, most: int, *, frames: int = 1
) -> tuple[int, int]:
    """Return the width and height, in multiples of `unit`, nearest below an area of `most` pixels.

    It is larger only where a side would be shorter than `unit`.

    >>> fit_within(640, 480, 28, 100_000)
    (364, 252)
    """
    scale = math.sqrt(frames * width * height / most)
    sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (width, height)]
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
    both = _read(directory / "processor_config.json", {})
    image = _read(directory / "preprocessor_config.json", both.get("image_processor"))
    video = _read(directory / "video_preprocessor_config.json", both.get("video_processor", image))
    # what is done to colors is checked where a tower's spec is read
    expected = {"do_resize": True, "do_pan_and_scan": False}
    expected |= {"do_center_crop": False, "do_pad": False}
    for name, value in expected.items():
        if image.get(name) not in (None, value):
            raise ValueError(f"{directory}: {name}: expected {value}, got {image[name]!r}")
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
        image=_area(image, 56 * 56, 28 * 28 * 1280),
        video=_area(video, 128 * 32 * 32, 768 * 32 * 32),
    )


def _area(section: Mapping[str, Any], least: int, most: int) -> Area:
    """Return the bounds that a file says, or these."""
    size = section.get("size") or {}
    least = section.get("min_pixels") or size.get("shortest_edge") or least
    most = section.get("max_pixels") or size.get("longest_edge") or most
    return int(least), int(most)


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


NAMES = {
    "image_id": ("image_token_id", "image_token_index"),
    "video_id": ("video_token_id",),
    "start_id": ("vision_start_token_id", "boi_token_id", "boi_token_index"),
    "end_id": ("vision_end_token_id", "eoi_token_id", "eoi_token_index"),
}
"""Under which names config.json has a token."""


# Placeholder tokens: one per image in a chat template's text, one per feature in a prompt.
#
# What comes out is what the processors of `transformers` make, which expand the text.


@dataclass(frozen=True, kw_only=True)
class Placeholders:
    """The tokens that stand for images and videos.

    Attributes:
        kind: of the tower.
        image_id: stands for each feature of an image.
        video_id: stands for each feature of a video; None: there are none.
        start_id: stands before an image, or before each frame of a video.
        end_id: stands behind it.
    """

    kind: TowerKind
    image_id: int
    video_id: int | None
    start_id: int
    end_id: int

    @classmethod
    def from_directory(cls, directory: Path) -> "Placeholders":
        """Return the tokens that a checkpoint's config.json names.

        Raises:
            ValueError: it does not name one.
        """
        config = read_model_config(directory)
        kind = KINDS[config["model_type"]]
        ids: dict[str, Any] = {}
        for field, names in NAMES.items():
            ids[field] = next((config[name] for name in names if name in config), None)
            if not isinstance(ids[field], int) and not (kind == "siglip" and field == "video_id"):
                raise ValueError(
                    f"{directory / 'config.json'}: expected the id of a token as {names[0]}, got "
                    f"{ids[field]!r}"
                )
        return cls(kind=kind, **ids)

    @property
    def ids(self) -> frozenset[int]:
        """Return all of them."""
        every = {self.image_id, self.video_id, self.start_id, self.end_id}
        return frozenset(number for number in every if number is not None)

    def expand(
        self, tokens: Sequence[int], shapes: Sequence[Shape | Visual], tokenizer: Any
    ) -> tuple[int, ...]:
        """Return the tokens of a chat with one placeholder for each feature.

        Args:
            tokens: as a chat template writes them, with one placeholder for each visual.
            shapes: of the visuals, in their order in the chat.
            tokenizer: by which the tokens were made.

        Raises:
            ValueError: there are more or fewer placeholders than visuals, or others.
        """
        written = [t == self.video_id for t in tokens if t in (self._image, self.video_id)]
        wanted = [bool(shape.seconds) for shape in shapes]
        if written != wanted or (self.kind == "siglip" and self.image_id in tokens):
            raise ValueError(
                f"expected a chat with {_counted(wanted.count(False), 'image')} and "
                f"{_counted(wanted.count(True), 'video')} in their order, but the chat template's "
                f"text has {_counted(written.count(False), 'placeholder')} of images and "
                f"{written.count(True)} of videos: texts of such tokens can't be written"
            )
        if not shapes:
            return tuple(tokens)
        if self.kind == "siglip" or (self.kind == "qwen3" and any(wanted)):
            return self._expand_text(tokens, shapes, tokenizer)
        waiting, expanded = iter(shapes), list[int]()
        for token in tokens:
            repeated = next(waiting).tokens if token in (self._image, self.video_id) else 1
            expanded += [token] * repeated
        return tuple(expanded)

    def expand_between(
        self,
        tokens: Sequence[int],
        mask: Sequence[bool],
        shapes: Sequence[Shape | Visual],
        tokenizer: Any,
        *,
        all_shown: bool,
    ) -> tuple[tuple[tuple[int, ...], tuple[bool, ...]], int]:
        """Expand what is between answers, whose tokens stay as they are.

        Args:
            tokens: of a chat.
            mask: true on those of answers.
            shapes: of the chat's visuals, of which the tokens may show the first ones.
            tokenizer: as for `expand`.
            all_shown: whether they must show all.

        Returns:
            The tokens and their mask, and how many visuals they show.

        Raises:
            ValueError: as `expand`.
        """
        grown, grown_mask, shown = list[int](), list[bool](), 0
        borders = [i for i in range(len(mask)) if not i or mask[i] != mask[i - 1]]
        last = max((i for i in borders if not mask[i]), default=-1)
        for start, end in zip(borders, [*borders[1:], len(mask)], strict=True):
            piece: Sequence[int] = tokens[start:end]
            if not mask[start]:
                count = sum(token in (self._image, self.video_id) for token in piece)
                to = len(shapes) if all_shown and start == last else shown + count
                piece, shown = self.expand(piece, shapes[shown:to], tokenizer), to
            grown += piece
            grown_mask += [mask[start]] * len(piece)
        return (tuple(grown), tuple(grown_mask)), shown

    @property
    def _image(self) -> int:
        """What a chat template writes in an image's place."""
        return self.start_id if self.kind == "siglip" else self.image_id

    def _expand_text(
        self, tokens: Sequence[int], shapes: Sequence[Shape | Visual], tokenizer: Any
    ) -> tuple[int, ...]:
        """Expand the text of a chat: what is written beside a placeholder may join text there."""
        text = tokenizer.decode([*tokens], clean_up_tokenization_spaces=False)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != [*tokens]:
            raise ValueError(
                "the tokens of the chat are not those of its text, as where a special token's text "
                f"is told as ordinary text: {text[:200]!r}"
            )
        names = {token: tokenizer.convert_ids_to_tokens(token) for token in self.ids}
        start, end = re.escape(names[self.start_id]), re.escape(names[self.end_id])
        pattern = re.escape(names[self._image])
        if self.video_id is not None:
            video = re.escape(names[self.video_id])
            pattern = f"{start}{video}{end}|{video}|{pattern}"
        waiting = iter(shapes)
        text = re.sub(pattern, lambda _: self._text(next(waiting), names), text)
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, shape: Shape | Visual, names: dict[int, str]) -> str:
        start, end, image = (names[i] for i in (self.start_id, self.end_id, self.image_id))
        if self.kind == "siglip":
            return f"\n\n{start}{image * shape.tokens}{end}\n\n"
        if not shape.seconds or self.video_id is None:
            return image * shape.tokens
        frame = names[self.video_id] * (shape.tokens // shape.grid[0])
        return "".join(f"<{second:.1f} seconds>{start}{frame}{end}" for second in shape.seconds)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


class VisualProcessor:
    """Makes `Visual`s of pictures, for one model.

    Args:
        resizing: how a checkpoint's pictures are resized and cut.
        placeholders: tokens that stand for them in prompts.
        max_pixels: the largest area of an image, or of a frame, in place of the family's.
        min_pixels: the smallest area of an image, in place of the family's.

    Raises:
        ValueError: bounds that don't fit.
    """

    def __init__(
        self,
        resizing: Resizing,
        placeholders: Placeholders,
        *,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
    ) -> None:
        if resizing.image is None and (max_pixels, min_pixels) != (None, None):
            raise ValueError(
                f"max_pixels, min_pixels: this model resizes every image to {resizing.side}x"
                f"{resizing.side}, expected none of them, got {max_pixels} and {min_pixels}"
            )
        self.resizing, self.placeholders, self._max_pixels = resizing, placeholders, max_pixels
        if resizing.image is not None:
            least, most = resizing.image
            most = most if max_pixels is None else max_pixels
            least = min(least, most) if min_pixels is None else min_pixels
            if not resizing.unit**2 <= most or not 0 < least <= most:
                raise ValueError(
                    f"expected {resizing.unit**2} <= max_pixels and 0 < min_pixels <= max_pixels, "
                    f"got max_pixels={most}, min_pixels={least}"
                )
            self._image = least, most

    @classmethod
    def from_directory(
        cls, directory: str | Path, *, max_pixels: int | None = None, min_pixels: int | None = None
    ) -> "VisualProcessor":
        """Return the processor of a checkpoint.

        Args:
            directory: holds config.json and preprocessor_config.json, or processor_config.json; or
                a hub repository, as `resolve` takes it.
            max_pixels: as for the class.
            min_pixels: as for the class.

        Raises:
            ValueError: a file is missing or can't be read, the model reads no images that this
                library knows, or settings don't fit.
        """
        path = resolve(directory)
        placeholders = Placeholders.from_directory(path)
        return cls(read_resizing(path), placeholders, max_pixels=max_pixels, min_pixels=min_pixels)

    def image_shape(self, source: Any, *, folder: Path | None = None) -> Shape:
        """Return the shape of an image from its header; see `image`."""
        width, height = read_size(source, folder=folder)
        return self._shape(*self._image_size(width, height))

    def image(self, source: Any, *, folder: Path | None = None) -> Visual:
        """Decode an image and cut it into patches.

        Args:
            source: in a form that `read_picture` takes.
            folder: where relative paths begin; None: there are no paths.

        Raises:
            PictureError: it can't be used.
        """
        picture = read_picture(source, folder=folder)
        width, height = self._image_size(*picture.size)
        pixels = self._resized(picture, width, height)
        return self._visual(pixels[None], self._shape(width, height))

    def video_shape(self, source: Any, *, folder: Path | None = None) -> Shape:
        """Return the shape of a video from its headers; see `video`."""
        return self._video_shape(open_video(source, folder=folder))

    def video(self, source: Any, *, folder: Path | None = None) -> Visual:
        """Decode a video and cut it into patches.

        Args:
            source: in a form that `open_video` takes.
            folder: where relative paths begin; None: there are no paths.

        Raises:
            PictureError: it can't be used, or the model reads no videos.
        """
        video = open_video(source, folder=folder)
        shape, unit = self._video_shape(video), self.resizing.patch
        height, width = shape.grid[1] * unit, shape.grid[2] * unit
        frames = [self._resized(frame, width, height) for frame in video.frames()]
        return self._visual(np.stack(frames), shape)

    def pixels(self, visual: Visual) -> UInt8[np.ndarray, "T H W 3"]:
        """Return the resized frames that a visual was cut from; of an image, its one.

        Args:
            visual: of this processor.
        """
        spans, p = self.resizing.frames_per_patch, self.resizing.patch
        t, h, w = visual.grid
        m = self.resizing.merge
        blocks = visual.patches.reshape(t, h // m, w // m, m, m, 3, spans, p, p)
        frames = blocks.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * spans, h * p, w * p, 3)
        return frames if visual.is_video else frames[:1]

    def _image_size(self, width: int, height: int) -> tuple[int, int]:
        if self.resizing.side:
            return self.resizing.side, self.resizing.side
        size = fit_area(width, height, self.resizing.unit, self._image)
        return self._bounded(size, (width, height))

    def _bounded(self, size: tuple[int, int], given: tuple[int, int]) -> tuple[int, int]:
        """Return a size that `max_pixels` allows, also where the least area is as large.

        Sides are rounded up to reach the least area, and may then go beyond.

        Raises:
            PictureError: a side would be shorter than a token's.
        """
        most = self._max_pixels
        if most is None or math.prod(size) <= most:
            return size
        size = fit_within(*given, self.resizing.unit, most)
        if math.prod(size) > most:
            raise PictureError(
                f"its sides are so different that it would be resized to {size[0]}x{size[1]}, "
                f"above max_pixels={most}; expected them to be more alike"
            )
        return size

    def _video_shape(self, video: Video) -> Shape:
        resizing, count = self.resizing, len(video.seconds)
        if resizing.video is None:
            raise PictureError("this model reads no videos")
        spans, (least, most), unit = resizing.frames_per_patch, resizing.video, resizing.unit
        (width, height), frames, rounded = video.size, 1, 1
        if resizing.kind != "qwen2_5":  # all frames share an area
            frames, rounded = count, round(count / spans) * spans
            if min(video.size) < unit:
                scale = unit / min(video.size)
                width, height = int(width * scale), int(height * scale)
                if max(width, height) > MAX_ASPECT * min(width, height):
                    aspect = f"at most {MAX_ASPECT} to 1"
                    raise PictureError(f"expected sides of {aspect}, got {video.size}")
        if self._max_pixels is not None:
            limit = self._max_pixels * min(frames, rounded)
            least, most = min(least, limit), min(most, limit)
        area = least, most
        size = fit_area(width, height, unit, area, frames=frames, rounded=rounded)
        groups = -(-count // spans)
        times = [*video.seconds, *[video.seconds[-1]] * (groups * spans - count)]
        seconds = tuple((times[i] + times[i + spans - 1]) / 2 for i in range(0, len(times), spans))
        return self._shape(*self._bounded(size, video.size), groups)._replace(seconds=seconds)

    def _shape(self, width: int, height: int, groups: int = 1) -> Shape:
        patch = self.resizing.patch
        return Shape((groups, height // patch, width // patch), self.resizing.merge)

    def _resized(self, picture: Image.Image, width: int, height: int) -> UInt8[np.ndarray, "H W 3"]:
        return np.asarray(picture.resize((width, height), Image.Resampling(self.resizing.resample)))

    def _visual(self, frames: UInt8[np.ndarray, "T H W 3"], shape: Shape) -> Visual:
        spans, p, m = self.resizing.frames_per_patch, self.resizing.patch, self.resizing.merge
        t, h, w = shape.grid
        missing = t * spans - len(frames)
        frames = np.concatenate([frames, *[frames[-1:]] * missing]) if missing else frames
        blocks = frames.reshape(t, spans, h // m, m, p, w // m, m, p, 3)
        ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        patches = np.ascontiguousarray(ordered).reshape(t * h * w, 3 * spans * p * p)
        digest = hashlib.sha256(np.array([*shape.grid, shape.merge], np.int64).tobytes())
        digest.update(np.array(shape.seconds, np.float64).tobytes())
        digest.update(patches.tobytes())
        return Visual(patches, shape.grid, shape.merge, digest.digest(), shape.seconds)


def configured_processor(
    source: str | Path | None,
    key: str,
    *,
    max_pixels: int | None,
    min_pixels: int | None,
    section: str = "",
) -> VisualProcessor | None:
    """Return what reads images as a config says; None where its model reads text alone.

    Args:
        source: directory of the model's files; None: it reads text alone.
        key: by which the config asks for images, for messages.
        max_pixels: as for `VisualProcessor`.
        min_pixels: as there.
        section: of the config, where these bounds are, with a point behind it.

    Raises:
        ConfigError: the model has no processor of images, the bounds don't fit, or there are some
            for a model of text.

    >>> configured_processor(None, "vision", max_pixels=9, min_pixels=None)
    Traceback (most recent call last):
    jaxrl_llm.config.errors.ConfigError: max_pixels: expected no bounds of images without vision
    """
    bounds = {"max_pixels": max_pixels, "min_pixels": min_pixels}
    if source is not None:
        with config_errors_at(key):
            return VisualProcessor.from_directory(source, **bounds)
    if given := [f"{section}{name}" for name, bound in bounds.items() if bound is not None]:
        raise ConfigError(f"{', '.join(given)}: expected no bounds of images without {key}")
    return None
