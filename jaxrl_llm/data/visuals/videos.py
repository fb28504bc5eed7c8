"""Videos: frames that were drawn from one before, with their times, or an animated picture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxrl_llm.data.visuals.pictures import (
    PictureError,
    as_rgb,
    open_picture,
    read_picture,
    read_size,
    refusing,
)

MAX_FRAMES = 768
MAX_VIDEO_PIXELS = 2**30
"""The largest video, in pixels of all frames as they are stored."""

DEFAULT_FPS = 2.0
"""Of frames without times: the rate at which qwen_vl_utils draws them."""


@dataclass(frozen=True)
class Video:
    """Frames of a video, which are decoded one at a time.

    Attributes:
        size: width and height of each frame, in pixels.
        seconds: time of each frame.
        frames: decodes them in order, as RGB.
    """

    size: tuple[int, int]
    seconds: tuple[float, ...]
    frames: Callable[[], Iterator[Image.Image]]


def open_video(source: Any, *, folder: Path | None = None) -> Video:
    """Open a video, of which only headers are read.

    Args:
        source: frames in any form that `read_picture` takes, all of one size, as a list, an array
            of uint8 [T H W 3], or `{"frames" or "video": frames, "fps" or "sample_fps": rate}`,
            at `DEFAULT_FPS` where there is no rate; or an animated GIF, WebP or PNG, in the forms
            of a picture.
        folder: where relative paths begin; None: there are no paths.

    Raises:
        PictureError: another form, fewer than 2 or more than `MAX_FRAMES` frames, frames of several
            sizes, or a frame that can't be used.
    """
    fps = None
    while isinstance(source, Mapping) and not isinstance(source.get("bytes"), bytes):
        rate = source.get("fps") if source.get("fps") is not None else source.get("sample_fps")
        fps = rate if rate is not None else fps
        source = _inner(source)
    if isinstance(source, list | tuple) or (isinstance(source, np.ndarray) and source.ndim == 4):
        return _from_frames(list(source), DEFAULT_FPS if fps is None else fps, folder)
    if fps is not None:
        raise PictureError(f"expected a list of frames with fps={fps}, got none")
    return _from_file(source, folder)


def _inner(source: Mapping[str, Any]) -> Any:
    for key in ("frames", "video", "image", "path"):
        if source.get(key) is not None:
            return source[key]
    raise PictureError(f"expected frames or video, got {sorted(source)} without any")


def _from_frames(frames: Sequence[Any], fps: Any, folder: Path | None) -> Video:
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e4:
        raise PictureError(f"expected fps as a number above 0, got {fps!r}")
    _check_count(len(frames))
    sizes = [_of_frame(n, lambda f: read_size(f, folder=folder), f) for n, f in enumerate(frames)]
    if other := {*sizes} - {sizes[0]}:
        raise PictureError(f"expected frames of one size, got {sizes[0]} and {min(other)}")
    _check_pixels(len(frames), sizes[0])

    def decode() -> Iterator[Image.Image]:
        for number, frame in enumerate(frames):
            yield _of_frame(number, lambda f: read_picture(f, folder=folder), frame)

    return Video(sizes[0], tuple(number / fps for number in range(len(frames))), decode)


def _of_frame(number: int, read: Callable[[Any], Any], frame: Any) -> Any:
    try:
        return read(frame)
    except PictureError as error:
        raise PictureError(f"frame {number}: {error}") from error


def _from_file(source: Any, folder: Path | None) -> Video:
    if isinstance(source, str | Path) and Path(source).suffix.lower() in (".mp4", ".webm", ".mkv"):
        raise PictureError("expected frames drawn from the video, or an animated GIF, got a file")
    with open_picture(source, folder=folder, frames=True) as image, refusing():
        count = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        _check_count(count)
        _check_pixels(count, image.size)
        ends, now = [], 0.0
        for number in range(count):
            image.seek(number)
            if image.format == "WEBP":
                image.load()  # before, it does not know how long the frame is shown
            ends.append(now)
            now += image.info.get("duration", 0) / 1000 or 1 / 10  # browsers' default
        size = image.size

    def decode() -> Iterator[Image.Image]:
        with open_picture(source, folder=folder, frames=True) as image, refusing():
            for number in range(count):
                image.seek(number)
                yield as_rgb(image)

    return Video(size, tuple(ends), decode)


def _check_count(count: int) -> None:
    if not 2 <= count <= MAX_FRAMES:
        raise PictureError(f"expected a video of 2 to {MAX_FRAMES} frames, got {count}")


def _check_pixels(count: int, size: tuple[int, int]) -> None:
    if count * size[0] * size[1] > MAX_VIDEO_PIXELS:
        raise PictureError(
            f"expected at most {MAX_VIDEO_PIXELS} pixels in all frames, got {count} of "
            f"{size[0]}x{size[1]}"
        )
