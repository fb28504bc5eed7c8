"""Models that see images against `transformers`: positions, logits, gradients, decoding."""

import copy
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxrl_llm.models.cache import PageTables
from jaxrl_llm.models.decoder import NEVER, Decoder
from jaxrl_llm.models.inputs import RowInputs, VisualTokens
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.vision.tower import encode, rotary_positions
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.decoders import forward_rows
from tests.parity.reference import assert_near
from tests.parity.vision import (
    IMAGE,
    WORDS,
    draw_visual,
    load_seeing,
    make_seeing,
    pack_prompts,
    prompt,
    prompts,
    their_inputs,
    their_output,
)

pytestmark = pytest.mark.guards("models/vision/", "models/decoder.py", "models/decoder.py")

TURNING = ["Qwen3VL", "Qwen2_5_VL", "Qwen3_5"]
"""Families with M-RoPE."""
FAMILIES = [*TURNING, "Gemma3"]
ROW, PATCHES = 64, 128


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


@pytest.mark.parametrize("family", TURNING)
def test_positions_equal(family, loaded):
    model, _, spec = loaded(family)
    for name, seen in prompts(family).items():
        given = their_inputs(seen, spec.vision)
        inputs = {key: value for key, value in given.items() if "pixel" not in key}
        theirs, offset = model.model.get_rope_index(**inputs)
        positions, ours = rotary_positions(spec.vision, *seen)
        np.testing.assert_array_equal(positions, theirs[:, 0].numpy().T, err_msg=name)
        assert ours == offset.item(), name


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


def test_placeholders_must_be_those_of_the_images(loaded):
    spec = loaded("Qwen3VL")[2].vision
    image = draw_visual(1, 4, 4)
    with pytest.raises(ValueError, match=r"3 placeholder tokens.*of 4 tokens"):
        rotary_positions(spec, np.array([1, IMAGE, IMAGE, IMAGE]), [image])
    apart = np.array([IMAGE, IMAGE, 1, IMAGE, IMAGE])
    with pytest.raises(ValueError, match="from 0 on are not next to each other; expected 4"):
        rotary_positions(spec, apart, [image])


@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(f"{name}Moe", marks=pytest.mark.slow) for name in TURNING[::2])],
)
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


@pytest.mark.parametrize(
    "family", ["Qwen3VL", pytest.param("Qwen2_5_VL", marks=pytest.mark.slow), *FAMILIES[2:]]
)
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


@pytest.mark.parametrize(
    "family", ["Qwen3VL", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)
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


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [dict(data=2, tensor=2, context=2), dict(fsdp=2, stage=2)])
def test_meshes_give_the_same(mesh, tmp_path):
    model = make_seeing("Qwen3VL", num_hidden_layers=4)
    params, spec = load_seeing(model, tmp_path)
    seen = list(prompts("Qwen3VL").values())
    packed = pack_prompts(spec, seen * 2, length=ROW, patches=PATCHES, rows=4)
    features = encoded(params, spec, packed.patches)
    expected = scored(params, spec, packed.with_features(features))
    layout = Layout(make_mesh(mesh, jax.devices()[: math.prod(mesh.values())]))
    placed = jax.device_put(params, layout.of(Decoder(spec).declare()))

    @jax.jit
    def run(params, packed):
        visual = packed.inputs.visual
        text = packed._replace(inputs=packed.inputs._replace(visual=None))
        split = jax.tree.map(layout.split_context, text)
        visual = visual._replace(feature=layout.split_context(visual.feature))
        split = split._replace(inputs=split.inputs._replace(visual=visual))
        hidden, _ = forward_rows(params, spec, split, layout=layout)
        return layout.merge_context(hidden)

    hidden = run(placed, packed.with_features(features))
    ours = Decoder(spec).logits(params, jnp.asarray(jax.device_get(hidden)))
    real = packed.segments > 0
    np.testing.assert_allclose(ours[real], np.asarray(expected)[real], atol=1e-4)
