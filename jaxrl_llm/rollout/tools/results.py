"""What comes of a call of a tool, or of a step of an environment."""

import base64
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import RunError


class ToolError(RunError):
    """Tools can't be run at all: no worker starts, the pool is closed, a journal is wrong."""


class ToolResult(NamedTuple):
    """What came of one call, or of one step of an environment.

    Attributes:
        name: of the tool; `environment` for a step.
        text: told to the model.
        reward: added to the reward of the turn that is answered.
        end: whether the episode ends here.
        failure: None; `failed`, `timeout` or `died`, of which the model is told; `broken` where the
            infrastructure failed, after all retries.
        score: what an environment returned at its end.
        seconds: that it took.
        images: told with the text: for each the place in it, in characters and in rising order, and
            the base64 of its file.
    """

    name: str
    text: str
    reward: float = 0.0
    end: bool = False
    failure: str | None = None
    score: float | None = None
    seconds: float = 0.0
    images: tuple[tuple[int, str], ...] = ()

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """What a message that tells it has as content: a text, or parts of text and images."""
        return [*self._parts()] if self.images else self.text

    def _parts(self) -> Iterator[dict[str, Any]]:
        ends = [*(place for place, _ in self.images), len(self.text)]
        start = 0
        for end, image in zip(ends, [*self.images, None], strict=True):
            if end > start:
                yield {"type": "text", "text": self.text[start:end]}
            if image is not None:
                yield {"type": "image", "image": base64.b64decode(image[1])}
            start = end


def checked_images(value: Any) -> tuple[tuple[int, str], ...] | None:
    """Return images as JSON has them in the form of `ToolResult`; None where they are none.

    >>> checked_images([[0, "aGk="]]), checked_images([[2, "aGk="], [1, "aGk="]])
    (((0, 'aGk='),), None)
    """
    if not isinstance(value, list) or not all(isinstance(item, list) for item in value):
        return None
    if any([type(part) for part in item] != [int, str] for item in value):
        return None
    places = [place for place, _ in value]
    if places != sorted(places) or min(places, default=0) < 0:
        return None
    try:
        for _, image in value:
            base64.b64decode(image, validate=True)
    except ValueError:
        return None
    return tuple((place, image) for place, image in value)
