"""The vision tower of Gemma 3 in `config.json`: SigLIP, and how many tokens an image becomes."""

import math
from typing import Any, NamedTuple

from jaxrl_llm.models.hf.keys import ACTIVATIONS, Config, check_whole
from jaxrl_llm.models.hf.vision import HALF, VISION_KEY, Colors, check_known
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import CHANNELS, TowerKind, VisionSpec

SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "heads",
    "intermediate_size": "ff_width",
    "patch_size": "patch",
}
DEFAULTS: dict[str, Any] = {
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
OUTSIDE = {
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
}
UNUSED = {"vision_use_head", "attention_dropout"}  # a head beside ours, and what is 0 when sampling


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
        keys = DEFAULTS | given
        outside = {key: config.get(key, usual) for key, usual in OUTSIDE.items()}
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
            **{ours: keys[theirs] for theirs, ours in SIZES.items()},
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
        keys: dict[str, Any] = {key: getattr(tower, ours) for key, ours in SIZES.items()}
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
        return {VISION_KEY: keys} | dict(zip(OUTSIDE, ids, strict=True))

    def _check(self, keys: Config) -> None:
        check_known(keys, {*DEFAULTS} | UNUSED, "siglip")
        check_whole(keys, [*SIZES, "image_size"])
        wanted = {key: DEFAULTS[key] for key in ("hidden_act", "num_channels")}
        got = {key: keys[key] for key in wanted}
        if got != wanted:
            raise ValueError(f"a vision tower with {got}; supported is {wanted}")
        if keys["image_size"] % keys["patch_size"]:
            raise ValueError(
                f"image_size={keys['image_size']}; expected a multiple of patch_size="
                f"{keys['patch_size']}"
            )
