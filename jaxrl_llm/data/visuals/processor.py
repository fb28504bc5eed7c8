"""From pictures to patches of uint8, as the image processors of `transformers` make them.

Nothing is normalized here: the tower does that on the device. Neither torch nor torchvision is
imported, and Pillow resizes whatever else is installed.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.data.visuals.pictures import PictureError, read_picture, read_size
from jaxrl_llm.data.visuals.placeholders import Placeholders
from jaxrl_llm.data.visuals.resizing import (
    Area,
    Resizing,
    Shape,
    fit_area,
    fit_volume,
    fit_within,
    read_resizing,
)
from jaxrl_llm.data.visuals.videos import Video, open_video
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.vision.inputs import Visual


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
            self._image = Area(least, most)

    @classmethod
    def from_directory(
        cls,
        directory: str | Path,
        *,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
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
        spans, area = resizing.frames_per_patch, resizing.video
        groups = -(-count // spans)
        if resizing.kind == "qwen2_5":
            area = area if self._max_pixels is None else area.capped(self._max_pixels)
            size = fit_area(*video.size, resizing.unit, area)
        else:
            if self._max_pixels is not None:
                counted = min(count, round(count / spans) * spans)  # as `fit_volume` does
                area = area.capped(self._max_pixels * counted)
            size = fit_volume(count, video.size, resizing, area)
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
