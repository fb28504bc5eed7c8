"""The keys of data to train on."""

from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import key, required


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts to train and validate on."""

    train: tuple[str, ...] = required("parquet or jsonl files with verl's columns")
    validation: tuple[str, ...] = key((), "held-out files of the same kind")
    prepare: FunctionSpec | None = key(
        None, "preparation that writes the files when they are missing (jaxrl_llm.data.prepare)"
    )
    dataset: FunctionSpec = key(FunctionSpec("verl_rows"), "function from files to rows")
    max_prompt_tokens: int = key(512, "the longest prompt, in tokens of the chat template's text")
    filter_overlong: bool = key(False, "drop longer prompts; false makes them an error")
    shuffle: bool = key(True, "a new order in every epoch, from the seed")
    chat_template_kwargs: dict[str, Any] = key({}, "keywords for the chat template")


@dataclass(frozen=True, kw_only=True)
class SftDataConfig:
    """Examples to imitate."""

    train: tuple[str, ...] = required("parquet or jsonl files with columns prompt and response")
    prepare: FunctionSpec | None = key(
        None, "preparation that writes the files when they are missing (jaxrl_llm.data.prepare)"
    )
    dataset: FunctionSpec = key(FunctionSpec("sft_rows"), "function from files to rows")
    max_tokens: int = key(1024, "the longest example, prompt and response")
    filter_overlong: bool = key(False, "drop longer examples; false makes them an error")
    shuffle: bool = key(True, "a new order in every epoch, from the seed")
    chat_template_kwargs: dict[str, Any] = key({}, "keywords for the chat template")
