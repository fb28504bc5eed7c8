"""Vision towers against `transformers`: features, packed rows, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxrl_llm.models.hf.load import from_hf
from jaxrl_llm.models.inputs import FrameBounds, Visual, frame_bounds, patch_rows
from jaxrl_llm.models.vision.parameters import declare_vision
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import encode, tower_layout
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.parity.reference import assert_near, randomize

pytestmark = pytest.mark.guards("models/vision/")

GRIDS = [(1, 4, 6), (2, 2, 4), (1, 10, 6), (1, 2, 2)]
"""Two images, a video of two pairs of frames between them, and an image of one token."""
LENGTH = 128
SIZES = dict(
    hidden_size=16, heads=4, ff_width=20, patch=4, frames_per_patch=2, merge=2, out_size=12
)
COLORS = dict(image_mean=(0.4, 0.5, 0.6), image_std=(0.25, 0.3, 0.35))
SPECS = {
    "qwen3": VisionSpec(
        kind="qwen3", layers=3, position_side=5, deep_layers=(0, 1), image_id=1, **SIZES, **COLORS
    ),
    "qwen2_5": VisionSpec(
        kind="qwen2_5",
        layers=3,
        window=2,
        full_layers=(1,),
        activation="silu",
        image_id=1,
        **SIZES,
        **COLORS,
    ),
}


def their_tower(spec):
    config = dict(
        depth=spec.layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ff_width,
        num_heads=spec.heads,
        patch_size=spec.patch,
        out_hidden_size=spec.out_size,
        attn_implementation="eager",
    )
    if spec.kind == "qwen3":
        config |= dict(
            num_position_embeddings=spec.position_side**2,
            deepstack_visual_indexes=list(spec.deep_layers),
        )
        module = transformers.models.qwen3_vl.modeling_qwen3_vl
        made = module.Qwen3VLVisionModel(
            transformers.models.qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig(**config)
        )
    else:
        config |= dict(
            window_size=spec.window * spec.merge * spec.patch,
            fullatt_block_indexes=list(spec.full_layers),
        )
        module = transformers.models.qwen2_5_vl
        made = module.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(
            module.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(**config)
        )
    return randomize(made)


@functools.cache
def both(kind):
    """A tower of transformers, and its parameters as ours."""
    spec = SPECS[kind]
    torch.manual_seed(0)
    model = their_tower(spec)
    stored = {spec.hf_prefix + name: value.numpy() for name, value in model.state_dict().items()}

    def taken(decl):
        values = np.empty(decl.shape, np.float32)
        for name, index in decl.hf_indices():
            values[index] = from_hf(decl, stored[name])
            used.add(name)
        return jnp.array(values)

    used = set()
    params = jax.tree.map(taken, declare_vision(spec))
    assert used == stored.keys()
    return model, params


def visuals(spec):
    rng = np.random.default_rng(0)
    return [
        Visual(
            rng.integers(0, 256, (np.prod(grid), spec.patch_width), np.uint8), grid, spec.merge, b""
        )
        for grid in GRIDS
    ]


def their_pixels(spec, images):
    """Pixels as transformers' processors make them of ours."""
    pixels = np.concatenate([image.patches for image in images]).astype(np.float32)
    by_channel = pixels.reshape(len(pixels), 3, -1)
    mean, std = (np.array(x, np.float32)[:, None] for x in (spec.image_mean, spec.image_std))
    normal = (by_channel / 255 - mean) / std
    return torch.from_numpy(normal.reshape(pixels.shape))


def their_features(model, spec, images):
    """The features, and those of DeepStack, of all images together."""
    grids = torch.tensor([image.grid for image in images])
    output = model(their_pixels(spec, images), grid_thw=grids)
    return [output.pooler_output, *getattr(output, "deepstack_features", [])]


encoded = jax.jit(encode, static_argnums=1, static_argnames=("dtype", "layout", "remat", "bounds"))


def our_features(params, spec, rows, **options):
    """For each row [K + 1, V, D], the features and those of DeepStack."""
    made = encoded(params, spec, rows, **options)
    whole = made.features[:, None]
    return whole if made.deep is None else jnp.concatenate([whole, made.deep], axis=1)


@pytest.mark.parametrize("kind", SPECS)
def test_features_equal(kind):
    spec, (model, params) = SPECS[kind], both(kind)
    images = visuals(spec)
    with torch.no_grad():
        theirs = np.stack(their_features(model, spec, images))
    ours = our_features(params, spec, patch_rows(spec, [images], LENGTH))[0]
    tokens = sum(image.tokens for image in images)
    assert_near(np.asarray(ours)[:, :tokens], theirs, 1e-5)
    assert np.isfinite(np.asarray(ours)).all()


@pytest.mark.parametrize("kind", SPECS)
def test_packed_rows_equal_images_one_by_one(kind):
    """Also in pieces of few patches, with bounds that say how long frames are."""
    spec, (_, params) = SPECS[kind], both(kind)
    images = visuals(spec)
    rows = [images, [images[2], images[0]], []]
    bounds = frame_bounds(rows)
    assert bounds == FrameBounds(longest=60, most=5)
    packed = our_features(params, spec, patch_rows(spec, rows, 2 * LENGTH), bounds=bounds)
    alone = [our_features(params, spec, patch_rows(spec, [[one]], 60))[0] for one in images]
    for row, numbers in enumerate([[0, 1, 2, 3], [2, 0]]):
        start = 0
        for number in numbers:
            end = start + images[number].tokens
            expected = alone[number][:, : images[number].tokens]
            np.testing.assert_allclose(packed[row, :, start:end], expected, atol=2e-5)
            start = end


@pytest.mark.parametrize("kind", SPECS)
def test_gradients_equal(kind):
    """Of every array, through features and those of DeepStack, whatever is rematerialized."""
    spec, (model, params) = SPECS[kind], both(kind)
    images = visuals(spec)
    theirs = torch.stack(their_features(model, spec, images))
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    (theirs * weights).sum().backward()
    stored = {spec.hf_prefix + name: value.grad for name, value in model.named_parameters()}
    rows, cotangent = patch_rows(spec, [images], LENGTH), jnp.array(weights.numpy())

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(params, remat):
        def loss(params):
            made = our_features(params, spec, rows, remat=remat, bounds=frame_bounds([images]))
            return (made[0, :, : cotangent.shape[1]] * cotangent).sum()

        return jax.grad(loss)(params)

    for remat in ("none", "full"):
        ours = gradient(params, remat)
        for name, decl in declare_vision(spec).items():
            scale = max(stored[hf].abs().max().item() for hf, _ in decl.hf_indices())
            for hf, index in decl.hf_indices():
                expected = from_hf(decl, stored[hf].numpy())
                off = np.abs(np.asarray(ours[name])[index] - expected).max()
                assert off <= 2e-5 * scale, (name, index, remat)


@pytest.mark.parametrize(
    ("kind", "sizes", "context"),
    [
        ("qwen3", {"fsdp": 2, "context": 2, "tensor": 2}, "heads"),
        ("qwen2_5", {"context": 8}, "keys"),
        pytest.param("qwen3", {"data": 2, "fsdp": 4}, "heads", marks=pytest.mark.slow),
        pytest.param("qwen2_5", {"fsdp": 4, "tensor": 2}, "heads", marks=pytest.mark.slow),
        pytest.param(
            "qwen2_5", {"fsdp": 2, "context": 2, "stage": 2}, "heads", marks=pytest.mark.slow
        ),
    ],
)
def test_devices_share_rows_and_weights(kind, sizes, context):
    """Features and gradients are those of one device, however devices share rows and weights."""
    spec, (_, params) = SPECS[kind], both(kind)
    layout = Layout(make_mesh(sizes), "ring")  # in which a tower does not attend
    assert tower_layout(spec, layout).context == context
    some = [visuals(spec)[i % 3 :] for i in range(layout.shards // layout.pieces)]
    rows = patch_rows(spec, some, LENGTH)
    tokens = np.array([sum(image.tokens for image in images) for images in some])
    real = np.arange(LENGTH // spec.group) < tokens[:, None]

    @functools.partial(jax.jit, static_argnums=1)
    def run(params, layout):
        def loss(params):
            bounds = frame_bounds(some)
            made = our_features(params, spec, rows, layout=layout, bounds=bounds, remat="full")
            made = jnp.where(real[:, None, :, None], made, 0)
            return jnp.square(made).sum(), made

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, alone), expected = run(params, None)
    placed = jax.device_put(params, layout.of(declare_vision(spec)))
    (_, shared), gradient = run(placed, layout)
    np.testing.assert_allclose(shared, alone, atol=1e-5 * np.abs(alone).max())
    for name, value in expected.items():
        off = np.abs(np.asarray(gradient[name]) - value).max()
        assert off <= 2e-5 * np.abs(value).max(), name
