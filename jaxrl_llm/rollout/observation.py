"""What tools and environments take and give. Worker processes import this: no array library."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Observation(NamedTuple):
    """What a tool or an environment answers; a text or an image alone may stand for it.

    Attributes:
        text: told to the model: a text, an image, or a list of texts and images in their order. An
            image is a PIL image, the bytes of a file of one, or an array of uint8 [H W 3].
        reward: added to the reward of the turn that it answers.
        end: whether the episode ends here.
    """

    text: Any = ""
    reward: float = 0.0
    end: bool = False


@dataclass(frozen=True)
class EpisodeRow:
    """The row of data that an episode is about.

    Attributes:
        index: the row's position in the data set, counted from 0.
        data_source: by which a function knows what is asked.
        ground_truth: the reference answer.
        extra_info: more about the row.
        messages: the chat.
    """

    index: int
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


class BrokenTool(Exception):
    """Raised by a tool or an environment whose infrastructure failed: it is not the model's fault.

    The call is tried again; then the episode is left out of its group's baseline and counted.
    """


class FailedTool(Exception):
    """Raised by a tool that could not do what it was asked for, to say so in its own words.

    The text is told to the model as it is, also where it is long; the call counts as failed.

    Args:
        text: told to the model.
        kind: of failure, by which they are counted.
    """

    def __init__(self, text: str, *, kind: str = "error") -> None:
        super().__init__(text)
        self.text, self.kind = text, kind
