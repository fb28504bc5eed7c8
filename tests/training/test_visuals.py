"""Updates and passes on batches with images: patches for a tower, or features of a frozen one."""

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.sections import ModelConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.packing import RowShape, plan_microbatches
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.inputs import PatchRows, Visual
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.experience import filled
from jaxrl_llm.training.forward import (
    ForwardConfig,
    FrozenTower,
    VisualPacker,
    check_room,
    cut_chains,
    logprob_pass,
)
from jaxrl_llm.training.load_model import model_spec
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import VISUALS, Batch
from tests.specs import DENSE, draw, tiny_vision
from tests.updates import mesh_of, place, plain

IMAGE, START, END = 40, 41, 42
VISION = tiny_vision(
    layers=2, ff_width=12, out_size=16, deep_layers=(0,), image_id=IMAGE, marks=(START, END)
)
SPEC = dataclasses.replace(
    DENSE,
    vocab_size=48,
    head_dim=8,
    vision=VISION,
    mrope_sections=(2, 1, 1),
    mrope_interleaved=True,
)
APART = dataclasses.replace(SPEC, vision_apart=True)
LENGTH = 16
WHOLE = RowShape(rows=4, length=LENGTH, sequences=8)
PART = RowShape(rows=1, length=LENGTH, sequences=4)
ONE = RowShape(rows=1, length=3 * LENGTH, sequences=4)  # has room for all of them


def image(seed, *grid):
    patches = np.random.default_rng(seed).integers(0, 256, (int(np.prod(grid)), 24), np.uint8)
    return Visual(patches, grid, VISION.merge, bytes([seed]))


IMAGES = [image(0, 1, 4, 4), image(1, 1, 2, 4), image(2, 1, 2, 2)]
ROWS = [(3, IMAGES[0], 7, 8, 9), (5, 6, 7), (IMAGES[1], 4, IMAGES[2], 11), (IMAGES[0], 12, 13)]
"""Prompts; after each of them come two tokens that were drawn."""


def make_batch(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    tokens, mask = np.zeros((len(rows), LENGTH), np.int32), np.zeros((len(rows), LENGTH), bool)
    visuals, sizes = np.empty(len(rows), object), np.zeros(len(rows), np.int32)
    for i, row in enumerate(rows):
        ids, visuals[i] = [], tuple(part for part in row if isinstance(part, Visual))
        for part in row:
            ids += [START, *[IMAGE] * part.tokens, END] if isinstance(part, Visual) else [part]
        sizes[i] = len(ids) + 2
        tokens[i, : sizes[i]] = [*ids, 20 + i, 25]
        mask[i, sizes[i] - 2 : sizes[i]] = True
    advantages = rng.normal(size=tokens.shape).astype(np.float32)
    return Batch(tokens, sizes, {"mask": mask, "advantages": advantages, VISUALS: visuals})


@pytest.fixture(scope="module")
def params():
    return draw(SPEC, scale=0.3)


def tower_of(params, mesh=None):
    return FrozenTower(params["vision"], Decoder(APART), Layout(mesh or mesh_of()), "float32")


def text_of(params):
    return {name: value for name, value in params.items() if name != "vision"}


def trained(**options):
    return ForwardConfig(model=Decoder(SPEC), visuals=VisualPacker(Decoder(SPEC)), **options)


def frozen(params, mesh=None):
    packer = VisualPacker(Decoder(APART), tower_of(params, mesh))
    return ForwardConfig(model=Decoder(APART), visuals=packer)


def updated(model, params, mesh=None, shape=WHOLE):
    how = {"reduce": token_mean, "shape": shape, "mesh": mesh or mesh_of()}
    objective = PolicyObjective(loss=plain)
    learner = Learner(objective, model, optax.sgd(1.0), params_like=params, **how)
    state, metrics = learner.update(learner.init(params), make_batch(), {})
    return state.params, metrics


@pytest.fixture(scope="module")
def by_one(params):
    return updated(trained(remat="full"), params)


def test_a_trained_tower_is_trained_and_a_frozen_one_stays(params, by_one):
    """The rest has the same gradient beside either, also where micro-batches add up to it."""
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params["vision"], by_one[0]["vision"])
    assert all(jax.tree.leaves(changed))
    model, text = frozen(params), text_of(params)
    got, metrics = updated(model, text, shape=PART)
    assert "vision" not in got
    assert metrics["loss"] == pytest.approx(float(by_one[1]["loss"]), rel=1e-5)
    chex.assert_trees_all_close(got, text_of(by_one[0]), rtol=2e-4, atol=2e-5)
    chex.assert_trees_all_equal(model.visuals.tower.params, params["vision"])


def test_packed_sequences_are_scored_as_each_by_itself(params):
    batch, score = make_batch(), logprob_pass(trained(), ONE, mesh_of())
    packed = score(params, batch)["logprobs"]
    infer = logprob_pass(frozen(params), PART, mesh_of())
    for i in range(len(ROWS)):
        alone = infer(text_of(params), batch.take(slice(i, i + 1)))["logprobs"]
        np.testing.assert_allclose(alone[0], packed[i], rtol=1e-4, atol=1e-5)
    other = make_batch([(3, image(9, 1, 4, 4), 7, 8, 9), *ROWS[1:]])
    seen = score(params, other)["logprobs"]
    assert not np.allclose(seen[0], packed[0]) and np.allclose(seen[1:], packed[1:])
    # an embedding that features replace, and a logit that is left out
    louder = params | {"embed": params["embed"].at[IMAGE].multiply(50.0)}
    is_text = (batch.tokens != IMAGE) & (np.arange(LENGTH) < batch.sequence_lengths[:, None])
    got = score(louder, batch)["logprobs"]
    np.testing.assert_allclose(got[is_text], packed[is_text], rtol=1e-5)


def showing(*images):
    """A batch of which nothing but images is looked at."""
    visuals = np.empty(len(images), object)
    visuals[:] = [tuple(each) for each in images]
    ones = np.ones(len(images), np.int32)
    return Batch(ones[:, None], ones, {VISUALS: visuals})


def test_features_are_computed_once_and_forgotten(params):
    tower, seen = tower_of(params), []
    run = tower._encode
    tower._encode = lambda params, rows, bounds: seen.append(rows) or run(params, rows, bounds)
    tower.keep(showing([IMAGES[0], IMAGES[1]], [IMAGES[0]]))
    assert isinstance(seen[0], PatchRows) and len(seen) == 1
    first = tower.rows([[IMAGES[1], IMAGES[0]], []], 8)
    assert len(seen) == 1 and first.features.shape == (2, 8, 16)
    assert first.deep is not None and first.deep.shape == (2, 1, 8, 16)
    assert not first.features[0, 6:].any() and not first.features[1].any()
    tower.keep(showing([IMAGES[2]]))
    assert len(seen) == 2
    tower.rows([[IMAGES[0]]], 8)
    assert len(seen) == 3


def test_rows_have_room_for_their_images():
    """A sequence takes the room of its tokens, or of its images where these are more."""
    packer, batch = VisualPacker(Decoder(SPEC)), make_batch()
    shape = PART._replace(visual_share=0.3)  # 4 tokens of 16
    sizes = packer.sizes(batch, shape)
    assert sizes.tolist() == [14, 5, 11, 14]
    for rows in plan_microbatches(sizes, shape):
        for row in rows:
            assert sum(v.tokens for i in row for v in batch.visuals[i]) <= shape.visual_length
    packed = packer.rows(batch, [[2]], shape)
    assert packed.given.patches.shape == (1, 16, 24)
    assert packed.numbers[0, :11].tolist() == [-1, 0, 1, -1, -1, -1, 2, -1, -1, -1, -1]
    assert packed.rotary[0, :4].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3]]
    small = VisualPacker(Decoder(SPEC), max_pixels=8 * VISION.patch**2)
    small.rows(batch, [[2]], PART)
    with pytest.raises(ValueError, match="max_pixels"):
        small.rows(batch, [[0]], PART)
    with pytest.raises(ValueError, match="sequence 0"):
        packer.sizes(batch, PART._replace(visual_share=0.2))
    prompts = [(f"row {i}", row.tolist()) for i, row in enumerate(batch.tokens)]
    check_room(prompts, packer, shape)
    with pytest.raises(ConfigError, match="row 0"):
        check_room(prompts, packer, PART._replace(visual_share=0.2))


def test_a_spec_is_of_what_is_trained():
    for vision, apart in (("none", None), ("frozen", True), ("trained", False)):
        spec = model_spec(ModelConfig(path="configs/vision/model", vision=vision))
        assert (spec.vision_apart if spec.vision else None) is apart
        assert ("vision" in declare(spec)) == (vision == "trained")


def test_placeholders_are_as_many_as_images_need():
    packer, batch = VisualPacker(Decoder(SPEC)), make_batch()
    batch.tokens[0, -1] = batch.tokens[1, 3] = IMAGE  # padding, and a token that was drawn
    packer.rows(batch, [[0], [1]], WHOLE)
    batch.tokens[0, 0] = IMAGE
    with pytest.raises(ValueError, match="sequence 0"):
        packer.rows(batch, [[0]], WHOLE)


def test_episodes_are_laid_out_with_the_images_of_their_observations():
    """Answers to a prompt share its image; what is cut from a broken one takes its images along."""
    drawn = Completion(*(np.zeros(1, kind) for kind in (int, np.float32, int)), "")
    told = Completion.told([IMAGE] * 2, visuals=(IMAGES[1],))
    whole = Episode((IMAGE,) * 4, (drawn, told, drawn), "stop", prompt_visuals=(IMAGES[0],))
    broken = dataclasses.replace(whole, error="lost")
    prompts = [Prompt(0, whole.prompt, visuals=whole.prompt_visuals)] * 2
    rollouts = Rollouts(prompts, [whole, broken], ["", ""])
    batch = lay_out(rollouts, samples=2, max_tokens=8, compares=False)
    assert batch.visuals == [(IMAGES[0], IMAGES[1]), (IMAGES[0],)]
    VisualPacker(Decoder(SPEC)).rows(batch, [[0], [1]], WHOLE)
    few = filled(batch.take(np.array([1, 0])), 4)
    assert few.visuals == [*batch.visuals[::-1], (), ()]
    assert batch.without(VISUALS).visuals == [()] * 2
    assert VISUALS not in batch.arrays and "mask" in batch.arrays


def test_chains_have_their_own_images():
    batch = make_batch([(IMAGES[0], IMAGES[1], 6, IMAGES[2])])
    size = batch.sequence_lengths[0]
    first = np.flatnonzero(batch.tokens[0] == 6)[0]
    chains = np.where(np.arange(LENGTH) < first, 0, 1)
    chains = np.where(np.arange(LENGTH) < size, chains, -1)[None]
    cut = cut_chains(batch.add(chain_ids=chains), {"mask"}, LENGTH, [IMAGE])
    assert cut.visuals == [tuple(IMAGES[:2]), (IMAGES[2],)]


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/training/forward.py")
def test_a_mesh_changes_no_number(params, by_one):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    shape = RowShape(rows=4, length=LENGTH, sequences=8, ranks=4)
    placed = place(params, SPEC, mesh)
    got, _ = updated(trained(), placed, mesh, shape)
    chex.assert_trees_all_close(got, by_one[0], rtol=2e-4, atol=2e-5)
    text = text_of(placed)
    got, _ = updated(frozen(placed, mesh), text, mesh, shape)
    chex.assert_trees_all_close(got, text_of(by_one[0]), rtol=2e-4, atol=2e-5)
