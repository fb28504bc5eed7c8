"""Placeholder tokens: one per image in a chat template's text, one per feature in a prompt.

What comes out is what the processors of `transformers` make, which expand the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.data.visuals.resizing import KINDS, Shape, read_model_config
from jaxrl_llm.models.vision.inputs import Visual
from jaxrl_llm.models.vision.spec import TowerKind

NAMES = {
    "image_id": ("image_token_id", "image_token_index"),
    "video_id": ("video_token_id",),
    "start_id": ("vision_start_token_id", "boi_token_id", "boi_token_index"),
    "end_id": ("vision_end_token_id", "eoi_token_id", "eoi_token_index"),
}
"""Under which names config.json has a token."""


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
