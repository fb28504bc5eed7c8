"""Pictures in the forms that data sets have them, opened safely.

A file may be damaged or made to do harm: its size is known from its header before anything of it is
decoded, few formats are read, and whatever goes wrong is one kind of error.
"""

import base64
import binascii
import contextlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is read; others, such as SVG, TIFF and PDF, are refused."""

MAX_PIXELS = 2**26
"""The largest picture, in pixels as it is stored: 200 MB as RGB."""

MAX_SCANS = 100
"""Passes over a progressive JPEG; usual ones have ten. A further one takes a hundred bytes."""

MAX_ASPECT = 200
"""The longer side may be so many times the shorter one."""

ORIENTATION = 0x0112  # tag of EXIF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
ON_THEIR_SIDE = (5, 6, 7, 8)
TURNED_BY = {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}  # keys of Pillow's `info`
JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # not in pixels, which may hold others
END_OF_JPEG = b"\xff\xd9"
WITHOUT_LENGTH = (b"\xff\x01", b"\xff\xd8")
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B"}


class PictureError(ValueError):
    """A picture or a video that can't be used, and why."""


def read_size(source: Any, *, folder: Path | None = None) -> tuple[int, int]:
    """Return a picture's width and height in pixels, upright, from its header.

    Args:
        source: as for `read_picture`.
        folder: as there.

    Raises:
        PictureError: it can't be used, as far as the header tells.
    """
    with open_picture(source, folder=folder) as image:
        width, height = image.size
        return (height, width) if orientation(image) in ON_THEIR_SIDE else (width, height)


def read_picture(source: Any, *, folder: Path | None = None) -> Image.Image:
    """Return a picture as RGB, upright, transparency over white.

    Args:
        source: encoded bytes, `{"bytes": …}`, `{"image": …}`, `{"path": …}`, a path, a
            `data:image/…;base64,` URL, a PIL image, or an array of uint8 [H W], [H W 3] or [H W 4].
        folder: where relative paths begin; None: there are no paths, as where a stranger gives
            them.

    Returns:
        A picture of which no one else holds the pixels.

    Raises:
        PictureError: another form or format, more than `MAX_PIXELS`, several frames, sides of more
            than `MAX_ASPECT` to 1, no pixels at all, or damaged.

    >>> read_picture(np.zeros((2, 3), np.uint8)).size
    (3, 2)
    """
    with open_picture(source, folder=folder) as image:
        turn = TURNS.get(orientation(image))  # before pixels are read: `read_size` knows it so
        with refusing():
            rgb = as_rgb(_alone(image))
            return rgb if turn is None else rgb.transpose(turn)


@contextlib.contextmanager
def open_picture(
    source: Any, *, folder: Path | None = None, frames: bool = False
) -> Iterator[Image.Image]:
    """Open a picture, of which only the header is read and checked.

    Args:
        source: as for `read_picture`.
        folder: as there.
        frames: whether it may be animated. A photo with further pictures behind it (MPO), such as
            a preview or a map of its gain, is not: the first one is the photo.

    Raises:
        PictureError: as there, as far as the header tells.
    """
    with contextlib.ExitStack() as stack:
        image = _as_image(source, folder, stack)
        _check_size(*image.size)
        short, long = sorted(image.size)
        if long > MAX_ASPECT * short:
            width, height = image.size
            raise PictureError(f"expected sides of at most {MAX_ASPECT} to 1, got {width}x{height}")
        with refusing():
            animated = getattr(image, "is_animated", False) and image.format != "MPO"
        if animated and not frames:
            raise PictureError("it is animated: expected a single picture, or a video")
        yield image


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn whatever a decoder raises into a `PictureError`."""
    try:
        yield
    except PictureError:
        raise
    except Exception as error:  # decoders of damaged files raise errors of many kinds
        raise PictureError(f"it can't be decoded: {' '.join(str(error).split())[:200]}") from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Return a copy of an opened picture as RGB, transparency over white.

    Of 16 bits of gray the upper 8 are kept, as decoders do with 16 bits of each color.
    """
    if image.mode not in MODES:
        raise PictureError(f"expected pixels of 8 or 16 bits, got the mode {image.mode}")
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def orientation(image: Image.Image) -> int:
    """Return how a picture is turned, by EXIF or XMP, from 1 (upright) to 8.

    As in Pillow's `exif_transpose`, any other value means upright.
    """
    if image.format == "PNG" and not TURNED_BY & {*image.info}:
        return 1  # Pillow would decode all of it to look for EXIF behind the pixels
    with refusing():
        value = image.getexif().get(ORIENTATION, 1)
        return int(value) if value in TURNS else 1


def _as_image(source: Any, folder: Path | None, stack: contextlib.ExitStack) -> Image.Image:
    while isinstance(source, Mapping):
        expected = "one of bytes, image and path"
        source = _inner(source, "bytes", "image", "path", expected=expected)
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, str | Path):
        source = _from_text(source, folder, stack)
    if isinstance(source, bytes | bytearray | memoryview):
        source = io.BytesIO(source)
    if not isinstance(source, io.BytesIO | io.BufferedReader):
        kind = type(source).__name__
        raise PictureError(f"expected bytes, a path, a PIL image or an array, got a {kind}")
    return _from_file(source, stack)


def _inner(source: Mapping[str, Any], *keys: str, expected: str) -> Any:
    for key in keys:
        if source.get(key) is not None:
            return source[key]
    raise PictureError(f"expected {expected}, got {sorted(source)} without any")


def _from_text(
    source: str | Path, folder: Path | None, stack: contextlib.ExitStack
) -> bytes | io.BufferedReader:
    text = str(source)
    if text.startswith("data:"):
        return _from_url(text)
    if text.startswith(("http://", "https://")):
        raise PictureError(f"nothing is fetched: expected the picture itself, got {text[:80]!r}")
    if folder is None:
        raise PictureError(f"no files are read here: expected a data URL, got {text[:80]!r}")
    path = folder / text.removeprefix("file://")
    try:
        if path.is_file():
            return stack.enter_context(path.open("rb"))
    except OSError as error:  # also of base64 without the head of a URL, a name that is too long
        raise PictureError(f"it can't be read: {str(error)[:200]}") from error
    raise PictureError(f"there is no file {str(path)[:200]!r}")


def _from_url(text: str) -> bytes:
    head, _, data = text.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise PictureError(f"expected data:image/…;base64,… as URL, got {head[:80]!r}")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"its base64 can't be decoded: {error}") from error


def _from_array(array: np.ndarray) -> Image.Image:
    is_gray = array.ndim == 2
    if array.dtype != np.uint8 or not (is_gray or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise PictureError(
            "expected an array of uint8 [H W], [H W 3] or [H W 4], got "
            f"{array.dtype} {list(array.shape)}"
        )
    if not array.size:
        raise PictureError(f"it has no pixels: got an array {list(array.shape)}")
    return Image.fromarray(array)


def _from_file(file: io.BytesIO | io.BufferedReader, stack: contextlib.ExitStack) -> Image.Image:
    head = file.read(30)
    file.seek(0)
    if not head:
        raise PictureError("it is empty")
    _check_webp(head)
    try:
        return stack.enter_context(Image.open(file, formats=FORMATS))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(f"expected at most {MAX_PIXELS} pixels, got more: {error}") from error
    except Image.UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise PictureError(
            f"expected a whole file of {known}, it begins with {head[:8]!r}"
        ) from error
    except Exception as error:  # as `refusing`
        raise PictureError(f"it can't be opened: {' '.join(str(error).split())[:200]}") from error


def _check_webp(head: bytes) -> None:
    """Check the size in a WebP's header: its decoder takes memory for all of it when opened."""
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return
    kind, low14 = head[12:16], 2**14 - 1
    if kind == b"VP8X":
        width, height = (int.from_bytes(head[i : i + 3], "little") + 1 for i in (24, 27))
    elif kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        width, height = (bits & low14) + 1, (bits >> 14 & low14) + 1
    else:
        width, height = (int.from_bytes(head[i : i + 2], "little") & low14 for i in (26, 28))
    _check_size(width, height)


def _alone(image: Image.Image) -> Image.Image:
    """Return a JPEG without what lies behind it, such as a preview or a phone's short video.

    Raises:
        PictureError: it takes hours to decode: each scan may pass over all of its pixels.
    """
    if not isinstance(image, ImageFile.ImageFile) or image.fp is None or not image.tile:
        return image
    if image.format not in ("JPEG", "MPO"):
        return image
    image.fp.seek(image.tile[0][2])
    data = _first_jpeg(image.fp.read())
    scans = data.count(b"\xff\xda")  # pixels never hold these two bytes
    if scans > MAX_SCANS:
        raise PictureError(f"expected a JPEG of at most {MAX_SCANS} scans, got {scans}")
    return Image.open(io.BytesIO(data), formats=("JPEG",))


def _first_jpeg(data: bytes) -> bytes:
    """Return a file up to the end of its first JPEG; ends inside segments do not count."""
    at = len(b"\xff\xd8")
    while marker := JPEG_MARKER.search(data, at):
        at = marker.end()
        if marker[0] == END_OF_JPEG:
            return data[:at]
        if marker[0] not in WITHOUT_LENGTH:
            at += int.from_bytes(data[at : at + 2], "big")
    return data


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise PictureError(f"it has no pixels: got {width}x{height}")
    if width * height > MAX_PIXELS:
        raise PictureError(f"expected at most {MAX_PIXELS} pixels, got {width}x{height}")


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
        keys = "frames", "video", "image", "path"
        source = _inner(source, *keys, expected="frames or video")
    if isinstance(source, list | tuple) or (isinstance(source, np.ndarray) and source.ndim == 4):
        return _from_frames(list(source), DEFAULT_FPS if fps is None else fps, folder)
    if fps is not None:
        raise PictureError(f"expected a list of frames with fps={fps}, got none")
    return _video_from_file(source, folder)


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


def _video_from_file(source: Any, folder: Path | None) -> Video:
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
