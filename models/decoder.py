"""The decoder of a Hugging Face directory as a `Model`: the functions of `models` for one spec."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models import heads, parameters, quantization, transformer
from jaxrl_llm.models.arrays import Declarations, Params
from jaxrl_llm.models.cache import Cache, PageTables, init_cache
from jaxrl_llm.models.decoding import NextTokens, extend, extend_pages
from jaxrl_llm.models.gather import SplitMatrix
from jaxrl_llm.models.inputs import NO_INPUTS, PackedTokens, RowInputs
from jaxrl_llm.models.layers import Router
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.models.parameters import PRNGKey
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.inputs import Visual, VisualFeatures
from jaxrl_llm.models.vision.positions import rotary_positions
from jaxrl_llm.models.vision.rows import FrameBounds, PatchRows
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import encode
from jaxrl_llm.sharding.layout import Layout


@dataclass(frozen=True)
class Decoder:
    """The decoder that a `ModelSpec` describes, by the functions of `models`.

    It decodes by `ModelSpec.for_decoding`, whose parameters are the same.

    >>> decoder = Decoder(tiny_spec())
    >>> decoder.vocab_size, decoder.has_router, decoder == Decoder(tiny_spec())
    (8, False, True)
    """

    spec: ModelSpec

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.spec.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model was made for."""
        return self.spec.max_positions

    @property
    def logit_softcap(self) -> int | float | None:
        """What logits are capped at."""
        return self.spec.logit_softcap

    @property
    def has_router(self) -> bool:
        """Whether there are experts."""
        return self.spec.moe is not None

    @property
    def route_shape(self) -> RouteShape | None:
        """What is recorded of each token's experts."""
        return self.spec.moe and self.spec.moe.route_shape(self.spec.layers)

    @property
    def vision(self) -> VisionSpec | None:
        """The tower, and the ids of placeholder tokens."""
        return self.spec.vision

    @property
    def has_rotary_positions(self) -> bool:
        """Whether tokens of images are rotated by other numbers than their positions."""
        return self.spec.vision is not None and self.spec.mrope_sections is not None

    @property
    def attends_within_images(self) -> bool:
        """Whether tokens of an image attend to all others of it."""
        return self.spec.attends_within_images

    def rotary_positions(
        self, tokens: Int[np.ndarray, " T"], visuals: Sequence[Visual]
    ) -> tuple[Int[np.ndarray, "T 3"], int]:
        """See `models.vision.positions`.

        Raises:
            ValueError: As there, or the model has no tower.
        """
        if self.spec.vision is None:
            raise ValueError("rotary positions of images, for a model without a vision tower")
        return rotary_positions(self.spec.vision, tokens, visuals)

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
        """See `models.vision.tower.encode`.

        Raises:
            ValueError: The model has no tower.
        """
        if self.spec.vision is None:
            raise ValueError("patches of images, for a model without a vision tower")
        return encode(
            params["vision"],
            self.spec.vision,
            patches,
            dtype=dtype,
            layout=layout,
            remat=remat,
            bounds=bounds,
        )

    def declare(self) -> Declarations:
        """See `models.parameters.declare`."""
        return parameters.declare(self.spec)

    def init_params(self, key: PRNGKey) -> Params:
        """See `models.parameters.init_params`."""
        return parameters.init_params(self.spec, key=key)

    def compute_dtypes(self, dtype: DTypeLike) -> Any:
        """See `models.parameters.compute_dtypes`."""
        return parameters.compute_dtypes(self.spec, dtype)

    def declare_quantized(self) -> Declarations:
        """See `models.quantization.declare_quantized`."""
        return quantization.declare_quantized(self.spec)

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
        """See `models.transformer.forward_rows`."""
        rows = PackedTokens(tokens, positions, segment_ids, inputs)
        return transformer.forward_rows(
            params, self.spec, rows, dtype=dtype, remat=remat, layout=layout
        )

    def head_matrix(
        self, params: Params, layout: Layout | None = None
    ) -> Float[Array, "D V"] | SplitMatrix:
        """See `models.heads.head_matrix`."""
        return heads.head_matrix(params, self.spec, layout)

    def logits(self, params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """See `models.heads.logits`."""
        return heads.logits(params, self.spec, hidden)

    def token_values(self, params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B"]:
        """See `models.heads.token_values`."""
        return heads.token_values(params, hidden)

    def sequence_scores(
        self,
        params: Params,
        hidden: Float[Array, "R L D"],
        row: Int[Array, " B"],
        start: Int[Array, " B"],
        size: Int[Array, " B"],
    ) -> Float32[Array, " B"]:
        """See `models.heads.sequence_scores`."""
        return heads.sequence_scores(params, hidden, row, start, size)

    def init_cache(
        self, batch: int, length: int, *, dtype: DTypeLike, kv_cache_dtype: str = "auto"
    ) -> Cache:
        """See `models.cache.init_cache`."""
        spec = self.spec.for_decoding
        return init_cache(spec, batch, length, dtype=dtype, kv_cache_dtype=kv_cache_dtype)

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
        """See `models.decoding.extend`."""
        spec = self.spec.for_decoding
        return extend(
            params, spec, cache, tokens, positions, dtype=dtype, layout=layout, inputs=inputs
        )

    def extend_pages(
        self,
        params: Params,
        pool: Cache,
        tables: PageTables,
        tokens: Int[Array, " B"],
        positions: Int[Array, " B"],
        *,
        dtype: DTypeLike,
        layout: Layout | None,
        rotary: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """See `models.decoding.extend_pages`."""
        spec = self.spec.for_decoding
        following = NextTokens(tokens, positions, rotary)
        return extend_pages(params, spec, pool, tables, following, dtype=dtype, layout=layout)
