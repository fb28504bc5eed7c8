"""Vision towers as free functions over an array tree: rows of patches in, features out.

Patches are packed like tokens, with frames as segments, and attend to all of their own frame or
window. Norms, rotations and positions are computed in float32, matrices are cast where they are
used.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, UInt8

from jaxrl_llm.models.arrays import ArrayDecl, Params
from jaxrl_llm.models.attention import Attending, attend
from jaxrl_llm.models.context import attend_pieces
from jaxrl_llm.models.inputs import FrameBounds, PatchRows, Visual, VisualFeatures, VisualTokens
from jaxrl_llm.models.kernels import MOST_SEGMENTS, Heads
from jaxrl_llm.models.layers import ACTIVATION_FUNCTIONS, rematerialize, rms_norm
from jaxrl_llm.models.linear import Sharded, project
from jaxrl_llm.models.rope import Rotation, rotate, rotation
from jaxrl_llm.models.vision.parameters import BLOCKS, MERGERS, declare_vision
from jaxrl_llm.models.vision.spec import CHANNELS, ROPE_THETA, VisionSpec
from jaxrl_llm.sharding.layout import BATCH, Layout

WHOLE_FRAMES = Attending(causal=False)


def tower_heads_on(spec: VisionSpec, layout: Layout) -> Heads | str:
    """Return what a device of a layout is asked to do, or why a kernel can't stand there.

    >>> import jax
    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> spec = tiny_vision(hidden_size=16)
    >>> tower_heads_on(spec, Layout(make_mesh({}, jax.devices()[:1])))[:3]
    (2, 2, 8)
    """
    parts = layout.mesh.shape["tensor"] * layout.pieces
    if spec.heads % parts:
        return f"{spec.heads} heads can't be split over {parts} devices"
    heads = spec.heads // parts
    return Heads(heads, heads, spec.head_dim, (WHOLE_FRAMES,))


_ANY = FrameBounds()
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)
_exact_gelu = _recomputed(functools.partial(jax.nn.gelu, approximate=False))


def encode(
    params: Params,
    spec: VisionSpec,
    rows: PatchRows,
    *,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
    remat: str = "none",
    bounds: FrameBounds = _ANY,
) -> VisualFeatures:
    """Run a vision tower over packed rows of patches.

    Args:
        params: Parameters nested as `declare_vision(spec)`, those under `vision` of a model's.
        spec: The tower.
        rows: What `patch_rows` makes.
        dtype: Of the computation, whatever the parameters' dtype.
        layout: How rows are split over a mesh, as for `Decoder.hidden_states`. Rows are whole,
            also where several devices share each; then its patches must be a multiple of theirs.
            A kernel in it is taken where rows have few frames, as `bounds` says; it must be one
            that `models.kernels.choose_kernel` has found to serve.
        remat: Policy of `models.layers`: what of a block is stored for the backward pass.
        bounds: What is known of the frames of all rows.

    Returns:
        The features, in `dtype`; meaningless at padding.

    Raises:
        ValueError: Devices can't share a row's tokens.

    >>> import numpy as np
    >>> from jaxrl_llm.models.inputs import Visual
    >>> from jaxrl_llm.models.inputs import patch_rows
    >>> spec = tiny_vision()
    >>> params = {name: jnp.zeros(decl.shape) for name, decl in declare_vision(spec).items()}
    >>> rows = patch_rows(spec, [[Visual(np.zeros((8, 24), np.uint8), (1, 2, 4), 2, b"")]], 12)
    >>> jax.eval_shape(lambda params: encode(params, spec, rows), params).features.shape
    (1, 3, 4)
    """
    rows = _split(rows, spec, layout)
    tower = _Tower(params, spec, jnp.dtype(dtype), layout, remat)
    x = tower.constrain(tower.embed(rows))
    by = None if spec.kind == "siglip" else _rotation(spec, rows.places)
    deep = []
    for blocks, windowed in _runs(spec):
        x = tower.run_blocks(blocks, x, by, rows, bounds, windowed=windowed)
        if blocks[-1] in spec.deep_layers:
            number = spec.deep_layers.index(blocks[-1])
            deep.append(tower.merge(tower.weights(MERGERS, number), "deep", x))
    merge = tower.pool if spec.kind == "siglip" else functools.partial(tower.merge, name="merger")
    features = merge(tower.weights(None), x=x)
    return VisualFeatures(
        _whole(features, rows.order, layout),
        jnp.stack([_whole(each, rows.order, layout) for each in deep], axis=1) if deep else None,
    )


def _runs(spec: VisionSpec) -> Iterator[tuple[range, bool]]:
    """Yield blocks after each other that are computed by one loop, and whether they have windows.

    They are cut where windows begin or end, and after blocks whose output is a feature.
    """
    windowed = [spec.window is not None and i not in spec.full_layers for i in range(spec.layers)]
    first = 0
    for last in range(spec.layers):
        ends = last + 1 == spec.layers or windowed[last] != windowed[last + 1]
        if ends or last in spec.deep_layers:
            yield range(first, last + 1), windowed[last]
            first = last + 1


class _Tower(NamedTuple):
    """A tower's weights, and how it is computed."""

    params: Params
    spec: VisionSpec
    dtype: Any
    layout: Layout | None
    remat: str

    def constrain(self, x: Array) -> Array:
        return self.layout.constrain(x) if self.layout else x

    def weights(self, stacked: str | None, number: int | Array | None = None) -> Params:
        """Return the arrays that are stacked so, those of one number, ready to be used on a mesh.

        As for a decoder's layers, matrices are gathered by the products that take them.
        """
        declared = {
            name: decl
            for name, decl in declare_vision(self.spec).items()
            if decl.stacked == (() if stacked is None else (stacked,))
        }
        taken = {name: self.params[name] for name in declared}
        if number is not None:
            taken = {
                name: jax.lax.dynamic_index_in_dim(array, number, keepdims=False)
                for name, array in taken.items()
            }
        if self.layout is None:
            return taken
        homes = self.layout.gathered(declared)
        return {
            name: self._gathered(array, declared[name], homes[name].spec)
            for name, array in taken.items()
        }

    def _gathered(self, array: Array, declared: ArrayDecl, home: PartitionSpec) -> Array | Sharded:
        assert self.layout is not None
        place = self.layout.sharding(*home[len(declared.stacked) :])
        if declared.dimensions == 1 or declared.axes[0] == "_places":
            return jax.lax.with_sharding_constraint(array, place)
        return Sharded(array, place, self.remat != "none")

    def embed(self, rows: PatchRows) -> Float[Array, "R P D"]:
        """Multiply the normalized pixels of patches, and add the positions that are learned."""
        spec, weights = self.spec, self.weights(None)
        x = project(_normalized(spec, rows.patches, self.dtype), weights["patches"], inputs=4)
        if "patches_bias" in weights:
            x = x + weights["patches_bias"].astype(x.dtype)
        if spec.position_side:
            x = x + _positions(weights["positions"], spec, rows.places).astype(x.dtype)
        return x

    def run_blocks(
        self,
        blocks: range,
        x: Float[Array, "R P D"],
        by: Rotation | None,
        rows: PatchRows,
        bounds: FrameBounds,
        *,
        windowed: bool,
    ) -> Float[Array, "R P D"]:
        segments = rows.windows if windowed else rows.frames
        mix = functools.partial(self._attention(bounds, windowed=windowed), segments=segments)

        def body(x: Array, number: Array) -> tuple[Array, None]:
            weights = self.weights(BLOCKS, number)
            return self.constrain(_block(weights, self.spec, x, by, mix)), None

        body = rematerialize(body, self.remat, looks_up=True)
        return jax.lax.scan(body, x, jnp.arange(blocks.start, blocks.stop))[0]

    def _attention(self, bounds: FrameBounds, *, windowed: bool) -> Callable[..., Array]:
        """Return what mixes the patches of segments: windows, or whole frames."""
        spec, layout, longest = self.spec, self.layout, bounds.longest
        if windowed and spec.window is not None:
            longest = (spec.window * spec.merge) ** 2
        if layout is None:
            return lambda q, k, v, segments: attend(
                q, k, v, segments, WHOLE_FRAMES, longest=longest
            )
        few = not windowed and bounds.most is not None and bounds.most <= MOST_SEGMENTS
        own = tower_layout(spec, layout)
        own = dataclasses.replace(own, longest=longest, kernel=own.kernel if few else None)
        return lambda q, k, v, segments: attend_pieces(q, k, v, segments, WHOLE_FRAMES, layout=own)

    def merge(
        self, weights: Params, name: str, x: Float[Array, "R P D"]
    ) -> Float[Array, "R V out"]:
        """Make a feature of each token's patches, normed by themselves or, for DeepStack, as one.

        They are next to each other.
        """
        spec = self.spec
        if name == "merger":
            x = _normed(weights, "merger_norm", spec, x)
        tokens = x.reshape(*x.shape[:-2], -1, spec.group, spec.hidden_size)
        if name == "deep":
            flat = {key: array.reshape(-1) for key, array in weights.items() if "norm" in key}
            joined = tokens.reshape(*tokens.shape[:-2], -1)
            tokens = _normed(flat, "deep_norm", spec, joined).reshape(tokens.shape)
        hidden = _exact_gelu(_linear(weights, f"{name}_up", tokens, inputs=2))
        return _linear(weights, f"{name}_down", hidden)

    def pool(self, weights: Params, x: Float[Array, "R P D"]) -> Float[Array, "R V out"]:
        """Make a feature of the mean of each token's patches, which are next to each other."""
        x = _normed(weights, "post_norm", self.spec, x)
        tokens = x.reshape(*x.shape[:-2], -1, self.spec.group, self.spec.hidden_size)
        pooled = tokens.mean(axis=-2, dtype=jnp.float32).astype(x.dtype)
        scale = weights["merger_norm"]
        normed = rms_norm(pooled, scale, eps=self.spec.norm_eps, unit_offset=True)
        return project(normed, weights["merger"])


def tower_layout(spec: VisionSpec, layout: Layout) -> Layout:
    """Return how the rows of a tower are split, given how those of its decoder are.

    Where devices share rows, each attends with some of the heads, or, if heads can't be divided so,
    with some of the queries. A kernel stays where each device has whole heads.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> spec = tiny_vision()
    >>> tower_layout(spec, Layout(make_mesh({}, jax.devices()[:1]), "ring")).context
    'heads'
    """
    whole = spec.heads % (layout.mesh.shape["tensor"] * layout.pieces) == 0
    kernel = layout.kernel if whole else None
    return dataclasses.replace(layout, context="heads" if whole else "keys", kernel=kernel)


def _block(
    weights: Params, spec: VisionSpec, x: Float[Array, "R P D"], by: Rotation | None, mix: Any
) -> Float[Array, "R P D"]:
    """Apply one block: x += mixed(norm(x)), then x += feed_forward(norm(x))."""
    h = _normed(weights, "attention_norm", spec, x)
    q, k, v = (_linear(weights, name, h) for name in ("query", "key", "value"))
    mixed = mix(q, k, v) if by is None else mix(rotate(q, by), rotate(k, by), v)
    x = x + _linear(weights, "output", mixed, inputs=2)
    h = _normed(weights, "mlp_norm", spec, x)
    activation = _recomputed(ACTIVATION_FUNCTIONS[spec.activation])
    inner = activation(_linear(weights, "gate" if "gate" in weights else "up", h))
    if "gate" in weights:
        inner = inner * _linear(weights, "up", h)
    return x + _linear(weights, "down", inner)


def _linear(weights: Params, name: str, x: Array, *, inputs: int = 1) -> Array:
    return project(x, weights[name], inputs=inputs) + weights[f"{name}_bias"].astype(x.dtype)


def _normed(
    weights: Params, name: str, spec: VisionSpec, x: Float[Array, "*B D"]
) -> Float[Array, "*B D"]:
    """Norm by mean and variance, or by the mean square where the norm has no bias."""
    scale, bias = weights[name], weights.get(f"{name}_bias")
    if bias is None:
        return rms_norm(x, scale, eps=spec.norm_eps)
    return layer_norm(x, scale, bias, eps=spec.norm_eps)


def layer_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], bias: Float[Array, " D"], *, eps: float
) -> Float[Array, "*B D"]:
    r"""Normalize by mean and variance, $(x - \mu)\,g / \sqrt{\sigma^2+\epsilon} + b$, in float32.

    Ba et al. 2016 (https://arxiv.org/abs/1607.06450).

    Args:
        x: Input.
        scale: The scale g.
        bias: The shift b.
        eps: Added to the variance.

    Returns:
        The normed input, in its dtype.

    >>> layer_norm(jnp.array([1.0, 3.0]), jnp.array([1.0, 2.0]), jnp.ones(2), eps=0.0).tolist()
    [0.0, 3.0]
    """

    @_recomputed
    def normed(x: Array, scale: Array, bias: Array) -> Array:
        wide = x.astype(jnp.float32)
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centered**2, axis=-1, keepdims=True)
        scaled = centered * jax.lax.rsqrt(variance + eps) * scale.astype(jnp.float32)
        return (scaled + bias.astype(jnp.float32)).astype(x.dtype)

    return normed(x, scale, bias)


def _normalized(
    spec: VisionSpec, patches: UInt8[Array, "R P F"], dtype: Any
) -> Float[Array, "R P C T h w"]:
    mean, std = (
        jnp.array(value, jnp.float32)[:, None, None, None]
        for value in (spec.image_mean, spec.image_std)
    )
    pixels = patches.reshape(
        *patches.shape[:2], CHANNELS, spec.frames_per_patch, spec.patch, spec.patch
    )
    return ((pixels.astype(jnp.float32) / 255 - mean) / std).astype(dtype)


def _positions(
    table: Float[Array, "S2 D"], spec: VisionSpec, places: Int[Array, "R P 4"]
) -> Float32[Array, "R P D"]:
    """Interpolate the table of positions, its corners laid on those of each frame."""
    side = spec.position_side
    at, sizes = (places[..., part].astype(jnp.float32) for part in (slice(0, 2), slice(2, 4)))
    wanted = at * (side - 1) / jnp.maximum(sizes - 1, 1)
    before = jnp.floor(wanted)
    share = wanted - before
    low = before.astype(jnp.int32)
    high = jnp.minimum(low + 1, side - 1)
    total = jnp.zeros((*places.shape[:2], table.shape[1]), jnp.float32)
    for row, by_row in ((low[..., 0], 1 - share[..., 0]), (high[..., 0], share[..., 0])):
        for column, by_column in ((low[..., 1], 1 - share[..., 1]), (high[..., 1], share[..., 1])):
            corner = table[row * side + column].astype(jnp.float32)
            total = total + (by_row * by_column)[..., None] * corner
    return total


def _rotation(spec: VisionSpec, places: Int[Array, "R P 4"]) -> Rotation:
    """Compute the rotary angles: half of a head's frequencies turn by the row, half by the column.

    Each half has the frequencies of a head of half the width.
    """
    by_row, by_column = (
        rotation(places[..., i], head_dim=spec.head_dim // 2, theta=ROPE_THETA) for i in (0, 1)
    )
    pairs = zip(by_row, by_column, strict=True)
    return Rotation(*(jnp.concatenate(pair, axis=-1) for pair in pairs))


def _split(rows: PatchRows, spec: VisionSpec, layout: Layout | None) -> PatchRows:
    """Split rows over a mesh: those that devices share are cut into pieces; `order` is not."""
    if layout is None:
        return jax.tree.map(jnp.asarray, rows)
    unit = spec.group * layout.pieces
    if rows.frames.shape[1] % unit:
        raise ValueError(
            f"rows of {rows.frames.shape[1]} patches can't be shared by context={layout.pieces} "
            f"devices; expected a multiple of {unit}"
        )

    def split(x: Array) -> Array:
        return layout.constrain(layout.split_context(jnp.asarray(x)))

    order = None if rows.order is None else jnp.asarray(rows.order)
    return jax.tree.map(split, rows._replace(order=None))._replace(order=order)


def _whole(
    features: Float[Array, "P v D"], order: Int[Array, "R V"] | None, layout: Layout | None
) -> Float[Array, "R V D"]:
    """Join the features of pieces to those of rows, in the order of the visuals."""
    if layout is not None:
        features = layout.merge_context(features)
        features = jax.lax.with_sharding_constraint(features, layout.sharding(BATCH))
    return features if order is None else jnp.take_along_axis(features, order[..., None], axis=1)


def with_features(
    x: Float[Array, "R L D"], visual: VisualTokens, layout: Layout | None = None
) -> Float[Array, "R L D"]:
    """Put features in place of the embeddings of placeholder tokens.

    Args:
        x: Embeddings.
        visual: Which tokens have which features.
        layout: How rows are split over a mesh; where several devices share each, x and the index
            are in pieces, as `Layout.split_context` makes them.

    >>> from jaxrl_llm.models.inputs import VisualFeatures
    >>> visual = VisualTokens(jnp.array([[-1, 1]]), VisualFeatures(jnp.array([[[5.0], [6.0]]])))
    >>> with_features(jnp.array([[[2.0], [3.0]]]), visual).ravel().tolist()
    [2.0, 6.0]
    """
    features = _gather(visual.given.features, visual.feature, layout)
    return jnp.where(visual.feature[..., None] >= 0, features.astype(x.dtype), x)


def deepened(
    x: Float[Array, "R L D"],
    visual: VisualTokens,
    layer: Int[Array, ""] | int,
    layout: Layout | None = None,
) -> Float[Array, "R L D"]:
    """Add to the residual stream what DeepStack has for the tokens of images after a layer.

    A scan over layers has one program for all of them, which branches by the layer's number: no
    layer without features pays for them.

    Args:
        x: The residual stream after the layer.
        visual: Which tokens have which features.
        layer: The layer's number.
        layout: As for `with_features`.

    >>> from jaxrl_llm.models.inputs import VisualFeatures
    >>> given = VisualFeatures(jnp.zeros((1, 2, 1)), jnp.array([[[[5.0], [6.0]]]]))
    >>> visual = VisualTokens(jnp.array([[-1, 1]]), given)
    >>> [deepened(jnp.ones((1, 2, 1)), visual, jnp.array(n)).ravel().tolist() for n in (0, 1)]
    [[1.0, 7.0], [1.0, 1.0]]
    """
    deep = visual.given.deep
    if deep is None:
        return x

    def add(x: Array) -> Array:
        features = jax.lax.dynamic_index_in_dim(deep, layer, axis=1, keepdims=False)
        return x + _gather(features, visual.feature, layout).astype(x.dtype)

    if isinstance(layer, int):
        return add(x) if layer < deep.shape[1] else x
    return jax.lax.cond(layer < deep.shape[1], add, lambda x: x, x)


def rest_of_image(index: Int[Array, "R L"]) -> Int[Array, "R L"]:
    """Return how many tokens of its image come after each token; 0 for text.

    Args:
        index: For each token its feature, -1 for text, as in `VisualTokens`. Text stands between
            images.

    >>> rest_of_image(jnp.array([[-1, 0, 1, 2, -1, 3]])).tolist()
    [[0, 2, 1, 0, 0, 0]]
    """
    places = jnp.arange(index.shape[1])
    is_text = index < 0
    ends = jax.lax.cummin(jnp.where(is_text, places, index.shape[1]), axis=1, reverse=True)
    return jnp.where(is_text, 0, ends - 1 - places)


def _gather(
    features: Float[Array, "R V D"], index: Int[Array, "P l"], layout: Layout | None
) -> Float[Array, "P l D"]:
    """Return the feature of each token; 0 for text, from which the features get no gradient."""
    count = features.shape[1]
    in_pieces = layout is not None and layout.pieces > 1
    index = layout.merge_context(index) if layout and in_pieces else index
    # not -1, which would be the last; one past the end is dropped from the gradient's scatter
    index = jnp.where(index < 0, count, index)
    of_row = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))
    gathered = of_row(features, index)
    return layout.split_context(gathered) if layout and in_pieces else gathered


def rotary_positions(
    spec: VisionSpec, tokens: Int[np.ndarray, " T"], visuals: Sequence[Visual]
) -> tuple[Int[np.ndarray, "T 3"], int]:
    """Return time, height and width of each token of a prompt (https://arxiv.org/abs/2409.12191).

    A token of text is at the same number in all three, the next of its sequence. One of an image
    is at its row and column from there on, and what follows is one further than the furthest of
    them. The frames of a video have times if `spec.tokens_per_second` is set; else each is placed
    as an image, and text between them tells the time.

    Args:
        spec: The tower.
        tokens: Ids of the prompt, with a placeholder for each token of an image.
        visuals: What the placeholders stand for, in order.

    Returns:
        The positions; and what is added to the index of a later token to get its position.

    Raises:
        ValueError: There are not as many placeholders as the visuals have tokens, or other tokens
            stand between those of an image.

    >>> spec = tiny_vision(image_id=9)
    >>> image = Visual(np.zeros((8, 24), np.uint8), (1, 4, 2), 2, b"")
    >>> positions, offset = rotary_positions(spec, np.array([5, 9, 9, 5]), [image])
    >>> positions.tolist(), offset
    ([[0, 0, 0], [1, 1, 1], [1, 2, 1], [3, 3, 3]], 0)
    """
    places = np.flatnonzero(np.isin(tokens, placeholders(spec)))
    needed = sum(visual.tokens for visual in visuals)
    if len(places) != needed:
        raise ValueError(
            f"a prompt with {len(places)} placeholder tokens, for images and videos of "
            f"{needed} tokens"
        )
    parts, index, following, used = list[np.ndarray](), 0, 0, 0
    for block in _blocks(spec, visuals):
        start, end = places[used], places[used] + len(block)
        if places[used + len(block) - 1] != end - 1:
            raise ValueError(
                f"tokens of an image from {start} on are not next to each other; expected "
                f"{len(block)} placeholders"
            )
        text = following + np.arange(start - index)
        first = following + len(text)
        parts += [np.stack([text] * 3, axis=1), first + block]
        index, following, used = end, first + int(block.max()) + 1, used + len(block)
    rest = following + np.arange(len(tokens) - index)
    parts.append(np.stack([rest] * 3, axis=1))
    return np.concatenate(parts).astype(np.int32), int(following - index)


def placeholders(spec: VisionSpec) -> list[int]:
    """Return the ids of the tokens that stand for those of images and videos."""
    return [spec.image_id] if spec.video_id is None else [spec.image_id, spec.video_id]


def _blocks(spec: VisionSpec, visuals: Sequence[Visual]) -> Iterator[Int[np.ndarray, "N 3"]]:
    """Yield the positions within each run of tokens, from 0."""
    for visual in visuals:
        frames, height, width = visual.grid
        size = frames, height // visual.merge, width // visual.merge
        block = np.indices(size).reshape(3, -1).T
        if spec.tokens_per_second is not None:
            times = _times(spec.tokens_per_second, visual)
            yield np.column_stack([times[block[:, 0]], block[:, 1:]])
        else:
            block[:, 0] = 0
            yield from np.split(block, frames)


def _times(per_second: float | int, visual: Visual) -> Int[np.ndarray, " t"]:
    """Return the time of each frame, from 0, in float32 as the families' code.

    A step is the same between all frames; it is rounded before it is narrowed, since differences of
    seconds are not exact.
    """
    frames = np.arange(visual.grid[0])
    if len(frames) == 1 or not visual.is_video:
        return frames
    step = np.float32(per_second * round(visual.seconds[1] - visual.seconds[0], 9))
    return (frames.astype(np.float32) * step).astype(np.int64)
