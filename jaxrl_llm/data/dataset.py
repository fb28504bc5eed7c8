"""From checked rows to token ids in memory: prompts, examples and preferences, with their images.

Batches of them have a position that can be saved.
"""

import functools
import hashlib
import logging
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from jaxrl_llm.data.chat import ChatTemplate, Message, Tokenizer
from jaxrl_llm.data.rows import (
    REFERENCE_COLUMNS,
    FileRow,
    Row,
    map_rows,
    naming_row,
    normalize_messages,
    row_name,
)
from jaxrl_llm.data.visuals.pictures import PictureError
from jaxrl_llm.data.visuals.processor import Shape, VisualProcessor
from jaxrl_llm.models.inputs import Visual
from jaxrl_llm.types import Batch

# Images and videos of rows: which ones, and where their messages mention them.
#
# Messages do so by `<image>` and `<video>` in their texts (verl), or by typed parts (TRL, OpenAI).

Media = Literal["image", "video"]
MARK = re.compile("(<image>|<video>)")


class Picture(NamedTuple):
    """An image or a video of a row, not opened yet.

    Attributes:
        media: which of the two.
        source: in a form that `read_picture` or `open_video` takes.
        name: of its field, for messages.
    """

    media: Media
    source: Any
    name: str


@dataclass(frozen=True)
class RowPictures:
    """The images and videos of a row, decoded when this is called.

    Attributes:
        processor: of the model.
        pictures: in their order in the chat.
        folder: where relative paths begin.
        where: the row is from, for messages.
        row: its number in the dataset.
        tokens: how many stand for each.
    """

    processor: VisualProcessor
    pictures: Sequence[Picture]
    folder: Path
    where: str
    row: int
    tokens: Sequence[int]

    def __call__(self) -> tuple[Visual, ...]:
        """Decode them.

        Raises:
            RowError: one is damaged, or is no longer as large as it was.
        """
        read = {"image": self.processor.image, "video": self.processor.video}
        with naming_row(self.where, self.row):
            visuals = tuple(_named(read[p.media], p, self.folder) for p in self.pictures)
            for picture, visual, count in zip(self.pictures, visuals, self.tokens, strict=True):
                if visual.tokens != count:
                    raise PictureError(
                        f"field {picture.name!r}: expected {count} tokens as when the run began, "
                        f"got {visual.tokens}: the file was replaced"
                    )
        return visuals

    def digest(self) -> bytes:
        """Return a digest of what rows hold of them: of encoded bytes, or of paths and sizes."""
        digest = hashlib.sha256()
        for picture in self.pictures:
            _add(digest, picture.source, self.folder)
        return digest.digest()


@dataclass(frozen=True)
class Example:
    """A tokenized supervised example.

    Attributes:
        tokens: of a chat.
        mask: of each token, whether the loss falls on it: those of answers that are trained.
        load: decodes the images and videos; None: there are none.
    """

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    load: RowPictures | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class RowVisuals:
    """Reads the images and videos of rows.

    Attributes:
        image_key: column of a row's images.
        video_key: column of its videos.
        processor: of the model; None: it reads none, and rows that have some are refused.
    """

    image_key: str = "images"
    video_key: str = "videos"
    processor: VisualProcessor | None = None

    def prompt(
        self,
        row: Mapping[str, Any],
        number: int,
        encode: Callable[[Sequence[Mapping[str, Any]]], Sequence[int]],
        tokenizer: Any,
    ) -> tuple[list[dict[str, Any]], tuple[int, ...], RowPictures | None]:
        """Return a row's messages, its tokens, and what decodes its images and videos.

        Args:
            row: as for `split`.
            number: of the row in the dataset.
            encode: messages -> token ids, one placeholder for each image or video.
            tokenizer: by which they are made.

        Raises:
            ValueError: as `split`, or the chat template writes another number of placeholders.
            PictureError: an image or a video can't be used, as far as its header tells.
        """
        messages, pictures = self.split(row)
        tokens = encode(messages)
        untrained = [(tokens, [False] * len(tokens))]
        (made,) = self._expand(untrained, pictures, row, number, tokenizer)
        return messages, made.tokens, made.load

    def conversation(
        self,
        row: Mapping[str, Any],
        chat: Sequence[Mapping[str, Any]],
        number: int,
        encode: Callable[[Sequence[Mapping[str, Any]]], Sequence[tuple[list[int], list[bool]]]],
        tokenizer: Any,
    ) -> list[Example]:
        """Return a chat as sequences to train on, each with what decodes its images and videos.

        Args:
            row: with columns of images and videos.
            chat: of it. Texts of the assistant's mention no images.
            number: as for `prompt`.
            encode: messages -> sequences, as `ChatTemplate.conversation` returns them.
            tokenizer: by which they are made.

        Raises:
            ValueError: as `prompt`, or an answer has a token of images.
            PictureError: as there.
        """
        messages, pictures = self.split({**row, "prompt": chat}, says="assistant")
        sequences = encode(messages)
        for tokens, mask in sequences:
            self.check_drawn(
                [t for t, sampled in zip(tokens, mask, strict=True) if sampled], tokenizer
            )
        return self._expand(sequences, pictures, row, number, tokenizer)

    def _expand(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[bool]]],
        pictures: Sequence[Picture],
        row: Mapping[str, Any],
        number: int,
        tokenizer: Any,
    ) -> list[Example]:
        """Put a placeholder for each feature; the last of the sequences shows all pictures."""
        if self.processor is None:
            return [Example(tuple(tokens), tuple(mask)) for tokens, mask in sequences]
        folder = row.folder if isinstance(row, FileRow) else Path()
        shapes = self.shapes(pictures, folder)
        counts = [shape.tokens for shape in shapes]
        place = folder, row_name(number, row), number
        made = []
        for tokens, mask in sequences:
            is_last = len(made) == len(sequences) - 1
            grown, shown = self.processor.placeholders.expand_between(
                tokens, mask, shapes, tokenizer, all_shown=is_last
            )
            load = RowPictures(self.processor, pictures[:shown], *place, counts[:shown])
            made.append(Example(*grown, load if shown else None))
        return made

    def check_drawn(self, tokens: Sequence[int], tokenizer: Any) -> None:
        """Refuse to learn the tokens of images, which have no probability.

        Args:
            tokens: that the model is to draw.
            tokenizer: by which they are made.

        Raises:
            ValueError: one stands for images, or beside them.
        """
        never = frozenset() if self.processor is None else self.processor.placeholders.ids
        if drawn := never.intersection(tokens):
            names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(drawn)))
            raise ValueError(
                f"an answer: expected text alone, got {names}: a model that reads images never "
                "writes them"
            )

    def split(
        self, row: Mapping[str, Any], *, says: str | None = None
    ) -> tuple[list[dict[str, Any]], list[Picture]]:
        """Return a row's messages, in which typed parts mention pictures, and the pictures.

        Args:
            row: with `prompt`, and images and videos in their columns or in parts of messages.
            says: a role whose texts stay as they are.

        Raises:
            ValueError: more or fewer are mentioned than there are, or the model reads none.
        """
        columns: dict[Media, Column] = {
            "image": Column.of(row, self.image_key),
            "video": Column.of(row, self.video_key),
        }
        pictures: list[Picture] = []
        messages = [
            {**message} if message["role"] == says else _with_parts(message, columns, pictures)
            for message in row["prompt"]
        ]
        for media, column in columns.items():
            if column.mentioned != len(column.sources):
                raise ValueError(
                    f"expected as many {media}s in the column {column.name!r} as the "
                    f"prompt mentions, got {len(column.sources)} and {column.mentioned}"
                )
        if pictures and self.processor is None:
            raise ValueError(
                f"it has {len(pictures)} images or videos, but the model is loaded for "
                "text alone: set model.vision (vision of an evaluation), or remove them"
            )
        return messages, pictures

    def shapes(self, pictures: Sequence[Picture], folder: Path) -> list[Shape]:
        """Return the shapes of pictures, of which only headers are read.

        Args:
            pictures: of a row.
            folder: where relative paths begin.

        Raises:
            PictureError: one can't be used.
        """
        assert self.processor is not None, "`split` has refused rows with pictures"
        read = {"image": self.processor.image_shape, "video": self.processor.video_shape}
        return [_named(read[p.media], p, folder) for p in pictures]


@dataclass
class Column:
    """The images, or the videos, of a row.

    Attributes:
        name: of the column.
        sources: what it holds.
        is_there: whether the row has it: a row without it may say `<image>` as plain text.
        mentioned: how many of its items messages have mentioned so far.
    """

    name: str
    sources: Sequence[Any]
    is_there: bool
    mentioned: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any], name: str) -> "Column":
        """Return a row's column; one image alone may stand without a list."""
        value = row.get(name)
        listed = value if isinstance(value, list | tuple) else [] if value is None else [value]
        return cls(name, listed, value is not None)

    def take(self, media: Media) -> Picture:
        """Return the next item; one that is not there is counted, too."""
        number = self.mentioned
        self.mentioned += 1
        source = self.sources[number] if number < len(self.sources) else None
        return Picture(media, source, f"{self.name}[{number}]")


def _add(digest: Any, source: Any, folder: Path) -> None:
    """Add what a row holds of a picture to a digest."""
    if isinstance(source, Mapping):
        for key in sorted(source):
            digest.update(key.encode())
            _add(digest, source[key], folder)
    elif isinstance(source, list | tuple):
        for item in source:
            _add(digest, item, folder)
    elif isinstance(source, str | Path):
        digest.update(str(source).encode())
        if not str(source).startswith("data:") and (folder / source).is_file():
            digest.update(str((folder / source).stat().st_size).encode())
    elif isinstance(source, Image.Image):  # which may not be decoded yet
        digest.update(f"{source.mode} {source.size}".encode())
    elif isinstance(source, bytes | bytearray | memoryview | np.ndarray):
        digest.update(bytes(source))
    else:  # a number, as of frames a second
        digest.update(repr(source).encode())


def _named(read: Callable[..., Any], picture: Picture, folder: Path) -> Any:
    try:
        return read(picture.source, folder=folder)
    except PictureError as error:
        raise PictureError(f"field {picture.name!r}: {error}") from error


def _with_parts(
    message: Mapping[str, Any], columns: Mapping[Media, Column], pictures: list[Picture]
) -> dict[str, Any]:
    """Return a message with typed parts where it mentions pictures, which are added to the list."""
    content = message.get("content")
    if isinstance(content, str):
        if not any(f"<{m}>" in content and column.is_there for m, column in columns.items()):
            return dict(message)
        content = [*_parts_of_text(content, columns)]
    elif not isinstance(content, list):
        return dict(message)
    parts = [_part(part, columns, pictures) for part in content]
    return {**message, "content": parts}


def _parts_of_text(text: str, columns: Mapping[Media, Column]) -> Iterator[dict[str, Any]]:
    for piece in MARK.split(text):
        media: Any = piece[1:-1]
        if media in columns and columns[media].is_there:
            yield {"type": media}
        elif piece:
            yield {"type": "text", "text": piece}


def _part(
    part: Mapping[str, Any], columns: Mapping[Media, Column], pictures: list[Picture]
) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    media: Media = "video" if kind == "video" else "image"
    source = part.get(media)
    if kind == "image_url":
        source = part["image_url"]
        source = source.get("url") if isinstance(source, Mapping) else source
    if source is None:
        pictures.append(columns[media].take(media))
    else:
        if media == "video" and isinstance(source, list | tuple):
            rates = {k: part[k] for k in ("fps", "sample_fps") if part.get(k) is not None}
            source = {"frames": source, **rates}
        pictures.append(Picture(media, source, f"prompt: {media} {len(pictures)}"))
    return {"type": media}


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt with all that a reward function may want to know about it.

    Attributes:
        index: the row's position in the dataset, counted from 0.
        tokens: token ids.
        data_source: by which a reward function knows what is asked.
        ground_truth: the reference answer.
        extra_info: more about the row.
        messages: the chat, if it is one.
        tools: schemas of the row's tools, which the chat template shows.
        visuals: images and videos of the chat, in the order of their placeholder tokens.
        load: decodes them; None: there are none, or they are decoded.
    """

    index: int
    tokens: tuple[int, ...]
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    visuals: tuple[Visual, ...] = ()
    load: RowPictures | None = field(default=None, compare=False, repr=False)

    def loaded(self) -> "Prompt":
        """Return the prompt with its images and videos decoded.

        Raises:
            RowError: one is damaged.
        """
        return self if self.load is None else replace(self, visuals=self.load(), load=None)


def load_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts with their images and videos decoded, several at a time.

    Raises:
        RowError: one is damaged.
    """
    if not any(prompt.load for prompt in prompts):
        return list(prompts)
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as threads:
        return list(threads.map(Prompt.loaded, prompts))


PromptLike: TypeAlias = Prompt | str | Sequence[Message] | Sequence[int]
"""A prompt, a text that is a chat's only message, the messages of a chat, or token ids."""


def tokenize_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    filter_overlong: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    encode: Callable[..., Sequence[int]] | None = None,
    visuals: RowVisuals | None = None,
    vocab_size: int | None = None,
) -> tuple[list[Prompt], int]:
    """Tokenize rows through the chat template.

    Args:
        rows: checked rows in verl's schema.
        tokenizer: with a chat template.
        max_prompt_tokens: the longest prompt allowed, in tokens.
        filter_overlong: drop longer prompts (counted and logged) instead of refusing them.
        template_kwargs: variables for the chat template.
        encode: (messages, tools of the row) -> token ids, instead of the chat template with these
            variables.
        visuals: reads the rows' images and videos; None: rows that have some are refused.
        vocab_size: of the model, whose token ids are below it; None: they are not compared.

    Returns:
        The prompts, whose images are not decoded yet, and how many rows were dropped.

    Raises:
        RowError: of rows, a prompt is too long and `filter_overlong` is off, the chat template does
            not fit, an image can't be used, or the model does not have a token.
        ValueError: no prompt is left.

    >>> from jaxrl_llm.data.chat import load_tokenizer
    >>> tokenizer = load_tokenizer("configs/quickstart")
    >>> chat = [{"role": "user", "content": "12"}]
    >>> row = {"prompt": chat, "data_source": "sums", "reward_model": {"ground_truth": "3"}}
    >>> prompts, dropped = tokenize_prompts([row], tokenizer, max_prompt_tokens=9)
    >>> tokenizer.decode(prompts[0].tokens), dropped
    ('<|user|>12<|end|><|assistant|>', 0)
    """
    encode = encode or ChatTemplate(tokenizer, template_kwargs).prompt
    visuals = visuals or RowVisuals()

    def tokenized(index: int, row: Row) -> Prompt | None:
        tools = row.get("tools") or []
        with_tools = functools.partial(encode, tools=tools)
        messages, tokens, load = visuals.prompt(row, index, with_tools, tokenizer)
        if not fits(len(tokens), max_prompt_tokens, "max_prompt_tokens", filter_overlong, load):
            return None
        check_ids(tokens, vocab_size, tokenizer)
        about = row["data_source"], row["reward_model"]["ground_truth"], row.get("extra_info") or {}
        return Prompt(index, tuple(tokens), *about, messages, tools, load=load)

    prompts = [prompt for prompt in map_rows(tokenized, rows) if prompt is not None]
    return prompts, count_dropped(len(rows), len(prompts), "max_prompt_tokens", max_prompt_tokens)


def as_prompts(
    prompts: Sequence[PromptLike],
    tokenizer: Tokenizer,
    *,
    vocab_size: int | None = None,
    **template_kwargs: Any,
) -> list[Prompt]:
    """Return tokenized prompts, from any of the forms that a prompt may have.

    Args:
        prompts: each a `Prompt`, a text that is a chat's only message, the messages of a chat, or
            token ids, which are taken as they are.
        tokenizer: with a chat template, if a prompt is a text or a chat.
        vocab_size: as for `tokenize_prompts`.
        **template_kwargs: variables for the chat template.

    Raises:
        RowError: a prompt is empty, the chat template does not fit, or the model does not have a
            token.

    >>> from jaxrl_llm.data.chat import load_tokenizer
    >>> tokenizer = load_tokenizer("configs/quickstart")
    >>> [tokenizer.decode(prompt.tokens) for prompt in as_prompts(["12", [16, 17]], tokenizer)]
    ['<|user|>12<|end|><|assistant|>', '12']
    """
    template = functools.cache(lambda: ChatTemplate(tokenizer, template_kwargs))

    def made(index: int, prompt: PromptLike) -> Prompt:
        one = _as_prompt(index, prompt, template)
        check_ids(one.tokens, vocab_size, tokenizer)
        return one

    return map_rows(made, prompts, name=lambda index, _: f"prompt {index}")


def _as_prompt(index: int, prompt: Any, template: Callable[[], ChatTemplate]) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    is_text = isinstance(prompt, str)
    chat: list[Any] = [{"role": "user", "content": prompt}] if is_text else list(prompt)
    if not chat:
        raise ValueError(f"expected a text, messages or token ids, got {prompt!r}")
    if not isinstance(chat[0], Mapping):
        return Prompt(index, tuple(map(operator.index, chat)))
    chat = normalize_messages([*map(dict, chat)], "messages", parts=True)
    return Prompt(index, tuple(template().prompt(chat)), messages=chat)


def tokenize_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    filter_overlong: bool = False,
    train_on: Literal["all", "last"] = "all",
    template_kwargs: Mapping[str, Any] | None = None,
    visuals: RowVisuals | None = None,
    vocab_size: int | None = None,
) -> tuple[list[Example], int]:
    """Tokenize supervised rows: conversations, or prompts with a response.

    An answer is what `ChatTemplate.conversation` says. A conversation is one example, or several
    where the template rewrites earlier answers when more follows; each answer is trained once.

    Args:
        rows: checked supervised rows.
        tokenizer: with a chat template.
        max_tokens: the longest example allowed, in tokens.
        filter_overlong: drop longer examples (counted and logged) instead of refusing them.
        train_on: which answers of a conversation are trained: all, or the last one.
        template_kwargs: variables for the chat template.
        visuals: as for `tokenize_prompts`.
        vocab_size: as there.

    Returns:
        The examples, and how many were dropped.

    Raises:
        RowError: as there, or an answer has a token of images.
        ValueError: as there.

    >>> from jaxrl_llm.data.chat import load_tokenizer
    >>> tokenizer = load_tokenizer("configs/quickstart")
    >>> row = {"prompt": [{"role": "user", "content": "1+1="}], "response": "2"}
    >>> (example,), _ = tokenize_examples([row], tokenizer, max_tokens=9)
    >>> tokenizer.decode([t for t, sampled in zip(example.tokens, example.mask) if sampled])
    '2<|end|>'
    """
    template, visuals = ChatTemplate(tokenizer, template_kwargs), visuals or RowVisuals()

    def tokenized(index: int, row: Row) -> list[Example | None]:
        chat = row.get("messages")
        encode = functools.partial(
            template.conversation,
            tools=row.get("tools") or (),
            last_only=chat is None or train_on == "last",
        )
        chat = [*row["prompt"], as_answer(row["response"])] if chat is None else chat
        made = []
        for one in visuals.conversation(row, chat, index, encode, tokenizer):
            check_ids(one.tokens, vocab_size, tokenizer)
            is_short = fits(len(one.tokens), max_tokens, "max_tokens", filter_overlong, one.load)
            made.append(one if is_short else None)
        return made

    made = [example for of_row in map_rows(tokenized, rows) for example in of_row]
    examples = [example for example in made if example is not None]
    return examples, count_dropped(len(made), len(examples), "max_tokens", max_tokens)


def as_answer(answer: str | Message) -> Message:
    """Return an answer as the assistant's message."""
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


def fits(
    length: int, limit: int, name: str, filter_overlong: bool, load: RowPictures | None = None
) -> bool:
    """Return whether a row is short enough; raise ValueError unless longer ones are dropped."""
    if length > limit and not filter_overlong:
        images = f" ({sum(load.tokens)} are of images: lower data.max_pixels)" if load else ""
        raise ValueError(
            f"expected at most {name}={limit} tokens, got {length}; raise it, or set "
            f"filter_overlong to drop such rows{images}"
        )
    return length <= limit


def check_ids(
    tokens: Sequence[int] | np.ndarray, vocab_size: int | None, tokenizer: Any = None
) -> None:
    """Raise ValueError for a token id that a model does not have, whose embedding would be zeros.

    Args:
        tokens: ids.
        vocab_size: of the model; None: any id may be.
        tokenizer: that has made them; None: it is not known.

    >>> check_ids([3, 9], 8)
    Traceback (most recent call last):
    ValueError: token id 9 is not in the model's vocabulary of 8: resize its embedding, or use the \
model's own tokenizer
    """
    ids = np.asarray(tokens)
    if vocab_size is None or not (beyond := (ids < 0) | (ids >= vocab_size)).any():
        return
    token = int(ids[beyond][0])
    known = token >= 0 and hasattr(tokenizer, "convert_ids_to_tokens")
    text = f" ({tokenizer.convert_ids_to_tokens(token)!r})" if known else ""
    raise ValueError(
        f"token id {token}{text} is not in the model's vocabulary of {vocab_size}: resize its "
        "embedding, or use the model's own tokenizer"
    )


def count_dropped(rows: int, kept: int, name: str, limit: int) -> int:
    """Return how many rows were dropped, and log it; raise ValueError where none is left."""
    if not rows:
        raise ValueError("dataset: expected rows, got a file without any")
    if not kept:
        raise ValueError(f"dataset: none of {rows} rows is left under {name}={limit}")
    if kept < rows:
        log.warning("dropped %d of %d rows longer than %s=%d", rows - kept, rows, name, limit)
    return rows - kept


def batches(
    items: Sequence[Any],
    *,
    batch_size: int,
    seed: int,
    shuffle: bool = True,
    epochs: int | None = None,
    drop_remainder: bool = False,
) -> Any:
    """Iterate over lists of items, epoch after epoch, from a position that can be saved.

    Every item comes exactly once per epoch; each epoch has its own order, fixed by `seed`. A batch
    may span the border of two epochs. `get_state()` gives the position as a small JSON-able dict
    and `set_state()` returns to it exactly.

    Args:
        items: prompts, examples, or indices.
        batch_size: items per batch.
        seed: of the shuffle, in [0, 2³²).
        shuffle: False keeps the order of `items`.
        epochs: how often to go through the items; None never ends.
        drop_remainder: with finite epochs, leave out a last batch that is not full.

    Returns:
        A `grain.DatasetIterator`.

    Raises:
        ValueError: no items; a batch size or an epoch count below one; a seed out of range; every
            batch would be dropped.

    >>> list(batches("abcde", batch_size=2, seed=0, shuffle=False, epochs=2))
    [['a', 'b'], ['c', 'd'], ['e', 'a'], ['b', 'c'], ['d', 'e']]
    """
    if not items:
        raise ValueError("batches: expected one item or more, got none")
    if batch_size < 1 or (epochs is not None and epochs < 1):
        raise ValueError(
            f"batches: expected at least 1 each, got batch_size={batch_size}, epochs={epochs}"
        )
    if not 0 <= seed < 2**32:
        raise ValueError(f"batches: expected 0 <= seed < 2**32, got {seed}")
    if drop_remainder and epochs is not None and len(items) * epochs < batch_size:
        raise ValueError(
            f"batches: {len(items)} items for {epochs} epochs never fill a batch of {batch_size}"
        )
    import grain

    dataset = grain.MapDataset.source(items)
    if shuffle:
        dataset = dataset.shuffle(seed=seed)
    drop_remainder |= epochs is None  # there is none; grain would count the batches
    dataset = dataset.repeat(epochs).batch(batch_size, drop_remainder=drop_remainder, batch_fn=list)
    # The items are in memory: reading them needs no threads.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


# Preferences: tokenized pairs, labelled answers and labelled steps, and batches of them.
#
# A pair is packed as one sequence, in which the rejected answer follows the chosen one as a segment
# of its own, so that both are always in the same micro-batch.


def encode_steps(
    tokenizer: Tokenizer, steps: Sequence[str], separator: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Encode steps, each alone, with the separator behind it.

    So no token spans the border of two steps, and what is scored is always the same token.

    Args:
        tokenizer: of the process reward model.
        steps: their texts.
        separator: a text.

    Returns:
        The tokens of an answer, and the index of each step's last token, which is the separator's.

    Raises:
        ValueError: the separator has no tokens.

    >>> class Bytes:
    ...     eos_token_id = 0
    ...     def __call__(self, text, *, add_special_tokens):
    ...         return {"input_ids": list(text.encode())}
    ...     def get_chat_template(self): return ""
    ...     def apply_chat_template(self, conversation, **kwargs): return []
    >>> encode_steps(Bytes(), ["a", "bc"], "\\n")
    ((97, 10, 98, 99, 10), (1, 4))
    """
    behind = tokenizer(separator, add_special_tokens=False)["input_ids"]
    if not behind:
        raise ValueError(f"steps: the tokenizer has no token for the separator {separator!r}")
    tokens: list[int] = []
    ends = []
    for step in steps:
        tokens += [*tokenizer(step, add_special_tokens=False)["input_ids"], *behind]
        ends.append(len(tokens) - 1)
    return tuple(map(int, tokens)), tuple(ends)


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    r"""Cut an answer into steps; return each with where it ends in the text.

    A step ends behind its separator, the last one at the end of the text. Blank ones are none;
    where all are blank, the answer is one empty step.

    Args:
        text: of the answer.
        separator: that ends a step.

    >>> split_steps("1+1=2\n\n2*2=4\n", "\n")
    [('1+1=2', 6), ('2*2=4', 13)]
    >>> split_steps("\n", "\n")
    [('', 1)]
    """
    steps, at = [], 0
    for part in text.split(separator):
        end = min(at + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((part, end))
        at = end
    return steps or [("", len(text))]


def last_tokens(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], ends: Sequence[int]
) -> list[int]:
    """Return the index of the token with which the text of an answer reaches each of its ends.

    Args:
        decode: from token ids to the text in which the ends are.
        tokens: of the answer.
        ends: lengths of the text, in letters, in rising order. The last one is that of the whole
            text, whose last token is the answer's, a token that stopped it included.

    >>> last_tokens(lambda ids: "".join("ab\\n"[i] for i in ids), [0, 2, 1, 1], [2, 4])
    [1, 3]
    """
    places = []
    for end in ends[:-1]:
        low, high = 0, len(tokens) - 1
        while low < high:
            middle = (low + high) // 2
            if len(decode(tokens[: middle + 1])) >= end:
                high = middle
            else:
                low = middle + 1
        places.append(low)
    return [*places, len(tokens) - 1]


@dataclass(frozen=True)
class Preference:
    """A tokenized pair, or a tokenized answer that has a label, or one for each of its steps.

    Attributes:
        prompt: tokens of the prompt.
        answers: tokens of the chosen and the rejected answer, or of the one that has a label.
        columns: numbers for the loss: margins, labels, log-probs under a reference.
        step_ends: index of each step's last token in the answer, where steps have labels.
        step_labels: of each step, from 0 to 1.
    """

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    columns: Mapping[str, float | bool] = field(default_factory=dict)
    step_ends: tuple[int, ...] = ()
    step_labels: tuple[float, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the sequences behind each other, as they are packed."""
        return tuple(token for answer in self.answers for token in (*self.prompt, *answer))

    @property
    def is_pair(self) -> bool:
        """Return whether there are two answers."""
        return len(self.answers) == 2


def tokenize_preferences(
    rows: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    filter_overlong: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    step_separator: str = "\n",
    vocab_size: int | None = None,
) -> tuple[list[Preference], int]:
    """Tokenize rows: the templated prompt, and each answer to the token that ends its turn.

    An answer is what the chat template writes behind the prompt; see `ChatTemplate.answer`. One
    with labelled steps is its text alone, with the separator behind each step.

    Args:
        rows: as `normalize_preference_row` returns them, all of one kind.
        tokenizer: with a chat template.
        max_tokens: the longest prompt plus answer, in tokens.
        filter_overlong: drop rows with a longer answer (counted and logged) instead of refusing
            them.
        template_kwargs: variables for the chat template.
        step_separator: what is put behind each step.
        vocab_size: of the model, whose token ids are below it; None: they are not compared.

    Returns:
        The preferences, and how many rows were dropped.

    Raises:
        RowError: of rows, an answer is too long and `filter_overlong` is off, the chat template
            does not fit, a step holds the separator, or the model does not have a token.
        ValueError: rows of several kinds; none is left; only some of the rows bring log-probs under
            a reference.
    """
    template = ChatTemplate(tokenizer, template_kwargs)
    _check_alike(rows)

    def tokenized(_: int, row: Row) -> Preference | None:
        item = _tokenize(row, template, step_separator)
        check_ids(item.tokens, vocab_size, tokenizer)
        longest = len(item.prompt) + max(map(len, item.answers))
        return item if fits(longest, max_tokens, "max_tokens", filter_overlong) else None

    made = [item for item in map_rows(tokenized, rows) if item is not None]
    return made, count_dropped(len(rows), len(made), "max_tokens", max_tokens)


def _tokenize(row: Row, template: ChatTemplate, step_separator: str) -> Preference:
    chat, tools = row["prompt"], row.get("tools") or ()
    if "completions" in row:
        for number, step in enumerate(row["completions"]):
            if step_separator in step:  # an answer's text would be cut there
                raise ValueError(
                    f"completions[{number}] holds data.step_separator={step_separator!r}, "
                    "which ends a step: expected the text of one step without it"
                )
        tokens, ends = encode_steps(template.tokenizer, row["completions"], step_separator)
        prompt = template.prompt(chat, tools)
        return Preference(tuple(prompt), (tokens,), {}, ends, tuple(row["labels"]))
    names = [name for name in ("chosen", "rejected", "response") if name in row]
    prompt, answers = template.answers(chat, [as_answer(row[name]) for name in names], tools)
    return Preference(tuple(prompt), tuple(map(tuple, answers)), _columns(row))


def preference_batch(preferences: Sequence[Preference], width: int) -> Batch:
    """Lay preferences out as a batch [P W], each pair as one sequence.

    Its fields: `mask`, true on the answers; of pairs `second_start`, where the rejected answer's
    prompt begins; and the columns. Where steps have labels, `mask` is true on the last token of
    each, and `step_labels` [P W] has its label there.

    Args:
        preferences: all of one kind.
        width: W, at least the longest.
    """
    tokens = np.zeros((len(preferences), width), np.int32)
    mask = np.zeros(tokens.shape, bool)
    labels = np.zeros(tokens.shape, np.float32)
    starts = np.zeros(len(preferences), np.int32)
    for i, preference in enumerate(preferences):
        tokens[i, : len(preference.tokens)] = preference.tokens
        at = 0
        for answer in preference.answers:
            starts[i] = at
            at += len(preference.prompt)
            mask[i, at : at + len(answer)] = not preference.step_ends
            at += len(answer)
        ends = len(preference.prompt) + np.array(preference.step_ends, np.int32)
        mask[i, ends], labels[i, ends] = True, preference.step_labels
    sizes = np.array([len(p.tokens) for p in preferences], np.int32)
    fields: dict[str, np.ndarray] = {"mask": mask}
    if preferences[0].is_pair:
        fields["second_start"] = starts
    if preferences[0].step_ends:
        fields["step_labels"] = labels
    for name in preferences[0].columns:
        kind = bool if name == "labels" else np.float32
        fields[name] = np.array([p.columns[name] for p in preferences], kind)
    return Batch(tokens, sizes, fields)


def rotate_answers(preferences: Sequence[Preference], max_tokens: int) -> list[Preference]:
    """Give each prompt the answer of the next row, cut to what fits, for KTO's baseline.

    >>> rows = [Preference((1,), ((2, 3),)), Preference((4,), ((5, 6, 7),))]
    >>> [p.tokens for p in rotate_answers(rows, 3)]
    [(1, 5, 6), (4, 2, 3)]
    """
    following = [*preferences[1:], preferences[0]]
    return [
        Preference(p.prompt, (other.answers[0][: max_tokens - len(p.prompt)],), p.columns)
        for p, other in zip(preferences, following, strict=True)
    ]


def _columns(row: dict[str, Any]) -> dict[str, float | bool]:
    columns: dict[str, float | bool] = {n: row[n] for n in REFERENCE_COLUMNS if n in row}
    if "margin" in row:
        columns["margins"] = row["margin"]
    if "label" in row:
        columns["labels"] = row["label"]
    return columns


def _check_alike(rows: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless all rows have the columns of the first one."""
    for index, row in enumerate(rows):
        for name in ("chosen", "label", "completions", "margin", *REFERENCE_COLUMNS):
            if (name in row) != (name in rows[0]):
                names = row_name(index, row), row_name(0, rows[0])
                having, missing = names if name in row else names[::-1]
                raise ValueError(
                    f"{having} has {name!r}, {missing} has not: expected it in all rows or in none"
                )
