"""The keys of data to train on."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Section, Several, Table, function_key

IMAGE_KEY = Field(default="images", description="column of the images of a prompt (docs/images.md)")
VIDEO_KEY = Field(default="videos", description="column of the videos of a prompt")
MAX_PIXELS = Field(
    default=None,
    ge=1,
    description=(
        "the largest area of an image, and of a frame of a video, to which it is resized; null "
        "takes the model's"
    ),
)
MIN_PIXELS = Field(
    default=None,
    ge=1,
    description="the smallest area of an image; null takes the model's",
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig(Section):
    """Prompts to train and validate on."""

    train: Several[str] = Field(
        min_length=1, description="parquet or jsonl files with verl's columns"
    )
    validation: Several[str] = Field(default=(), description="held-out files of the same kind")
    prepare: Function | None = function_key(
        kinds.PREPARATIONS,
        None,
        "preparation that writes the files when they are missing (jaxrl_llm.data.prepare)",
        passed=(),
    )
    dataset: Function = function_key(kinds.DATASETS, "verl_rows", "function from files to rows")
    image_key: str = IMAGE_KEY
    video_key: str = VIDEO_KEY
    max_pixels: int | None = MAX_PIXELS
    min_pixels: int | None = MIN_PIXELS
    max_prompt_tokens: int = Field(
        default=512,
        ge=1,
        description=(
            "the longest prompt, in tokens of the chat template's text, with those of images"
        ),
    )
    filter_overlong: bool = Field(
        default=False, description="drop longer prompts; false makes them an error"
    )
    shuffle: bool = Field(default=True, description="shuffle in every epoch, by the seed")
    chat_template_kwargs: Table = Field(default={}, description="keywords for the chat template")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftDataConfig(Section):
    """Examples to imitate."""

    train: Several[str] = Field(
        min_length=1,
        description="parquet or jsonl files with a column messages, or with prompt and response",
    )
    prepare: Function | None = function_key(
        kinds.PREPARATIONS,
        None,
        "preparation that writes the files when they are missing (jaxrl_llm.data.prepare)",
        passed=(),
    )
    dataset: Function = function_key(kinds.DATASETS, "sft_rows", "function from files to rows")
    image_key: str = IMAGE_KEY
    video_key: str = VIDEO_KEY
    max_pixels: int | None = MAX_PIXELS
    min_pixels: int | None = MIN_PIXELS
    max_tokens: int = Field(
        default=1024, ge=1, description="the longest example, prompt and response"
    )
    train_on: Literal["all", "last"] = Field(
        default="all",
        description="answers of a conversation that are trained: all, or the last one",
    )
    filter_overlong: bool = Field(
        default=False, description="drop longer examples; false makes them an error"
    )
    shuffle: bool = Field(default=True, description="shuffle in every epoch, by the seed")
    chat_template_kwargs: Table = Field(default={}, description="keywords for the chat template")
