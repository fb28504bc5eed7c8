"""Images and videos of rows: which ones, and where their messages mention them.

Messages do so by `<image>` and `<video>` in their texts (verl), or by typed parts (TRL, OpenAI).
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from jaxrl_llm.data.row_fields import FileRow, naming_row, row_name
from jaxrl_llm.data.visuals.pictures import PictureError
from jaxrl_llm.data.visuals.processor import Shape, VisualProcessor
from jaxrl_llm.models.inputs import Visual

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
            visuals = tuple(
                _named(functools.partial(read[p.media], folder=self.folder), p)
                for p in self.pictures
            )
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


class RowPrompt(NamedTuple):
    """What a row becomes.

    Attributes:
        messages: the chat, in which typed parts mention images and videos.
        tokens: of the chat.
        load: decodes the images and videos; None: there are none.
    """

    messages: list[dict[str, Any]]
    tokens: tuple[int, ...]
    load: RowPictures | None = None


class RowSequence(NamedTuple):
    """A sequence that a row's chat gives to train on.

    Attributes:
        tokens: of it.
        mask: of each token, whether it is an answer's.
        load: as of `RowPrompt`.
    """

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    load: RowPictures | None = None


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
    ) -> "RowPrompt":
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
        ((tokens, _, load),) = self._expand(
            [(tokens, [False] * len(tokens))], pictures, row, number, tokenizer
        )
        return RowPrompt(messages, tokens, load)

    def conversation(
        self,
        row: Mapping[str, Any],
        chat: Sequence[Mapping[str, Any]],
        number: int,
        encode: Callable[[Sequence[Mapping[str, Any]]], Sequence[tuple[list[int], list[bool]]]],
        tokenizer: Any,
    ) -> "list[RowSequence]":
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
    ) -> "list[RowSequence]":
        """Put a placeholder for each feature; the last of the sequences shows all pictures."""
        if self.processor is None:
            return [RowSequence(tuple(tokens), tuple(mask)) for tokens, mask in sequences]
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
            made.append(RowSequence(*grown, load if shown else None))
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
        return [_named(functools.partial(read[p.media], folder=folder), p) for p in pictures]


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


def _named(read: Any, picture: Picture) -> Any:
    try:
        return read(picture.source)
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
