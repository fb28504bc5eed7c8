"""Tiny models of `transformers` that see images, and prompts with images for them and for ours."""

import hashlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.inputs import PatchRows, RowInputs, Visual, VisualTokens, patch_rows
from jaxrl_llm.models.vision.tower import rotary_positions
from tests.decoders import PackedTokens
from tests.parity.reference import randomize

WORDS = 56
"""Ids of plain tokens are below it."""
IMAGE, VIDEO, START, END = range(57, 61)
TOKENS = dict(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END
)
PATCH, FRAMES, MERGE = 4, 2, 2

TEXT = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
DELTA = dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    head_dim=16,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
SHARED = dict(shared_expert_intermediate_size=14)
TOWER = dict(
    depth=2,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    patch_size=PATCH,
    spatial_merge_size=MERGE,
    temporal_patch_size=FRAMES,
    out_hidden_size=32,
)
TABLE = dict(num_position_embeddings=36)
SECTIONS = {"mrope_section": [2, 1, 1]}

FAMILIES = {
    "Qwen3VL": (TEXT, TOWER | TABLE | dict(deepstack_visual_indexes=[0, 1]), {}),
    "Qwen3VLMoe": (TEXT | EXPERTS, TOWER | TABLE | dict(deepstack_visual_indexes=[1]), {}),
    "Qwen2_5_VL": (
        {name: value for name, value in TEXT.items() if name != "head_dim"},
        TOWER | dict(window_size=16, fullatt_block_indexes=[1], tokens_per_second=4),
        {},
    ),
    "Qwen3_5": (TEXT | DELTA, TOWER | TABLE, {"partial_rotary_factor": 0.5}),
    "Qwen3_5Moe": (TEXT | DELTA | EXPERTS | SHARED, TOWER | TABLE, {"partial_rotary_factor": 0.5}),
}
"""The configs of text and tower, and what is said of the rotation besides."""


GEMMA = {
    "text_config": TEXT
    | dict(
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=6,
        query_pre_attn_scalar=8,
    ),
    "vision_config": dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=2,
    ),
    "mm_tokens_per_image": 16,
    "image_token_index": IMAGE,
    "boi_token_index": START,
    "eoi_token_index": END,
}


def make_gemma():
    """Return a Gemma 3 whose images are 8 x 8 patches, of which 2 x 2 become a token."""
    torch.manual_seed(0)
    config = transformers.Gemma3Config(**GEMMA)
    return randomize(transformers.Gemma3ForConditionalGeneration(config))


def make_seeing(family, *, tied=False, **of_text):
    """Return a model of transformers with random weights, in float32."""
    if family == "Gemma3":
        return make_gemma()
    torch.manual_seed(0)
    text, tower, rope = FAMILIES[family]
    rope = {"rope_type": "default", "rope_theta": 1e4} | SECTIONS | rope
    config = getattr(transformers, f"{family}Config")(
        text_config=text | of_text | {"rope_parameters": rope},
        vision_config=tower,
        tie_word_embeddings=tied,
        **TOKENS,
    )
    config._experts_implementation = "eager"
    return randomize(getattr(transformers, f"{family}ForConditionalGeneration")(config))


def draw_visual(*grid, seed=0, seconds=(), width=3 * FRAMES * PATCH**2):
    """Return an image of random pixels, or a video if frames have times."""
    patches = np.random.default_rng(seed).integers(0, 256, (int(np.prod(grid)), width), np.uint8)
    return Visual(patches, grid, MERGE, hashlib.sha256(patches.tobytes()).digest(), seconds)


class Seen(NamedTuple):
    """A prompt: its ids, and what its placeholders stand for."""

    tokens: np.ndarray
    visuals: tuple[Visual, ...] = ()


def prompt(family, *parts):
    """Write a prompt of token ids and visuals, as the family's processor does."""
    tokens = []
    for part in parts:
        if isinstance(part, int):
            tokens += [part]
            continue
        blocks, pad = 1, VIDEO if part.is_video else IMAGE
        if part.is_video and family != "Qwen2_5_VL":
            blocks = part.grid[0]
        for number in range(blocks):
            time = [7, number % WORDS, 8] if blocks > 1 else []
            tokens += [*time, START, *[pad] * (part.tokens // blocks), END]
    return Seen(np.array(tokens), tuple(part for part in parts if isinstance(part, Visual)))


def prompts(family):
    """Return prompts of text alone, one image, two, an image at the end, a video, and both."""
    if family == "Gemma3":
        return gemma_prompts()
    first, second = draw_visual(1, 4, 6), draw_visual(1, 2, 4, seed=1)
    film = draw_visual(2, 6, 4, seed=2, seconds=(0.0, 0.5))
    return {
        "text": prompt(family, *range(3, 12)),
        "image": prompt(family, 3, 5, first, 6, 9, 4),
        "two": prompt(family, 3, second, 20, 21, first, 7),
        "end": prompt(family, 11, 3, second),
        "video": prompt(family, 3, film, 5, 9),
        "both": prompt(family, first, 13, film, 2, 30),
    }


def gemma_prompts():
    """Return prompts of text alone, one image, two, and an image at the end."""
    first, second = (draw_visual(1, 8, 8, seed=seed, width=3 * 2**2) for seed in (0, 1))
    return {
        "text": prompt("Gemma3", *range(3, 12)),
        "image": prompt("Gemma3", 3, 5, first, 6, 9, 4),
        "two": prompt("Gemma3", 3, second, 20, first, 7),
        "end": prompt("Gemma3", 11, 3, second),
    }


def normalized(visuals, vision):
    """Return pixels as transformers' processors make them of ours."""
    patches = np.concatenate([visual.patches for visual in visuals])
    patches = patches.reshape(len(patches), 3, -1)
    mean, std = (np.array(color)[:, None] for color in (vision.image_mean, vision.image_std))
    normal = ((patches / 255 - mean) / std).reshape(len(patches), -1)
    return torch.tensor(normal, dtype=torch.float32)


def their_inputs(seen, vision):
    """Return what transformers takes of a prompt."""
    kinds = np.where(seen.tokens == IMAGE, 1, np.where(seen.tokens == VIDEO, 2, 0))
    inputs = {"input_ids": torch.tensor(seen.tokens[None])}
    kinds_key = "token_type_ids" if vision.kind == "siglip" else "mm_token_type_ids"
    inputs[kinds_key] = torch.tensor(kinds[None])
    for name, key, is_video in (("image", "", False), ("video", "_videos", True)):
        some = [visual for visual in seen.visuals if visual.is_video is is_video]
        if some and vision.kind == "siglip":
            inputs["pixel_values"] = whole_images(normalized(some, vision), some, vision)
        elif some:
            inputs[f"pixel_values{key}"] = normalized(some, vision)
            inputs[f"{name}_grid_thw"] = torch.tensor([visual.grid for visual in some])
    times = [visual.seconds for visual in seen.visuals if visual.is_video]
    if times and vision.tokens_per_second is not None:
        inputs["second_per_grid_ts"] = torch.tensor([time[1] - time[0] for time in times])
    return inputs


def whole_images(patches, visuals, vision):
    """Put patches together to images [N 3 H W]; those of a token are next to each other."""
    _, height, width = visuals[0].grid
    side, merge, patch = (len(visuals), height // vision.merge), vision.merge, vision.patch
    blocks = patches.reshape(*side, width // merge, merge, merge, 3, patch, patch)
    return blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(len(visuals), 3, height * patch, -1)


def their_output(model, seen, vision):
    """Score a prompt with transformers: logits [1 T V]."""
    model.model.rope_deltas = None
    return model(**their_inputs(seen, vision)).logits


def load_seeing(model, directory):
    """Save a model of transformers, and read it with its tower: parameters and spec."""
    model.save_pretrained(directory)
    spec = read_spec(directory, vision=True)
    return load_params(directory, spec), spec


def pack_prompts(spec, prompts, *, length, patches, rows=1):
    """Pack prompts one after another into rows: the tokens, and the patches of their images.

    The features that a tower makes of the patches are given later.
    """
    shape = (rows, length)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    index, rotary = np.full(shape, -1, np.int32), np.zeros((*shape, 3), np.int32)
    visuals = [[] for _ in range(rows)]
    for number, (tokens_of, images) in enumerate(prompts):
        row = number % rows
        start = np.count_nonzero(segments[row])
        at = slice(start, start + len(tokens_of))
        tokens[row, at], positions[row, at] = tokens_of, np.arange(len(tokens_of))
        segments[row, at] = segments[row].max() + 1
        if spec.mrope_sections is not None:
            rotary[row, at] = rotary_positions(spec.vision, tokens_of, images)[0]
        visuals[row] += images
    for row in range(rows):
        places = np.flatnonzero(np.isin(tokens[row], [IMAGE, VIDEO]))
        index[row, places] = np.arange(len(places))
    rotary = None if spec.mrope_sections is None else rotary
    packed = patch_rows(spec.vision, visuals, patches)
    return Packed(tokens, positions, segments, index, rotary, packed)


class Packed(NamedTuple):
    """Rows of prompts: what `PackedTokens` takes, and rows of patches."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    index: np.ndarray
    rotary: np.ndarray | None
    patches: PatchRows

    def with_features(self, given):
        """Return the rows with the features that a tower made of the patches."""
        visual = VisualTokens(jnp.asarray(self.index), given)
        arrays = map(jnp.asarray, self[:3])
        rotary = None if self.rotary is None else jnp.asarray(self.rotary)
        return PackedTokens(*arrays, RowInputs(None, visual, rotary))

    def of_prompt(self, number, rows=1):
        """Tell where a prompt lies: its row, and the slice of its tokens."""
        row, segment = number % rows, number // rows + 1
        at = np.flatnonzero(self.segments[row] == segment)
        return row, slice(at[0], at[-1] + 1)
