import base64
import io
import itertools
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from jaxrl_llm.data.visuals import pictures
from jaxrl_llm.data.visuals.pictures import PictureError, open_video, read_picture, read_size

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)


def encoded(image, kind="PNG", **options):
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_header(width, height):
    """Return a PNG that says it is so large, and holds nothing."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def animated(kind, count=3, **options):
    frames = [Image.new("RGB", (8, 6), (40 * i, 0, 0)) for i in range(count)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def forms(folder):
    png = encoded(PIXELS)
    (folder / "a.png").write_bytes(png)
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    image = Image.fromarray(PIXELS)
    return {
        "bytes": png,
        "a bytearray": bytearray(png),
        "verl's bytes": {"bytes": png},
        "of datasets": {"bytes": png, "path": "gone.png"},
        "a path in datasets": {"bytes": None, "path": "a.png"},
        "verl's image": {"image": image},
        "nested": {"image": {"bytes": png}},
        "a path": "a.png",
        "a whole path": folder / "a.png",
        "a file's URL": f"file://{folder}/a.png",
        "a data URL": url,
        "a PIL image": image,
        "an array": PIXELS,
    }


def test_all_forms_are_the_same_picture(tmp_path):
    for name, form in forms(tmp_path).items():
        assert (np.asarray(read_picture(form, folder=tmp_path)) == PIXELS).all(), name
        assert read_size(form, folder=tmp_path) == (9, 6), name


def test_formats_and_modes_become_rgb_as_in_transformers():
    from transformers.image_transforms import convert_to_rgb

    for kind in ("PNG", "WEBP", "BMP", "GIF", "JPEG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        flat = np.full((6, 9, 3), 128, np.uint8)
        read = np.asarray(read_picture(encoded(flat, kind, **options)))
        assert read.shape == (6, 9, 3) and np.abs(read.astype(int) - 128).max() <= 1, kind
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"):
        alpha = np.linspace(0, 255, 54).astype(np.uint8).reshape(6, 9, 1)
        image = Image.fromarray(np.concatenate([PIXELS, alpha], 2)).convert(mode)
        expected = convert_to_rgb(image, return_numpy=True)
        assert (np.asarray(read_picture(image)) == expected).all(), mode


def test_a_transparent_color_becomes_white():
    palette = Image.fromarray(PIXELS).quantize(4)
    read = np.asarray(read_picture(encoded(palette, transparency=2)))
    assert (read[np.asarray(palette) == 2] == 255).all()


def test_of_16_bits_the_upper_ones_count():
    """Pillow alone would clip them: everything above 255 is white then."""
    gray = (np.arange(54, dtype=np.uint16) * 1200).reshape(6, 9)
    read = np.asarray(read_picture(encoded(Image.fromarray(gray))))
    assert (read == (gray >> 8)[..., None]).all()


def test_pictures_stand_upright_as_in_transformers(subtests):
    """transformers' `load_image` calls `exif_transpose`."""
    for kind, n in itertools.product(("PNG", "JPEG", "WEBP"), (*range(10), 300)):
        exif = Image.Exif()
        exif[0x0112] = n
        data = encoded(np.kron(PIXELS, np.ones((8, 8, 1), np.uint8)), kind, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        with subtests.test(f"{kind} {n}"):
            assert read_picture(data).tobytes() == expected.tobytes()
            assert read_size(data) == expected.size


@pytest.mark.filterwarnings("error")
def test_a_photo_is_its_first_picture_as_in_transformers(tmp_path, subtests):
    from transformers.image_utils import load_image

    first = Image.fromarray(np.kron(PIXELS, np.ones((8, 8, 1), np.uint8)))
    white = Image.new("RGB", (32, 24), "white")
    both = encoded(first, "MPO", save_all=True, append_images=[white])
    alone, preview = encoded(first, "JPEG"), encoded(white, "JPEG")
    preview = b"\xff\xd8\xff\xe1" + struct.pack(">H", len(preview) + 2) + preview
    for name, data in {
        "a second picture": both,
        "a second picture that was cut off": both[: both.rindex(b"\xff\xd8")],
        "a preview": preview + alone[2:],
        "a video behind it": alone + b"\0\0\0\x18ftypmp42" + b"\xff\xda\0" * 500,
    }.items():
        (tmp_path / "a.jpg").write_bytes(data)
        expected = load_image(Image.open(io.BytesIO(data)))
        with subtests.test(name):
            for form in (data, "a.jpg", Image.open(io.BytesIO(data))):
                assert read_picture(form, folder=tmp_path).tobytes() == expected.tobytes()
                assert read_size(form, folder=tmp_path) == expected.size == (72, 48)
            with pytest.raises(PictureError, match="frames"):
                open_video(data)


WHOLE = encoded(np.kron(PIXELS, np.ones((30, 30, 1), np.uint8)))
JPEG = encoded(np.kron(PIXELS, np.ones((30, 30, 1), np.uint8)), "JPEG")
PASSES = encoded(np.zeros((16, 16), np.uint8), "JPEG", progressive=True)
LAST_PASS = PASSES[PASSES.rindex(b"\xff\xda") : -2]
REFUSED = {
    **{"nothing": None, "a number": 3, "no bytes": b"", "text": b"hello world"},
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "TIFF": encoded(PIXELS, "TIFF"),
    **{"half a header": WHOLE[:20], "half a PNG": WHOLE[: len(WHOLE) // 2]},
    **{"half a JPEG": JPEG[: len(JPEG) // 2], "no width": png_header(0, 5)},
    **{"a thin one": np.zeros((2, 402, 3), np.uint8), "no pixels": np.zeros((0, 5, 3), np.uint8)},
    **{"floats": np.zeros((5, 5, 3)), "channels first": np.zeros((3, 5, 5), np.uint8)},
    "32 bits": Image.new("I", (4, 4)),
    **{f"an animated {kind}": animated(kind) for kind in ("GIF", "WEBP", "PNG")},
    **{"an address": "https://example.com/a.png", "no file": "gone.png", "a folder": "."},
    **{"base64 alone": "iVBORw0K" * 99, "a URL of text": "data:text/plain;base64,AAAA"},
    "wrong base64": "data:image/png;base64,A?A",
    **{"an empty object": {}, "empty columns": {"bytes": None, "path": None}},
}
TOO_MANY_PIXELS = {
    "a large PNG": png_header(9_000, 9_000),
    "a bomb": png_header(60_000, 60_000),
    "100,000 scans": PASSES[:-2] + LAST_PASS * 100_000 + PASSES[-2:],
}


@pytest.mark.filterwarnings("error")
def test_what_is_refused(tmp_path, subtests):
    for name, source in REFUSED.items():
        with subtests.test(name), pytest.raises(PictureError):
            read_picture(source, folder=tmp_path)
    for name, source in TOO_MANY_PIXELS.items():
        with subtests.test(name), pytest.raises(PictureError, match="expected"):
            read_picture(source)
    (tmp_path / "a.png").write_bytes(WHOLE)
    for path in (str(tmp_path / "a.png"), {"path": str(tmp_path / "a.png")}):
        with pytest.raises(PictureError):  # files are read only where there is a folder
            read_picture(path)


def test_damage_anywhere_is_one_kind_of_error():
    """Cut and changed at many places, each file can be read or is refused, and nothing else."""
    rng, outcomes = np.random.default_rng(0), set()
    files = [WHOLE, JPEG, encoded(PIXELS, "GIF"), encoded(PIXELS, "BMP"), encoded(PIXELS, "WEBP")]
    files.append(encoded(PIXELS, "WEBP", lossless=True))
    for file in files:
        for _ in range(60):
            data = bytearray(file[: rng.integers(1, len(file) + 1)])
            data[rng.integers(0, min(len(data), 64))] = rng.integers(0, 256)
            try:
                outcomes.add(read_picture(bytes(data)).mode)
            except PictureError:
                outcomes.add("refused")
    assert outcomes == {"RGB", "refused"}


def test_forms_of_videos(tmp_path):
    frames = [PIXELS, PIXELS[::-1], 255 - PIXELS]
    for source in (
        {"frames": frames, "fps": 4},
        {"video": [encoded(f) for f in frames], "sample_fps": 4.0},
        {"video": {"frames": np.stack(frames)}, "fps": 4},
    ):
        video = open_video(source)
        assert (video.size, video.seconds) == ((9, 6), (0.0, 0.25, 0.5))
        decoded = [np.asarray(frame) for frame in video.frames()]
        assert (np.stack(decoded) == np.stack(frames)).all()
    assert open_video(frames).seconds == (0.0, 0.5, 1.0)


def test_an_animated_picture_is_a_video():
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        video = open_video({"bytes": animated(kind, 3, duration=200, **options)})
        assert video.size == (8, 6)
        np.testing.assert_allclose(video.seconds, (0.0, 0.2, 0.4))
        assert [frame.getpixel((0, 0))[0] for frame in video.frames()] == [0, 40, 80], kind


def test_what_is_refused_of_videos(monkeypatch, subtests):
    for name, source in {
        **{"one frame": [PIXELS], "too many": [PIXELS] * 769, "a still picture": WHOLE},
        **{"two sizes": [PIXELS, PIXELS[:3]], "a damaged frame": [WHOLE, WHOLE[:40]]},
        **{"no rate": {"frames": [PIXELS] * 2, "fps": 0}, "a rate alone": {"fps": 2}},
        "no rate of its own": {"video": animated("GIF"), "fps": 2},
        "large frames": [Image.new("1", (8000, 8000))] * 17,
    }.items():
        with subtests.test(name), pytest.raises(PictureError):
            open_video(source)
    data = animated("GIF", 6)
    with pytest.raises(PictureError):
        [*open_video(data[: len(data) // 2]).frames()]
    # large ones are refused before they are read
    monkeypatch.setattr(pictures, "MAX_VIDEO_PIXELS", 3 * 8 * 6)
    assert open_video({"bytes": animated("GIF", 3)}).size == (8, 6)
    with pytest.raises(PictureError, match="144"):
        open_video({"bytes": animated("GIF", 4)})
