"""What the trainer and the engine ask of a model.

Forward passes, updates and the native engine run a model only through `Model`, so that a vision
tower, a layer of another kind or a user's own module can be trained and sampled by implementing it.
That of a Hugging Face directory is a `Decoder`: adapters, value heads, kernels and vLLM know its
`ModelSpec`. What the config's `model.function` returns is another, as of `models.functional`.
"""

import dataclasses
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.models.arrays import Declarations, Params
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.inputs import (
    NO_INPUTS,
    FrameBounds,
    PatchRows,
    RowInputs,
    Visual,
    VisualFeatures,
)
from jaxrl_llm.models.layers import Router
from jaxrl_llm.models.linear import SplitMatrix
from jaxrl_llm.models.lora import without_adapter
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.models.parameters import PRNGKey
from jaxrl_llm.models.rope import LongRopeScaling
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.sharding.layout import Layout

log = logging.getLogger(__name__)


@runtime_checkable
class Model(Protocol):
    """A language model, critic or reward model as pure functions of an array tree.

    Hashable, so that it can be a static argument of `jax.jit`; equal models are the same functions.
    Parameters are always the first argument, nested as `declare()`. The methods are traced under
    `jax.jit`, `jax.grad` and `jax.vmap` and must have no side effects.

    Shapes: R rows of L tokens, each row holding several packed sequences; B rows of the cache, one
    per sequence, and T tokens of each that are read at once; D the width of the hidden states, V
    the vocabulary.

    The trainer calls `hidden_states` and then one head: `head_matrix` with `logit_softcap` for
    log-probs, `token_values` for a critic, `sequence_scores` for a reward model. The engine calls
    `init_cache`, `extend` and `logits`. A model has the head that it ends in; the others raise. A
    model that is never sampled by the native engine needs no cache.

    What a model may lack has a value here that says so: `extend_pages`, `route_shape` and `vision`
    are None. A class derives from `Model` and leaves these out, as the heads that it does not end
    in and, where the native engine never samples it, the cache; it must have the others.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number V of logits per token."""

    @property
    @abstractmethod
    def max_positions(self) -> int | None:
        """The longest sequence, in tokens; None: the model knows no longest one."""

    @property
    @abstractmethod
    def logit_softcap(self) -> int | float | None:
        """What logits are capped at: z becomes c·tanh(z/c). None: they are not."""

    @property
    @abstractmethod
    def has_router(self) -> bool:
        """Whether there are experts, so that `hidden_states` returns statistics of their router."""

    @abstractmethod
    def declare(self) -> Declarations:
        """Declare every parameter array: its shape, logical axes, initializer and checkpoint name.

        `sharding.layout` has a rule for each logical axis. An array whose first axis is `layers` is
        a stack; `extend` is given it as a tuple of one array per layer.
        """

    @abstractmethod
    def init_params(self, key: PRNGKey) -> Params:
        """Draw fresh float32 parameters, nested as `declare()`.

        It is traced under `jax.jit`, so that each device draws only its part.
        """

    @abstractmethod
    def compute_dtypes(self, dtype: DTypeLike) -> Any:
        """Return the dtype in which each array is used where the computation has a dtype.

        Weights cast to these dtypes, as the engine holds them, give the same results.
        """

    @abstractmethod
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
        """Run the model over packed rows, up to its head.

        The state of a token depends on the tokens before it in its own sequence, and on no other.

        Args:
            params: The parameters.
            tokens: Token ids.
            positions: Index of each token within its own sequence.
            segment_ids: 1, 2, … for the sequences of a row, 0 for padding.
            dtype: Of the computation.
            remat: Policy of `models.layers`: what is stored for the backward pass.
            layout: How activations are split over a mesh, and by its `kernel` how tokens attend.
                Where several devices share a row, the rows are its pieces, as
                `Layout.split_context` makes them. None leaves everything to the compiler.
            inputs: Given only where there are some: the `routes` to replay, of a model with a
                `route_shape`; with a `vision` tower the `visual` tokens, and the `rotary` positions
                of all. Where several devices share a row, these are cut into pieces as tokens are,
                but for the features, which stay whole.

        Returns:
            Hidden states in `dtype`, meaningless at padding; and by name the fields of
            `models.moe.routing.RouterStats`, or an empty dict without experts. With routes, the
            statistics also count which of them the routers would not have chosen, and `experts`
            [M R L top] are those that tokens went to, unless stages hold the layers.
        """

    @abstractmethod
    def head_matrix(
        self, params: Params, layout: Layout | None = None
    ) -> Float[Array, "D V"] | SplitMatrix | None:
        """Return the matrix that projects hidden states onto the vocabulary.

        Log-probs are computed from it in chunks of tokens, so that logits [R L V] never exist. None
        is returned by a model whose hidden states are logits already.

        Args:
            params: The parameters.
            layout: How tokens are split; the devices that split them may then hold parts of the
                matrix, and log-probs gather it.

        Raises:
            ValueError: The model ends in another head.
        """

    def logits(self, params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """Return the logits of hidden states, capped, in float32; as `head_matrix` gives them.

        Raises:
            ValueError: The model ends in another head.
        """
        raise NotImplementedError(f"{type(self).__name__} has no logits")

    def token_values(self, params: Params, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B"]:
        """Return a critic's value of each state, in float32.

        Raises:
            KeyError: The model ends in another head.
        """
        raise NotImplementedError(f"{type(self).__name__} has no token_values")

    def sequence_scores(
        self,
        params: Params,
        hidden: Float[Array, "R L D"],
        row: Int[Array, " B"],
        start: Int[Array, " B"],
        size: Int[Array, " B"],
    ) -> Float32[Array, " B"]:
        """Return a reward model's score of each sequence, in float32; 0 for one of 0 tokens.

        Args:
            params: The parameters.
            hidden: Hidden states of packed rows.
            row: The row that holds each sequence.
            start: Index of each sequence's first token in its row.
            size: Number of tokens of each sequence.

        Raises:
            KeyError: The model ends in another head.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sequence_scores")

    def init_cache(
        self, batch: int, length: int, *, dtype: DTypeLike, kv_cache_dtype: str
    ) -> Cache:
        """Make an empty cache of `batch` rows with `length` slots.

        The engine cuts it into pages: a slot must hold all that is kept of a position. A model that
        keeps nothing has one layer of heads of width 0.

        Args:
            batch: Rows.
            length: Slots of each.
            dtype: Of the computation.
            kv_cache_dtype: Of keys and values: auto, that of the computation, or int8.

        Raises:
            ValueError: Keys and values can't be kept so.
        """
        raise NotImplementedError(f"{type(self).__name__} has no init_cache")

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
        """Run the next T tokens of each row: 1 to decode, more to prefill a chunk of a prompt.

        Args:
            params: The parameters, with stacks taken apart.
            cache: Filled below `positions`. Where it has a `models.cache.Record`, the experts that
                tokens go to are written into it.
            tokens: The rows' next tokens.
            positions: Their positions, which say in which slots they lie. A token at one past the
                slots is padding: nothing of it is written, and its state means nothing.
            dtype: Of the computation.
            layout: How rows are split over a mesh; None leaves it to the compiler.
            inputs: As for `hidden_states`, of these tokens; routes are not replayed. The rotary
                position of a token after its prompt is its position and the offset that
                `rotary_positions` returned.

        Returns:
            The hidden states that `hidden_states` gives for the same tokens, and the cache with
            these tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} has no extend")

    @property
    def extend_pages(self) -> Callable[..., tuple[Float[Array, "B D"], Cache]] | None:
        """What decodes over pages in place, as `models.decoder.Decoder.extend_pages`.

        None: pages are gathered into rows.
        """

    def declare_quantized(self) -> Declarations:
        """Declare the arrays that `extend` takes where matrices are held in float8.

        A matrix [in… out…] is replaced by a `QuantizedMatrix` of two declarations, of its values
        and its scales. Here none is.
        """
        return self.declare()

    @property
    def route_shape(self) -> RouteShape | None:
        """What a cache records of each token's experts, and a pass replays; None: nothing."""

    @property
    def vision(self) -> VisionSpec | None:
        """The tower for images and videos, and the ids of placeholder tokens; None: text alone.

        A prompt holds a placeholder token for each token of an image or a video. `encode_visuals`
        says what stands in place of their embeddings, and `rotary_positions` where all of its
        tokens are. What follows here is not asked of a model without a tower.
        """

    @property
    def has_rotary_positions(self) -> bool:
        """Whether passes are to be given what `rotary_positions` returns."""
        return False

    @property
    def attends_within_images(self) -> bool:
        """Whether tokens of an image attend to all others of it: `extend` must read it whole."""
        return False

    def rotary_positions(
        self, tokens: Int[np.ndarray, " T"], visuals: Sequence[Visual]
    ) -> tuple[Int[np.ndarray, "T 3"], int]:
        """Return where each token of a prompt is; see `models.vision.tower`."""
        raise ValueError("rotary positions of images, for a model without a vision tower")

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
        """Run the tower over rows of patches; features are in the order of each row's visuals.

        Args:
            params: Of the whole model.
            patches: The rows.
            dtype: Of the computation.
            remat: As for `hidden_states`.
            layout: How rows are split over a mesh; None leaves it to the compiler.
            bounds: What is known of the frames of all rows.
        """
        raise ValueError("patches of images, for a model without a vision tower")


def decoder_spec(model: Model) -> ModelSpec:
    """Return the spec of a `Decoder`.

    Raises:
        TypeError: The model is another one.

    >>> decoder_spec(Decoder(tiny_spec())) == tiny_spec()
    True
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"expected a model of a Hugging Face directory, got {model}")
    return model.spec


def for_length(model: Model, longest: int) -> Model:
    """Return a model as it is run where no sequence is longer; see `ModelSpec.for_length`.

    It logs that the long factors of `LongRopeScaling` are taken.

    >>> for_length(Decoder(tiny_spec()), 16) == Decoder(tiny_spec())
    True
    """
    if not isinstance(model, Decoder):
        return model
    spec = model.spec.for_length(longest)
    scaling = spec.rope_scaling
    if isinstance(scaling, LongRopeScaling) and scaling.long:
        log.info(
            "LongRoPE: a sequence may have %d tokens, more than %d: all take the long factors",
            longest,
            scaling.original_positions,
        )
    return Decoder(spec)


def base_model(model: Model) -> Model:
    """Return a model without its adapter, if it has one, and with its tower among its parameters.

    >>> base_model(Decoder(tiny_spec())) == Decoder(tiny_spec())
    True
    """
    if not isinstance(model, Decoder):
        return model
    return Decoder(dataclasses.replace(without_adapter(model.spec), vision_apart=False))


def is_adapted(model: Model) -> bool:
    """Tell whether a model has an adapter.

    >>> is_adapted(Decoder(tiny_spec()))
    False
    """
    return isinstance(model, Decoder) and model.spec.lora is not None
