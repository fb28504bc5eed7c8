"""Models that see images against `transformers`: positions, logits, gradients, decoding."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxrl_llm.models.cache import PageTables
from jaxrl_llm.models.decoder import NEVER, Decoder
from jaxrl_llm.models.inputs import FrameBounds, RowInputs, VisualTokens, frame_bounds, patch_rows
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.vision.parameters import declare_vision
from jaxrl_llm.models.vision.tower import encode, rotary_positions, tower_layout
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.decoders import forward_rows
from tests.parity.reference import assert_near
from tests.parity.vision import (
    WORDS,
    draw_visual,
    load_seeing,
    make_seeing,
    normalized,
    pack_prompts,
    prompt,
    prompts,
    their_inputs,
    their_output,
)

pytestmark = pytest.mark.guards("models/vision/", "models/decoder.py")

FAMILIES = ["Qwen3VL", "Qwen2_5_VL", "Gemma3", "Qwen3_5", "Qwen3VLMoe", "Qwen3_5Moe"]
ROW, PATCHES = 64, 128


def by_default(*names):
    """Run a test with these families, and with the others where slow tests are run."""
    cases = [n if n in names else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
    return pytest.mark.parametrize("family", cases)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return the model of a family, and the same as ours: parameters and spec."""

    @functools.cache
    def load(family):
        model = make_seeing(family)
        return model, *load_seeing(model, tmp_path_factory.mktemp(family))

    return load


@functools.partial(jax.jit, static_argnums=1)
def encoded(params, spec, patches):
    return encode(params["vision"], spec.vision, patches)


@functools.partial(jax.jit, static_argnums=1)
def scored(params, spec, packed):
    hidden, _ = forward_rows(params, spec, packed)
    return Decoder(spec).logits(params, hidden)


def their_logits(model, seen, vision):
    with torch.no_grad():
        return their_output(model, seen, vision)[0].numpy()


def all_packed(spec, family, rows=2):
    seen = list(prompts(family).values())
    return seen, pack_prompts(spec, seen, length=ROW, patches=PATCHES, rows=rows)


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen2_5_VL"])
def test_positions_equal(family, loaded):
    model, _, spec = loaded(family)
    for name, seen in prompts(family).items():
        given = their_inputs(seen, spec.vision)
        inputs = {key: value for key, value in given.items() if "pixel" not in key}
        theirs, offset = model.model.get_rope_index(**inputs)
        positions, ours = rotary_positions(spec.vision, *seen)
        np.testing.assert_array_equal(positions, theirs[:, 0].numpy().T, err_msg=name)
        assert ours == offset.item(), name


# ---------------------------------------------------------------------------------------- towers

GRIDS = [(1, 4, 6), (2, 2, 4), (1, 10, 6), (1, 2, 2)]
"""Two images, a video of two pairs of frames between them, and an image of one token."""
TOWERS = ["Qwen3VL", "Qwen2_5_VL"]
IMAGES = [draw_visual(*grid, seed=number) for number, grid in enumerate(GRIDS)]

encode_rows = jax.jit(encode, static_argnums=1, static_argnames=("layout", "remat", "bounds"))


def with_deep(made):
    """For each row [K + 1, V, D], the features and those of DeepStack."""
    whole = made.features[:, None]
    return whole if made.deep is None else jnp.concatenate([whole, made.deep], axis=1)


@pytest.mark.parametrize("family", TOWERS)
def test_features_equal_together_and_one_by_one(family, loaded):
    """Also in packed rows, in pieces of few patches, with bounds that say how long frames are."""
    model, params, spec = loaded(family)
    rows = [IMAGES, [IMAGES[2], IMAGES[0]], []]
    bounds = frame_bounds(rows)
    assert bounds == FrameBounds(longest=60, most=5)
    patches = patch_rows(spec.vision, rows, PATCHES)
    made = encode_rows(params["vision"], spec.vision, patches, bounds=bounds)
    packed = np.asarray(with_deep(made))
    assert np.isfinite(packed).all()
    for row, images in enumerate(rows):
        start = 0
        for image in images:
            with torch.no_grad():
                grid = torch.tensor([image.grid])
                out = model.model.visual(normalized([image], spec.vision), grid_thw=grid)
            theirs = [out.pooler_output, *getattr(out, "deepstack_features", [])]
            end = start + image.tokens
            assert_near(packed[row, :, start:end], np.stack(theirs), 1e-5)
            start = end


@pytest.mark.parametrize(
    ("family", "sizes", "context"),
    [
        ("Qwen3VL", {"fsdp": 2, "context": 2, "tensor": 2}, "heads"),
        pytest.param("Qwen2_5_VL", {"context": 8}, "keys", marks=pytest.mark.slow),
        pytest.param(
            "Qwen2_5_VL", {"fsdp": 2, "context": 2, "stage": 2}, "heads", marks=pytest.mark.slow
        ),
    ],
)
def test_devices_share_rows_and_weights_of_a_tower(family, sizes, context, loaded):
    """Features and gradients are those of one device, however devices share rows and weights."""
    _, params, spec = loaded(family)
    params, spec = params["vision"], spec.vision
    layout = Layout(make_mesh(sizes), "ring")  # in which a tower does not attend
    assert tower_layout(spec, layout).context == context
    some = [IMAGES[i % 3 :] for i in range(layout.shards // layout.pieces)]
    rows, bounds = patch_rows(spec, some, PATCHES), frame_bounds(some)
    tokens = np.array([sum(image.tokens for image in images) for images in some])
    real = np.arange(PATCHES // spec.group) < tokens[:, None]

    @functools.partial(jax.jit, static_argnums=1)
    def run(params, layout):
        def loss(params):
            made = encode_rows(params, spec, rows, layout=layout, bounds=bounds, remat="full")
            made = jnp.where(real[:, None, :, None], with_deep(made), 0)
            return jnp.square(made).sum(), made

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, alone), expected = run(params, None)
    placed = jax.device_put(params, layout.of(declare_vision(spec)))
    (_, shared), gradient = run(placed, layout)
    np.testing.assert_allclose(shared, alone, atol=1e-5 * np.abs(alone).max())
    for name, value in expected.items():
        off = np.abs(np.asarray(gradient[name]) - value).max()
        assert off <= 2e-5 * np.abs(value).max(), name


# -------------------------------------------------------------------------------- whole models


def test_text_goes_on_after_the_time_of_a_video(loaded):
    """As the paper and the authors' code; transformers 5 looks at height and width alone."""
    _, _, spec = loaded("Qwen2_5_VL")
    step = 2 / 3.7  # seconds between pairs of frames
    film = draw_visual(5, 4, 2, seconds=tuple(3 + step * i for i in range(5)))
    seen = prompt("Qwen2_5_VL", 4, film, 6)
    positions, offset = rotary_positions(spec.vision, *seen)
    frames = positions[2:-2].reshape(5, 2, 3)
    np.testing.assert_array_equal(frames[:, 0, 0] - 2, [int(4 * step * i) for i in range(5)])
    np.testing.assert_array_equal(frames[:, :, 1:] - 2, [[[0, 0], [1, 0]]] * 5)
    last = int(4 * step * 4) + 2
    assert positions[-2:].tolist() == [[last + 1] * 3, [last + 2] * 3]
    assert offset == last + 3 - len(seen.tokens)


@by_default("Qwen3VL", "Qwen2_5_VL", "Gemma3")
def test_packed_logits_equal(family, loaded):
    """Prompts of text, images and videos in the same rows, each as transformers alone."""
    model, params, spec = loaded(family)
    seen, packed = all_packed(spec, family)
    ours = np.asarray(
        scored(params, spec, packed.with_features(encoded(params, spec, packed.patches)))
    )
    for number, one in enumerate(seen):
        row, at = packed.of_prompt(number, rows=2)
        theirs = their_logits(model, one, spec.vision)
        assert_near(ours[row, at, :WORDS], theirs[:, :WORDS])
    assert np.all(ours[..., list(spec.vision.never_sampled)] == NEVER)


@by_default("Qwen3VL", "Gemma3")
def test_decoding_goes_on_from_a_prompt_with_images(family, loaded):
    """A prompt in pieces, which cut its images if they may, then token by token."""
    model, params, spec = loaded(family)
    seen = prompts(family)["two" if family == "Gemma3" else "both"]
    answer = [9, 31, 5]
    tokens = np.concatenate([seen.tokens, answer])
    given, count = seen._replace(tokens=tokens), len(seen.tokens)
    theirs = their_logits(model, given, spec.vision)[:, :WORDS]
    packed = pack_prompts(spec, [given], length=ROW, patches=PATCHES)
    features = encoded(params, spec, packed.patches)
    decoder, slots, ours = Decoder(spec), ROW, []
    turns, size = decoder.has_rotary_positions, 20 if decoder.attends_within_images else 12
    cache = decoder.init_cache(1, slots, dtype="float32")

    @jax.jit
    def extend(cache, tokens, positions, index, rotary):
        inputs = RowInputs(None, VisualTokens(index, features), rotary)
        hidden, cache = decoder.extend(
            params, cache, tokens, positions, dtype="float32", layout=None, inputs=inputs
        )
        return decoder.logits(params, hidden), cache

    for start in range(0, count, size):
        at = slice(start, start + size)
        positions = np.where(np.arange(start, start + size) < count, packed.positions[:, at], slots)
        rotary = packed.rotary[:, at] if turns else None
        after, cache = extend(cache, packed.tokens[:, at], positions, packed.index[:, at], rotary)
        ours.append(after[0])
    ours = [np.concatenate(ours)[:count]]
    for number in range(count, len(tokens)):
        at = np.array([[number]])
        if turns:
            offset = decoder.rotary_positions(*seen)[1]
            rotary = np.broadcast_to(at[..., None] + offset, (1, 1, 3))
        after, cache = extend(cache, tokens[None, [number]], at, np.array([[-1]]), rotary)
        ours.append(after[0])
    assert_near(np.concatenate(ours)[:, :WORDS], theirs)


def test_decoding_over_pages_is_that_over_rows(loaded):
    """The next token after images, rotated by another number than its place."""
    _, params, spec = loaded("Qwen3VL")
    decoder, tokens, positions = Decoder(spec), jnp.array([9, 7]), jnp.array([5, 3])
    cache = decoder.init_cache(2, 16, dtype="float32")
    fill = jax.random.normal(jax.random.key(0), cache.keys[0].shape)
    keys, values = [fill] * len(cache.keys), [fill.swapaxes(2, 3)] * len(cache.keys)
    cache = cache._replace(keys=tuple(keys), values=tuple(values))
    pool = cache._replace(keys=tuple(k[None] for k in keys), values=tuple(v[None] for v in values))
    turned = positions + jnp.array([-2, 4])

    @jax.jit
    def over_pages(pool, rotary):
        tables = PageTables(jnp.array([[0], [1]]), attend_gathered)
        arrays = pool, tables, tokens, positions
        return decoder.extend_pages(params, *arrays, dtype="float32", layout=None, rotary=rotary)[0]

    @jax.jit
    def over_rows(cache, rotary):
        inputs = RowInputs(rotary=jnp.stack([rotary] * 3, axis=1)[:, None])
        arrays = cache, tokens[:, None], positions[:, None]
        return decoder.extend(params, *arrays, dtype="float32", layout=None, inputs=inputs)[0]

    expected = over_rows(cache, turned)[:, 0]
    np.testing.assert_allclose(over_pages(pool, turned), expected, atol=1e-5)
    assert np.abs(over_rows(cache, positions)[:, 0] - expected).max() > 0.01


@by_default("Qwen3VL")
def test_gradients_equal(family, loaded, tmp_path):
    """Of every array of text and tower, through the features and those of DeepStack."""
    model, params, spec = loaded(family)
    seen, packed = all_packed(spec, family)
    weights = np.random.default_rng(0).normal(size=(2, ROW, WORDS)).astype(np.float32)
    weights *= (packed.segments > 0)[..., None]
    model.zero_grad()
    for number, one in enumerate(seen):
        at = packed.of_prompt(number, rows=2)
        theirs = their_output(model, one, spec.vision)[0, :, :WORDS]
        (theirs * torch.from_numpy(weights[at])).sum().backward()
    slopes = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, original in zip(slopes.parameters(), model.parameters(), strict=True):
            parameter.copy_(0 if original.grad is None else original.grad)
    theirs, _ = load_seeing(slopes, tmp_path)

    @jax.jit
    @jax.grad
    def ours(params):
        features = encode(params["vision"], spec.vision, packed.patches, remat="full")
        hidden, _ = forward_rows(params, spec, packed.with_features(features), remat="full")
        return jnp.sum(Decoder(spec).logits(params, hidden)[..., :WORDS] * weights)

    slope = ours(params)
    assert jax.tree.structure(slope) == jax.tree.structure(theirs)
    for path, one in jax.tree.leaves_with_path(slope):
        other = np.asarray(functools.reduce(lambda tree, key: tree[key.key], path, theirs))
        name = jax.tree_util.keystr(path)
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, atol=1e-4 * max(scale, 0.1), rtol=0, err_msg=name)
        # a softmax does not see what is the same for all keys, unless these are rotated
        assert scale > 0.1 or (family == "Gemma3" and name.endswith("['key_bias']")), name
