"""What the trainer and the engine ask of models that can do more than `Model` says."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.arrays import Declarations, Params
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.inputs import NO_INPUTS, RowInputs
from jaxrl_llm.models.layers import Router
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.models.vision.inputs import Visual, VisualFeatures
from jaxrl_llm.models.vision.rows import FrameBounds, PatchRows
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.sharding.layout import Layout


@runtime_checkable
class InputModel(Model, Protocol):
    """A model whose passes may be given more of rows than their tokens."""

    def hidden_states(
        self,
        params: Params,
        tokens: Int[Array, "R L"],
        positions: Int[Array, "R L"],
        segment_ids: Int[Array, "R L"],
        *,
        dtype: DTypeLike,
        remat: str,
        layout: Layout | None,
        inputs: RowInputs = NO_INPUTS,
    ) -> tuple[Float[Array, "R L D"], Router]:
        """Run the model as `Model.hidden_states` says, by what else the rows have.

        Args:
            params: As there.
            tokens: As there.
            positions: As there.
            segment_ids: As there.
            dtype: As there.
            remat: As there.
            layout: As there. Where several devices share a row, routes, the tokens' numbers of
                features and rotary positions are cut into pieces as tokens are; features stay
                whole.
            inputs: The `routes` to replay, of a `RoutedModel`; of a `VisionModel` the `visual`
                tokens, and the `rotary` positions of all.

        Returns:
            As there. With routes, the statistics also count which of them the routers would not
            have chosen, and `experts` [M R L top] are those that tokens went to, unless stages hold
            the layers.
        """
        ...


@runtime_checkable
class RoutedModel(InputModel, Protocol):
    """A mixture of experts whose choices a cache can record, and a pass replay.

    A cache that with a `models.moe.record.Record` holds the experts that each token went to.
    """

    @property
    def route_shape(self) -> RouteShape | None:
        """What is recorded of each token; None: there are no experts."""
        ...


@runtime_checkable
class VisionModel(InputModel, Protocol):
    """A model that reads images and videos, if it has a tower.

    A prompt holds a placeholder token for each token of an image or a video. `encode_visuals` says
    what stands in place of their embeddings, and `rotary_positions` where all of its tokens are.
    """

    @property
    def vision(self) -> VisionSpec | None:
        """The tower, and the ids of placeholder tokens; None: the model reads text alone."""
        ...

    @property
    def has_rotary_positions(self) -> bool:
        """Whether passes are to be given what `rotary_positions` returns."""
        ...

    @property
    def attends_within_images(self) -> bool:
        """Whether tokens of an image attend to all others of it: `extend` must read it whole."""
        ...

    def rotary_positions(
        self, tokens: Int[np.ndarray, " T"], visuals: Sequence[Visual]
    ) -> tuple[Int[np.ndarray, "T 3"], int]:
        """Return where each token of a prompt is; see `models.vision.positions`."""
        ...

    def encode_visuals(
        self,
        params: Params,
        patches: PatchRows,
        *,
        dtype: DTypeLike,
        remat: str,
        layout: Layout | None,
        bounds: FrameBounds,
    ) -> VisualFeatures:
        """Run the tower over rows of patches.

        Args:
            params: Of the whole model.
            patches: The rows.
            dtype: Of the computation.
            remat: As for `hidden_states`.
            layout: How rows are split over a mesh; None leaves it to the compiler.
            bounds: What is known of the frames of all rows.

        Returns:
            Features of the tokens, in the order of each row's visuals.
        """
        ...

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        *,
        dtype: DTypeLike,
        layout: Layout | None,
        inputs: RowInputs = NO_INPUTS,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Run the next tokens as `Model.extend` says, with features in place of embeddings.

        Args:
            params: As there.
            cache: As there.
            tokens: As there.
            positions: As there; they say in which slots tokens lie.
            dtype: As there.
            layout: As there.
            inputs: As for `hidden_states`, of these tokens. The rotary position of a token after
                its prompt is its position and the offset that `rotary_positions` returned.

        Returns:
            As there.
        """
        ...


@runtime_checkable
class QuantizableModel(Model, Protocol):
    """A model whose matrices the engine can also hold in float8."""

    def declare_quantized(self) -> Declarations:
        """Declare the arrays that `extend` takes in float8, in place of those that it replaces.

        A matrix [in… out…] is replaced by a `QuantizedMatrix` of two declarations, of its values
        and its scales.
        """
        ...
