"""Logits of models whose configs are drawn at random, for every family, against `transformers`.

To add a family, name its `model_type` and the options that are its own.
"""

import zlib

import numpy as np
import pytest
import torch
import transformers

from jaxrl_llm.models.hf.config import make_config, read_spec
from tests.parity.reference import (
    assert_near,
    load,
    our_logits,
    packed_batch,
    randomize,
    their_packed_logits,
)

FULL, SLIDING = "full_attention", "sliding_attention"


class Draw:
    """Options of one random config."""

    def __init__(self, *seed):
        self.rng = np.random.default_rng(seed)
        self.layers = self.one(2, 3)

    def one(self, *options):
        return options[self.rng.integers(len(options))]

    def maybe(self):
        return self.one(True, False)

    def options(self, parts):
        """Draw what a family's parts say; with a latent each query has its own keys."""
        drawn = {}
        for part in parts:
            if isinstance(part, str):
                drawn |= getattr(self, part)()
            else:
                drawn |= {key: self.one(*values) for key, values in part.items()}
        if "latent" in parts:
            drawn["num_key_value_heads"] = drawn["num_attention_heads"]
        return drawn

    def within(self, low, high):
        return float(self.rng.uniform(low, high))

    def common(self):
        heads = self.one(2, 4, 6)
        return dict(
            vocab_size=self.one(37, 61),
            hidden_size=heads * self.one(4, 6),
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=self.one(*(n for n in (1, 2, 3, 4, 6) if heads % n == 0)),
            head_dim=self.one(6, 8, 16),
            intermediate_size=self.one(20, 32),
            hidden_act=self.one("silu", "silu", "gelu_pytorch_tanh"),
            rms_norm_eps=self.one(1e-6, 1e-5, 1e-2),
            rope_parameters=self.rope(),
            tie_word_embeddings=self.maybe(),
            max_position_embeddings=64,
            initializer_range=self.one(0.02, 0.1),
        )

    def rope(self, *kinds, **more):
        kind = self.one(*(kinds or ("default", "default", "linear", "dynamic", "llama3", "yarn")))
        rope = {"rope_type": kind, "rope_theta": self.one(50.0, 1e4, 1e6)}
        if kind != "default":
            rope["factor"] = self.one(2.0, 4.0, 8.0)
        if kind in ("llama3", "yarn"):
            rope["original_max_position_embeddings"] = self.one(16, 32)
        if kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": self.one(2.0, 4.0)}
        if kind == "yarn" and self.maybe():
            rope |= {"beta_fast": self.one(8.0, 32.0), "truncate": self.maybe()}
        if kind == "yarn" and self.maybe():
            rope |= {"attention_factor": self.within(0.7, 1.3)}
        return rope | more

    def part_of_head(self):
        rope = self.rope(partial_rotary_factor=self.one(0.5, 0.75, 1.0))
        return {"head_dim": self.one(8, 16), "rope_parameters": rope}

    def long_rope(self, original=64):
        width, fraction = self.one((8, 0.5), (8, 0.75), (16, 1.0))
        kind = {"rope_type": self.one("default", "longrope")}
        if kind["rope_type"] == "longrope":
            count = int(width * fraction) // 2
            lists = ([self.within(1, 9) for _ in range(count)] for _ in range(2))
            kind |= dict(zip(("short_factor", "long_factor"), lists, strict=True))
        return {
            "hidden_size": 48,
            "num_attention_heads": 48 // width,
            "num_key_value_heads": self.one(1, 48 // width),
            "head_dim": width,
            "max_position_embeddings": self.one(1, 4) * original,
            "original_max_position_embeddings": original,
            "rope_parameters": kind | {"rope_theta": 1e4, "partial_rotary_factor": fraction},
        }

    def delta(self):
        key_heads = self.one(1, 2, 3)
        linear = [self.one("linear_attention", FULL) for _ in range(self.layers - 2)]
        return dict(
            linear_num_key_heads=key_heads,
            linear_num_value_heads=key_heads * self.one(1, 2, 3),
            linear_key_head_dim=self.one(4, 6),
            linear_value_head_dim=self.one(3, 6),
            linear_conv_kernel_dim=self.one(2, 4),
            layer_types=["linear_attention", *linear, FULL],
            attention_bias=self.maybe(),
            **self.part_of_head(),
        )

    def window(self):
        kinds = [self.one(FULL, SLIDING) for _ in range(self.layers)]
        return dict(sliding_window=self.one(2, 5, 8), layer_types=kinds)

    def two_ropes(self):
        return {"rope_parameters": {FULL: self.rope(), SLIDING: self.rope("default")}}

    def some_rotated(self):
        rotated = [self.one(0, 1) for _ in range(self.layers)]
        return {"use_sliding_window": True, "no_rope_layers": rotated}

    def dense_first(self):
        kinds = ["dense"] * self.one(0, 1) + ["sparse"] * 3
        return {"mlp_layer_types": kinds[: self.layers], "first_k_dense_replace": None}

    def sigmoid_experts(self):
        groups = self.one(1, 2, 4)
        return dict(
            n_routed_experts=8,
            num_experts_per_tok=self.one(1, 2, 4),
            moe_intermediate_size=self.one(10, 16),
            n_shared_experts=self.one(1, 2),
            first_k_dense_replace=self.one(0, 1),
            n_group=groups,
            topk_group=self.one(*(n for n in (2, 4) if n <= groups)) if groups > 1 else 1,
            norm_topk_prob=self.maybe(),
            routed_scaling_factor=self.one(1.0, 2.5),
        )

    def latent(self):
        nope, rope = self.one(4, 6), self.one(4, 6)
        return dict(
            q_lora_rank=self.one(None, 8),
            kv_lora_rank=self.one(8, 12),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            head_dim=rope,
            v_head_dim=self.one(4, nope + rope),
            rope_interleave=self.maybe(),
        )


BOTH = (True, False)
BIAS = {"attention_bias": BOTH}
CAPS = {"query_pre_attn_scalar": (6, 10, 24), "final_logit_softcapping": (None, 4.0)}
CAPS |= BIAS | {"hidden_activation": ("gelu_pytorch_tanh", "silu")}
PER_TOKEN = {"num_experts_per_tok": (1, 2, 3)}
EXPERTS = PER_TOKEN | {"num_experts": (4, 6), "moe_intermediate_size": (10, 16)}
LOCAL = PER_TOKEN | {"num_local_experts": (4, 6), "intermediate_size": (10, 16)}
SHARED = {"shared_expert_intermediate_size": (10, 14)}
CLIPPED = {"swiglu_alpha": (1.0, 1.702), "swiglu_limit": (0.5, 2.0, 7.0), "hidden_act": ["silu"]}
FAMILIES = {  # methods of `Draw`, and keys with what they are drawn from
    "qwen2": ["common", "window", {"use_sliding_window": [True]}],
    "qwen3": ["common", "window", {"use_sliding_window": [True]}, BIAS],
    "llama": ["common", BIAS, {"mlp_bias": BOTH}],
    "mistral": ["common", {"sliding_window": (None, 3, 6)}],
    "gemma2": ["common", "window", CAPS, {"attn_logit_softcapping": (None, 3.0)}],
    "gemma3_text": ["common", "window", CAPS, "two_ropes"],
    "qwen3_moe": ["common", EXPERTS, {"norm_topk_prob": BOTH}, BIAS],
    "mixtral": ["common", LOCAL, {"sliding_window": (None, 4)}],
    "deepseek_v3": ["common", "sigmoid_experts", "latent"],
    "glm4_moe": ["common", "sigmoid_experts", "part_of_head", {"use_qk_norm": BOTH}, BIAS],
    "glm4_moe_lite": ["common", "sigmoid_experts", "latent", "dense_first"],
    "minimax_m2": ["common", LOCAL, "part_of_head"],
    "olmo3": ["common", "window", "two_ropes", BIAS],
    "phi3": ["common", "long_rope", {"sliding_window": (None, 3, 100)}],
    "qwen3_5_text": ["common", "delta"],
    "qwen3_5_moe_text": ["common", "delta", EXPERTS, SHARED],
    "qwen3_next": ["common", "delta", EXPERTS, SHARED, {"norm_topk_prob": BOTH}],
    "smollm3": ["common", "window", "some_rotated", BIAS, {"mlp_bias": BOTH}],
    "gpt_oss": ["common", LOCAL, "window", BIAS, CLIPPED],
}
BY_DEFAULT = ("llama", "gemma3_text", "glm4_moe_lite", "phi3")
SEEDS = 3
CASES = [
    pytest.param(
        family, seed, marks=[] if family in BY_DEFAULT and seed == 0 else [pytest.mark.slow]
    )
    for family in FAMILIES
    for seed in range(SEEDS)
]


def random_model(family, seed):
    options = Draw(zlib.crc32(family.encode()), seed).options(FAMILIES[family])
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = transformers.AutoConfig.for_model(family, **options, **tokens)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    return options, randomize(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.guards("models/")
@pytest.mark.parametrize(("family", "seed"), CASES)
def test_logits_of_a_random_model_equal(family, seed, tmp_path):
    options, model = random_model(family, seed)
    model.save_pretrained(tmp_path)
    params, spec = load(tmp_path)
    tokens, positions, segment_ids = packed_batch(spec.vocab_size)
    theirs = their_packed_logits(model, tokens, segment_ids)
    real = segment_ids > 0
    ours = np.asarray(our_logits(params, spec, tokens, positions, segment_ids))
    print("config:", options)  # shown where it fails
    assert_near(ours[real], theirs[real])

    written = make_config(spec)
    transformers.AutoConfig.for_model(**written).save_pretrained(tmp_path / "theirs")
    again = read_spec(tmp_path / "theirs")
    assert again == spec
