"""Requests to vLLM: which it can serve, and what its processor is shown of their images.

vLLM resizes images and writes placeholder tokens itself. It is shown images as they were resized
here, which its own resizing leaves as they are, and one placeholder for each. What it makes of them
is compared with the tokens of the request, in the sidecar.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.models.hf.files import read_json
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineError, EngineSettings, check_request, images_refused
from jaxrl_llm.rollout.types import Request

MOST_TOP_LOGPROBS = 20
MOST_BIAS = 100.0  # vLLM cuts what is larger
PREPROCESSOR = "preprocessor_config.json"


class SidecarImages:
    """Makes of requests with images what a sidecar is asked.

    Args:
        spec: of a model with a vision tower.
        source: directory of its files.

    Raises:
        ValueError: a model whose images vLLM would turn into tokens otherwise.
    """

    def __init__(self, spec: ModelSpec, source: str) -> None:
        """Read how the model's images are made."""
        self._source, self._processor = source, VisualProcessor.from_directory(source)
        if self._processor.resizing.kind == "siglip":
            raise ValueError(
                "vLLM is shown no images of Gemma 3 yet: expected rollout.engine: native, or "
                "model.vision: none"
            )
        assert spec.vision is not None, "the caller has looked"
        self.never_sampled = list(spec.vision.never_sampled)

    def write_files(self, folder: Path, max_tokens: int) -> None:
        """Write the tokenizer, and a config of vLLM's processor that resizes nothing.

        Args:
            folder: beside the model's config.json.
            max_tokens: of the longest sequence, which bounds an image.
        """
        source = resolve(self._source)
        given = read_json(source / PREPROCESSOR)
        config = {k: v for k, v in given.items() if k not in ("min_pixels", "max_pixels")}
        unit = self._processor.resizing.unit**2
        config["size"] = {"shortest_edge": unit, "longest_edge": unit * max_tokens}
        load_tokenizer(self._source).save_pretrained(folder)
        (folder / PREPROCESSOR).write_text(json.dumps(config))
        videos = source / "video_preprocessor_config.json"
        if videos.is_file():
            (folder / videos.name).write_bytes(videos.read_bytes())

    def check(self, request: Request) -> None:
        """Refuse images that are not those of the prompt's placeholders, and videos.

        Raises:
            EngineError: there are some.
        """
        if any(visual.is_video for visual in request.visuals):
            raise EngineError("got a video, but vLLM is shown images only: use the native engine")
        expected = [visual.tokens for visual in request.visuals]
        given = [len(run) for is_image, run in self._runs(request) if is_image]
        if given != expected:
            raise EngineError(
                f"the prompt holds placeholder tokens of images in runs of {given}, expected "
                f"{expected}, as many as each of its {len(expected)} images has"
            )

    def fields(self, request: Request) -> dict[str, Any]:
        """Return what a message says of a prompt with images.

        Returns:
            As `prompt` the tokens with one placeholder for each image, and as `images` width and
            height of each.
        """
        sizes = []
        for visual in request.visuals:
            patch = self._processor.resizing.patch
            sizes.append([visual.grid[2] * patch, visual.grid[1] * patch])
        runs = (run[:1] if is_image else run for is_image, run in self._runs(request))
        prompt = tuple(itertools.chain.from_iterable(runs))
        return {"prompt": prompt, "images": sizes}

    def pixels(self, request: Request) -> memoryview:
        """Return the images as RGB, one behind the other, as they were resized."""
        frames = (self._processor.pixels(visual)[0] for visual in request.visuals)
        return memoryview(b"".join(frame.tobytes() for frame in frames))

    def _runs(self, request: Request) -> Iterator[tuple[bool, list[int]]]:
        """Yield the prompt in runs, of placeholders and of other tokens."""
        image = self._processor.placeholders.image_id
        for is_image, run in itertools.groupby(request.prompt, lambda token: token == image):
            yield is_image, list(run)


def check_vllm_request(
    request: Request, spec: ModelSpec, settings: EngineSettings, images: SidecarImages | None
) -> None:
    """Refuse a request that vLLM can't serve.

    Args:
        request: to look at.
        spec: of the model.
        settings: of the engine.
        images: None: the model reads text alone.

    Raises:
        EngineError: it can't.
    """
    check_request(
        request,
        max_tokens=settings.max_tokens,
        vocab_size=spec.vocab_size,
        limits={"top_logprobs": MOST_TOP_LOGPROBS},
    )
    if request.sampling.stop:
        raise EngineError("got texts that stop the answer, but this engine has no tokenizer")
    for token, bias in request.sampling.logit_bias:
        if abs(bias) > MOST_BIAS:
            raise EngineError(
                f"got logit_bias {bias} for token {token}, expected at most {MOST_BIAS:g}"
            )
    if images is not None:
        images.check(request)
    elif request.visuals:
        raise images_refused(request)
