"""The axis legend and the records that cross module borders.

Axes: P prompts, G samples per prompt, B = P·G sequences, T tokens, R packed rows, L row length,
V vocabulary, D model width, N query heads, K key/value heads, H head width, F feed-forward width,
E experts.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Num

from jaxrl_llm.models.inputs import PatchRows, Visual, VisualFeatures

ROUTES = "routes"
"""Name of a batch's recorded choices of experts [B T M top], which rows hold for the model."""

VISUALS = "visuals"
"""Name of a batch's images and videos: an array [B] of tuples of `Visual`."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of a step, on the host: prompt and answer side by side, padded to T.

    Attributes:
        tokens: token ids, prompt first, padding last.
        sequence_lengths: tokens in each sequence, the prompt's included.
        fields: arrays [B] or [B T] by name; see `config.functions.FIELDS`. Where there are images
            or videos, `VISUALS` is one of objects.
    """

    tokens: Int[np.ndarray, "B T"]
    sequence_lengths: Int[np.ndarray, " B"]
    fields: Mapping[str, Num[np.ndarray, "B ..."] | np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a field."""
        return self.fields[name]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the fields that functions of arrays may be given: all but images and videos."""
        return {name: values for name, values in self.fields.items() if name != VISUALS}

    @property
    def visuals(self) -> list[tuple[Visual, ...]]:
        """Return the images and videos of each sequence [B], in the order of their tokens."""
        if VISUALS not in self.fields:
            return [()] * len(self.tokens)
        return [visuals or () for visuals in self.fields[VISUALS]]  # rows that fill up have none

    def add(self, **fields: Array | np.ndarray) -> "Batch":
        """Return the batch with more fields; those on devices are fetched."""
        added = {name: np.asarray(values) for name, values in fields.items()}
        return dataclasses.replace(self, fields={**self.fields, **added})

    def without(self, name: str) -> "Batch":
        """Return the batch less a field, if it has it."""
        fields = {key: values for key, values in self.fields.items() if key != name}
        return dataclasses.replace(self, fields=fields)

    def take(self, rows: Any) -> "Batch":
        """Return some of the sequences, by index array or slice."""
        fields = {name: values[rows] for name, values in self.fields.items()}
        return Batch(self.tokens[rows], self.sequence_lengths[rows], fields)


class VisualRows(NamedTuple):
    """Images and videos of packed rows, beside the rows' tokens.

    Attributes:
        numbers: for each token that of its feature, counted within the row; -1 for text.
        given: patches that a tower has to read, or the features of one that is not trained.
        rotary: time, height and width of each token, of a model that asks for them.
    """

    numbers: Int[Array | np.ndarray, "R L"]
    given: PatchRows | VisualFeatures
    rotary: Int[Array | np.ndarray, "R L 3"] | None = None


class Rows(NamedTuple):
    """Sequences packed into rows, for the model, and where each of them lies.

    Row tokens outside every sequence have segment 0. The b sequence slots that are not used have
    size 0. `scored` marks the places whose next token has to be scored; None: all of them. `routes`
    are the experts that tokens go to in each of M layers (`models.moe.routing.replay_routes`);
    None: routers choose. `visual` are images and videos, of a model that reads such.
    """

    tokens: Int[Array | np.ndarray, "R L"]
    positions: Int[Array | np.ndarray, "R L"]
    segment_ids: Int[Array | np.ndarray, "R L"]
    row: Int[Array | np.ndarray, " b"]
    start: Int[Array | np.ndarray, " b"]
    size: Int[Array | np.ndarray, " b"]
    scored: Bool[Array | np.ndarray, "R L"] | None = None
    routes: Int[Array | np.ndarray, "R L M top"] | None = None
    visual: VisualRows | None = None

    @property
    def places(self) -> tuple[Any, Any, Any]:
        """Return where each sequence lies: row, start and size, [b] each."""
        return self.row, self.start, self.size
