"""Vision towers in `config.json`: the keys under `vision_config`, placeholders, and M-RoPE.

Either form of a tower, Qwen's or Gemma's, reads the fields of a spec from the whole config, and
writes them back.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.models.hf.keys import (
    ACTIVATIONS,
    WITHOUT_EFFECT,
    Config,
    check_whole,
    without_effect,
)
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import CHANNELS, ROPE_THETA, TowerKind, VisionSpec

VISION_KEY = "vision_config"
TOWER_KEYS = {
    "depth": "layers",
    "hidden_size": "hidden_size",
    "num_heads": "heads",
    "intermediate_size": "ff_width",
    "patch_size": "patch",
    "temporal_patch_size": "frames_per_patch",
    "spatial_merge_size": "merge",
    "out_hidden_size": "out_size",
}
IMAGE, VIDEO = "image_token_id", "video_token_id"
MARKS = ("vision_start_token_id", "vision_end_token_id")


class Colors(NamedTuple):
    """What pixels are normalized by, in each channel."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


HALF = Colors((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = Colors((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


class TowerForm(NamedTuple):
    """How a family writes its tower.

    Attributes:
        kind: Of the tower.
        model_type: Of the family, whole.
        defaults: Keys of `vision_config` that may be absent, and what transformers takes then.
        tokens: The same of the placeholders' keys.
        sections: What transformers takes for an absent `mrope_section`.
        interleaved: Whether these alternate.
        colors: What its image processor takes where its file says nothing.
        prefixes: What names of its arrays may begin with; the first is that of published files.
    """

    kind: TowerKind
    model_type: str
    defaults: Mapping[str, Any]
    tokens: Mapping[str, int]
    sections: tuple[int, int, int]
    interleaved: bool
    colors: Colors
    prefixes: tuple[str, ...] = ("model.visual.",)

    def read(self, config: Config, colors: Colors | None) -> dict[str, Any]:
        """Read the spec's fields that only a model with a tower has.

        Args:
            config: The whole `config.json`.
            colors: As the model's image processor has them; None: it does not say.

        Raises:
            ValueError: A key is missing or unknown, or its value is not supported.
        """
        given = config.get(VISION_KEY)
        if not isinstance(given, dict):
            raise ValueError(f"{VISION_KEY}={given!r}; expected the keys of the vision tower")
        keys = dict(self.defaults) | given
        self._check(keys)
        check_whole(keys, TOWER_KEYS)
        mean, std = colors or self.colors
        tokens = dict(self.tokens) | {key: config[key] for key in self.tokens if key in config}
        check_whole(tokens, tokens)
        tower = VisionSpec(
            kind=self.kind,
            **{ours: keys[theirs] for theirs, ours in TOWER_KEYS.items()},
            **self._read_blocks(keys),
            activation=ACTIVATIONS[keys["hidden_act"]],
            init_std=float(keys["initializer_range"]),
            image_mean=mean,
            image_std=std,
            image_id=tokens[IMAGE],
            video_id=tokens[VIDEO],
            marks=tuple(tokens[key] for key in MARKS),
            hf_prefix=self.prefixes[0],
        )
        sections = _sections(config) or self.sections
        return {
            "vision": tower,
            "mrope_sections": sections,
            "mrope_interleaved": self.interleaved,
        }

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Write what `read` reads, but for the sections, which stand with the rotary positions."""
        tower = spec.vision
        assert tower is not None
        theirs = {ours: key for key, ours in ACTIVATIONS.items()}
        keys: dict[str, Any] = {key: getattr(tower, ours) for key, ours in TOWER_KEYS.items()}
        keys |= {"hidden_act": theirs[tower.activation], "initializer_range": tower.init_std}
        if tower.kind == "qwen3":
            keys["num_position_embeddings"] = tower.position_side**2
            if "deepstack_visual_indexes" in self.defaults:
                keys["deepstack_visual_indexes"] = [*tower.deep_layers]
        else:
            window = tower.window or 0
            keys["window_size"] = window * tower.merge * tower.patch
            keys["fullatt_block_indexes"] = [*tower.full_layers]
            keys["tokens_per_second"] = tower.tokens_per_second
        ids = (tower.image_id, tower.video_id, *tower.marks)
        return {VISION_KEY: keys} | dict(zip((IMAGE, VIDEO, *MARKS), ids, strict=True))

    def _check(self, keys: Config) -> None:
        check_known(keys, {*TOWER_KEYS, *self.defaults, "rope_parameters"}, self.model_type)
        if keys["hidden_act"] not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act={keys['hidden_act']!r} of the vision tower; supported are "
                f"{sorted(ACTIVATIONS)}"
            )
        rope = keys.get("rope_parameters") or {}
        if keys["in_channels"] != CHANNELS or rope.get("rope_theta", ROPE_THETA) != ROPE_THETA:
            raise ValueError(
                f"a vision tower with in_channels={keys['in_channels']} and rope_parameters={rope};"
                f" supported are {CHANNELS} and a rope_theta of {ROPE_THETA}"
            )

    def _read_blocks(self, keys: Config) -> dict[str, Any]:
        """Read what the blocks of one kind have, and those of another have not."""
        if self.kind == "qwen3":
            places = keys["num_position_embeddings"]
            check_whole(keys, ["num_position_embeddings"])
            if math.isqrt(places) ** 2 != places:
                raise ValueError(f"num_position_embeddings={places}; expected a square number")
            deep = keys.get("deepstack_visual_indexes") or ()
            has_deep = "deepstack_visual_indexes" in self.defaults
            deep = tuple(deep) if has_deep else ()
            return {"position_side": math.isqrt(places), "deep_layers": deep}
        token = keys["patch_size"] * keys["spatial_merge_size"]
        check_whole(keys, ["window_size", "tokens_per_second"])
        if keys["window_size"] % token or not keys["window_size"]:
            raise ValueError(
                f"window_size={keys['window_size']}; expected a multiple of {token}, the side of a "
                "token in pixels"
            )
        return {
            "window": keys["window_size"] // token,
            "full_layers": tuple(keys["fullatt_block_indexes"]),
            "tokens_per_second": keys["tokens_per_second"],
        }


SIGLIP_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "heads",
    "intermediate_size": "ff_width",
    "patch_size": "patch",
}
SIGLIP_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "patch_size": 16,
    "image_size": 224,
    "num_channels": CHANNELS,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
SIGLIP_TOKENS = {
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
}
SIGLIP_UNUSED = {
    "vision_use_head",
    "attention_dropout",
}  # a head beside ours, and what is 0 when sampling


class SiglipForm(NamedTuple):
    """How Gemma 3 writes its tower; see `models.hf.vision.TowerForm`."""

    kind: TowerKind = "siglip"
    model_type: str = "gemma3"
    prefixes: tuple[str, ...] = (
        "vision_tower.vision_model.",
        "vision_tower.",
        "multi_modal_projector.",
    )

    def read(self, config: Config, colors: Colors | None) -> dict[str, Any]:
        """Read the spec's fields that only a model with a tower has.

        Args:
            config: The whole `config.json`.
            colors: As the model's image processor has them; None: it does not say.

        Raises:
            ValueError: A key is unknown, or its value is not supported.
        """
        given = config.get(VISION_KEY)
        if not isinstance(given, dict):
            raise ValueError(f"{VISION_KEY}={given!r}; expected the keys of the vision tower")
        keys = SIGLIP_DEFAULTS | given
        outside = {key: config.get(key, usual) for key, usual in SIGLIP_TOKENS.items()}
        self._check(keys)
        check_whole(outside, outside)
        patches = keys["image_size"] // keys["patch_size"]
        side = math.isqrt(outside["mm_tokens_per_image"])
        if side**2 != outside["mm_tokens_per_image"] or patches % side:
            raise ValueError(
                f"mm_tokens_per_image={outside['mm_tokens_per_image']}; expected the square of a "
                f"divisor of {patches}, the patches of a side of an image"
            )
        mean, std = colors or HALF
        text = {"hidden_size": 2304} | (config.get("text_config") or {})
        tower = VisionSpec(
            kind=self.kind,
            **{ours: keys[theirs] for theirs, ours in SIGLIP_SIZES.items()},
            frames_per_patch=1,
            merge=patches // side,
            out_size=text["hidden_size"],
            position_side=patches,
            activation="gelu_tanh",
            norm_eps=keys["layer_norm_eps"],
            image_mean=mean,
            image_std=std,
            image_id=outside["image_token_index"],
            marks=(outside["boi_token_index"], outside["eoi_token_index"]),
            hf_prefix=self.prefixes[0],
        )
        return {"vision": tower}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Write what `read` reads."""
        tower = spec.vision
        assert tower is not None
        theirs = {ours: key for key, ours in ACTIVATIONS.items()}
        keys: dict[str, Any] = {key: getattr(tower, ours) for key, ours in SIGLIP_SIZES.items()}
        keys |= {
            "model_type": "siglip_vision_model",
            "image_size": tower.position_side * tower.patch,
            "num_channels": CHANNELS,
            "hidden_act": theirs[tower.activation],
            "layer_norm_eps": tower.norm_eps,
            "vision_use_head": False,
        }
        tokens = (tower.position_side // tower.merge) ** 2
        ids = (tokens, tower.image_id, *tower.marks)
        return {VISION_KEY: keys} | dict(zip(SIGLIP_TOKENS, ids, strict=True))

    def _check(self, keys: Config) -> None:
        check_known(keys, {*SIGLIP_DEFAULTS} | SIGLIP_UNUSED, "siglip")
        check_whole(keys, [*SIGLIP_SIZES, "image_size"])
        wanted = {key: SIGLIP_DEFAULTS[key] for key in ("hidden_act", "num_channels")}
        got = {key: keys[key] for key in wanted}
        if got != wanted:
            raise ValueError(f"a vision tower with {got}; supported is {wanted}")
        if keys["image_size"] % keys["patch_size"]:
            raise ValueError(
                f"image_size={keys['image_size']}; expected a multiple of patch_size="
                f"{keys['patch_size']}"
            )


def check_known(keys: Config, known: set[str], model_type: str) -> None:
    """Refuse keys of a tower that may change what it computes, and that we do not know.

    Args:
        keys: Of the tower.
        known: That are read.
        model_type: By which transformers knows the family.

    >>> check_known({"new_norm": True}, {"depth"}, "qwen3_vl")
    Traceback (most recent call last):
    ValueError: vision_config has {'new_norm': True}; supported are ['depth']
    """
    known = known | WITHOUT_EFFECT
    unknown = {key: value for key, value in keys.items() if value and key not in known}
    if unread := unknown.keys() - without_effect(model_type, unknown):
        unknown = {key: unknown[key] for key in sorted(unread)}
        raise ValueError(
            f"{VISION_KEY} has {unknown}; supported are {sorted(known - WITHOUT_EFFECT)}"
        )


def _sections(config: Config) -> tuple[int, int, int] | None:
    """Return how many rotary frequencies turn by time, height and width, if the config says so."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    given = rope.get("mrope_section")
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 3 or {type(n) for n in given} != {int}:
        raise ValueError(f"mrope_section={given!r}; expected three whole numbers")
    return given[0], given[1], given[2]


def with_sections(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of a language model with those sections among its rotary positions.

    >>> config = with_sections({"rope_parameters": {}}, tiny_spec(mrope_sections=(1, 0, 0)))
    >>> config["rope_parameters"]
    {'mrope_section': [1, 0, 0]}
    """
    if spec.mrope_sections is None:
        return config
    sections: dict[str, Any] = {"mrope_section": [*spec.mrope_sections]}
    sections |= {"mrope_interleaved": True} if spec.mrope_interleaved else {}
    return config | {"rope_parameters": config["rope_parameters"] | sections}


def read_colors(directory: Path) -> Colors | None:
    """Read what an image processor normalizes pixels by; None where no file of it is there.

    Args:
        directory: Of a model.

    Raises:
        ValueError: It does not rescale and normalize as all supported towers expect, or videos are
            normalized otherwise than images.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory) / "preprocessor_config.json"
    ...     _ = path.write_text('{"image_mean": [0, 0, 0.5], "image_std": [1, 1, 1]}')
    ...     read_colors(Path(directory))
    Colors(mean=(0.0, 0.0, 0.5), std=(1.0, 1.0, 1.0))
    """
    configs = [*_processors(directory)]
    colors = {_read_colors(keys) for keys in configs if {"image_mean", "image_std"} <= {*keys}}
    for keys in configs:
        does_both = keys.get("do_rescale", True) and keys.get("do_normalize", True)
        if not does_both or not math.isclose(keys.get("rescale_factor", 1 / 255), 1 / 255):
            raise ValueError(
                f"{directory}: the image processor has do_rescale={keys.get('do_rescale')}, "
                f"do_normalize={keys.get('do_normalize')} and rescale_factor="
                f"{keys.get('rescale_factor')}; supported are True, True and 1/255"
            )
    if len(colors) > 1:
        raise ValueError(f"{directory}: images and videos are normalized by {sorted(colors)}")
    return next(iter(colors), None)


def _processors(directory: Path) -> Iterator[Config]:
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        if (directory / name).exists():
            yield json.loads((directory / name).read_text("utf-8"))
    path = directory / "processor_config.json"
    whole = json.loads(path.read_text("utf-8")) if path.exists() else {}
    yield from (whole[k] for k in ("image_processor", "video_processor") if k in whole)


def _read_colors(keys: Config) -> Colors:
    mean, std = (tuple(map(float, keys[name])) for name in ("image_mean", "image_std"))
    if len(mean) != CHANNELS or len(std) != CHANNELS:
        raise ValueError(f"image_mean={mean}, image_std={std}; expected {CHANNELS} numbers each")
    return Colors((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]))
