"""What the messages of an episode hold: texts that are cut, images and videos that are read once.

A message shows an image by a part `{"type": "image", "key": …}`, a video by one of the type
`video`: the key is that of its `Visual` in hexadecimal digits, so that messages stay plain and
short. What others tell has the picture itself in the part, as `{"type": "image", "image": …}`.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from jaxrl_llm.data.call_formats import count_common
from jaxrl_llm.data.visuals.pictures import PictureError
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.models.inputs import Visual
from jaxrl_llm.rollout.engine import EpisodeLimits

CUT = " ... "
IMAGES_SHARE = "a sequence's share of batch.max_visual_tokens_per_device"


class BrokenEpisode(Exception):
    """An episode that failed for no fault of the policy's."""


class Stretch(NamedTuple):
    """Tokens that are told together.

    Attributes:
        tokens: token ids.
        visuals: images and videos whose placeholders they hold, in order.
    """

    tokens: tuple[int, ...] = ()
    visuals: tuple[Visual, ...] = ()

    @property
    def visual_tokens(self) -> int:
        """Return how many of the tokens stand for images and videos."""
        return sum(visual.tokens for visual in self.visuals)

    def beyond(self, stream: "Stretch", tokenizer: Any) -> "Stretch":
        """Return what a stream, with which this begins, does not have yet.

        Raises:
            BrokenEpisode: it begins otherwise.
        """
        same = count_common(self.tokens, stream.tokens)
        if same < len(stream.tokens):
            got, own = (tokenizer.decode(s.tokens[same : same + 8]) for s in (self, stream))
            raise BrokenEpisode(
                f"chat.generate_after: got {len(self.tokens)} tokens that differ from the stream "
                f"of {len(stream.tokens)} from token {same} on: {got!r}, expected {own!r}"
            )
        shown = count_common(*([visual.key for visual in s.visuals] for s in (self, stream)))
        if shown < len(stream.visuals):
            raise BrokenEpisode(
                f"chat.generate_after: got {len(self.visuals)} images and videos, of which the "
                f"first {shown} are those of the stream; expected all of its "
                f"{len(stream.visuals)}, and new ones behind them"
            )
        return Stretch(self.tokens[same:], self.visuals[shown:])


def check_prompt(prompt: Stretch, limits: EpisodeLimits, part: str) -> None:
    """Refuse a prompt that has no room in an episode.

    Args:
        prompt: its tokens, images and videos.
        limits: of the episode.
        part: what of it is counted, for messages.

    Raises:
        BrokenEpisode: its tokens, or those of its images and videos, are too many.
    """
    bounded = (
        ("tokens", len(prompt.tokens), limits.prompt_tokens, "data.max_prompt_tokens"),
        ("tokens of images and videos", prompt.visual_tokens, limits.visual_tokens, IMAGES_SHARE),
    )
    for counted, count, most, key in bounded:
        if most is not None and count > most:
            raise BrokenEpisode(
                f"the prompt has {count} {counted} {part}, expected at most {most} ({key})"
            )


class MessageContents:
    """Reads the contents of one episode's messages.

    Args:
        tokenizer: the policy's.
        processor: of images and videos; None: the policy reads text alone.
    """

    def __init__(self, tokenizer: Any, processor: VisualProcessor | None = None) -> None:
        """Know no image yet."""
        self._tokenizer, self.processor = tokenizer, processor
        self._known: dict[str, Visual] = {}

    def named(
        self, messages: Sequence[Mapping[str, Any]], visuals: Sequence[Visual]
    ) -> list[dict[str, Any]]:
        """Return messages whose parts name the images and videos that they show.

        Args:
            messages: with parts that show something, in the order of the visuals.
            visuals: one for each such part.

        Raises:
            BrokenEpisode: there are more or fewer parts.
        """
        parts = sum(1 for _ in shown_parts(messages))
        if parts != len(visuals):
            raise BrokenEpisode(
                f"got {len(visuals)} images and videos for {parts} parts of messages that show "
                "one, expected as many"
            )
        self._known |= {visual.key.hex(): visual for visual in visuals}
        left = iter(visuals)

        def name(part: Any) -> Any:
            return {"type": part["type"], "key": next(left).key.hex()} if is_shown(part) else part

        return [_with_parts(message, name) for message in messages]

    def take(self, message: Mapping[str, Any], limit: int) -> dict[str, Any]:
        """Return a message as it is told: its images read, its texts cut.

        Args:
            message: with `content`: a text, or parts of text, images and videos.
            limit: tokens of images, videos and texts together; images are never cut.

        Raises:
            BrokenEpisode: the policy reads no images, one can't be read, or they have more tokens.
        """
        parts = message["content"]
        if not isinstance(parts, list) or not any(map(is_shown, parts)):
            several = isinstance(parts, list)
            text = "\n".join(str(part["text"]) for part in parts) if several else str(parts)
            return {**message, "content": self._cut(text, limit)}
        told = _with_parts(message, self._read)
        left = limit - sum(visual.tokens for visual in self.visuals([told]))
        if left < 0:
            raise BrokenEpisode(
                f"the images of a message have {limit - left} tokens, expected at most {limit} "
                "(rollout.limits.observation_tokens); a lower data.max_pixels makes them smaller"
            )
        texts = sum(not is_shown(part) for part in parts)

        def cut(part: Any) -> Any:
            if is_shown(part):
                return part
            return {"type": "text", "text": self._cut(str(part["text"]), left // texts)}

        return _with_parts(told, cut)

    async def ready(self, content: Any) -> Any:
        """Return a message's content with its images read, in another thread: that takes a while.

        Args:
            content: a text, or parts.

        Raises:
            BrokenEpisode: as for `take`.
        """
        if not isinstance(content, list):
            return content
        return await asyncio.to_thread(lambda: [self._read(part) for part in content])

    def visuals(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Visual, ...]:
        """Return the images and videos that messages show.

        Raises:
            BrokenEpisode: one of them was never told in this episode.
        """
        keys = [str(part.get("key")) for part in shown_parts(messages)]
        if unknown := [key for key in keys if key not in self._known]:
            raise BrokenEpisode(
                f"a message shows an image by the key {unknown[0]!r}, expected one of those that "
                "the episode's messages have shown"
            )
        return tuple(self._known[key] for key in keys)

    def told(self, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> Stretch:
        """Return what a template has written for messages, with the tokens of their images."""
        visuals = self.visuals(messages)
        return Stretch(tuple(self.expand(tokens, visuals)), visuals)

    def expand(self, tokens: Sequence[int], visuals: Sequence[Visual]) -> list[int]:
        """Return token ids with the tokens of the visuals in place of their placeholders.

        Raises:
            BrokenEpisode: the chat template has written more or fewer placeholders.
        """
        if self.processor is None:
            return list(tokens)
        try:
            return list(self.processor.placeholders.expand(tokens, visuals, self._tokenizer))
        except ValueError as error:
            raise BrokenEpisode(f"chat template: {error}") from error

    def _cut(self, text: str, tokens: int) -> str:
        """Return a text of at most so many tokens, its middle left out."""
        if len(text) <= tokens:  # a token has a character at least
            return text
        ids = self._ids(text)
        if len(ids) <= tokens:
            return text
        head, tail = tokens // 2, tokens - tokens // 2 - len(self._ids(CUT))
        decode = functools.partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        return decode(ids[:tokens]) if tail < 1 else decode(ids[:head]) + CUT + decode(ids[-tail:])

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def read(self, kind: str, source: Any) -> Visual:
        """Return an image or a video, which messages may show by its key from now on.

        Args:
            kind: `image` or `video`.
            source: in a form of `data.visuals`, but that of a path.

        Raises:
            BrokenEpisode: it can't be used, or the policy reads none.
        """
        shown = "an image" if kind == "image" else f"a {kind}"
        if self.processor is None:
            raise BrokenEpisode(
                f"a message shows {shown}, but the policy reads text alone: set model.vision, or "
                "let the agent, tool or environment tell a text"
            )
        try:
            read = self.processor.video if kind == "video" else self.processor.image
            visual = read(source)
        except PictureError as error:
            raise BrokenEpisode(f"a message shows {shown} that can't be used: {error}") from error
        self._known[visual.key.hex()] = visual
        return visual

    def with_pictures(
        self, messages: Sequence[Mapping[str, Any]], show: Callable[[Image.Image], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return messages with other parts in place of those that name images.

        Args:
            messages: of the chat.
            show: (image, as it was resized) -> the part.

        Raises:
            BrokenEpisode: one shows a video.
        """

        def shown(part: Any) -> Any:
            if not is_shown(part):
                return part
            (visual,) = self.visuals([{"content": [part]}])
            if visual.is_video or self.processor is None:
                raise BrokenEpisode("a message shows a video, expected images alone for this agent")
            return show(Image.fromarray(self.processor.pixels(visual)[0]))

        return [_with_parts(message, shown) for message in messages]

    def _read(self, part: Any) -> Any:
        """Return a part that names its image in place of holding it."""
        if not is_shown(part) or "key" in part:
            return part
        visual = self.read(part["type"], part.get(part["type"]))
        return {"type": part["type"], "key": visual.key.hex()}


def is_shown(part: Any) -> bool:
    """Tell whether a part of a message shows an image or a video.

    >>> is_shown({"type": "image"}), is_shown({"type": "text", "text": "Hi"})
    (True, False)
    """
    return isinstance(part, Mapping) and part.get("type") in ("image", "video")


def shown_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of messages that show something, in order."""
    for message in messages:
        content = message.get("content")
        yield from filter(is_shown, content if isinstance(content, list) else ())


def _with_parts(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = {"content": [change(part) for part in content]} if isinstance(content, list) else {}
    return {**message, **parts}
