"""Our models against `transformers`, from the files that it writes: a small one per mechanism.

By default those in which a mechanism is new; the slow tests run all.
"""

import copy
import functools
import json
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.decoder import Decoder, with_value_head
from jaxrl_llm.models.hf.config import config_to_save, make_config, read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.parity.reference import (
    assert_near,
    batch,
    build,
    load,
    our_logits,
    packed_batch,
    their_logits,
    their_packed_logits,
)

pytestmark = pytest.mark.guards("models/")

UNTIED = {"tie_word_embeddings": False}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = PLAIN | dict(rope_type="linear", factor=3.0)
YARN = PLAIN | dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
MSCALE = YARN | dict(beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.5)
LLAMA3 = PLAIN | dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32)
LONGROPE = PLAIN | dict(rope_type="longrope", partial_rotary_factor=0.75)  # 6 of 8 are rotated
LONGROPE |= dict(short_factor=[1.0, 1.2, 1.9], long_factor=[1.5, 4.0, 9.0])
DELTA, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 4}
TWO_ROPES = {FULL: PLAIN | {"rope_theta": 1e3}, SLIDING: PLAIN}
CAPS = dict(attn_logit_softcapping=3.0, final_logit_softcapping=4.0, query_pre_attn_scalar=10)
GEMMA3 = MIXED | dict(query_pre_attn_scalar=10, rope_parameters=TWO_ROPES)
OLMO = MIXED | UNTIED | dict(rope_parameters={FULL: YARN, SLIDING: PLAIN})
PHI = dict(hidden_size=32, head_dim=8, rope_parameters=LONGROPE)
ROUTED = UNTIED | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=10)
MIXTRAL = UNTIED | dict(num_local_experts=4, intermediate_size=20)
DEEPSEEK = UNTIED | dict(
    **dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=10, n_group=4),
    **dict(topk_group=2, first_k_dense_replace=1, num_key_value_heads=4, head_dim=4),
    **dict(q_lora_rank=8, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5),
)
GLM = UNTIED | dict(
    **dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=10, head_dim=8),
    **dict(routed_scaling_factor=2.5, use_qk_norm=True, attention_bias=True),
)
QWEN_DELTA = UNTIED | dict(
    **dict(head_dim=8, layer_types=[DELTA, FULL], linear_key_head_dim=6, linear_value_head_dim=5),
    **dict(linear_num_key_heads=2, linear_num_value_heads=4),
)
SHARED = ROUTED | dict(shared_expert_intermediate_size=14)
GPT_OSS = MIXTRAL | dict(
    **dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=4, swiglu_limit=0.5),
    rope_parameters=YARN | {"truncate": False},
)
CASES = {
    "Qwen2, window in the last layers": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=1, head_dim=None),
    ),
    "Qwen3, untied, one kv head, wide heads": (
        "Qwen3",
        UNTIED | dict(num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-2),
    ),
    "Llama, llama3": ("Llama", UNTIED | {"rope_parameters": LLAMA3}),
    "Llama, linear, biases": (
        "Llama",
        dict(rope_parameters=LINEAR, attention_bias=True, mlp_bias=True),
    ),
    "Mistral": ("Mistral", UNTIED | dict(sliding_window=5)),
    "Gemma2": ("Gemma2", MIXED | CAPS),
    "Gemma3": ("Gemma3", GEMMA3),
    "Olmo3": ("Olmo3", OLMO),
    "Phi3": ("Phi3", PHI | {"original_max_position_embeddings": 32}),
    "SmolLM3": ("SmolLM3", dict(no_rope_layers=[1, 0])),
    "Qwen3-MoE, weights not normalized, biased, tied": (
        "Qwen3Moe",
        ROUTED
        | {"norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True}
        | {"num_experts_per_tok": 3, "num_key_value_heads": 4},
    ),
    "Mixtral": ("Mixtral", MIXTRAL),
    "DeepSeek-V3, YaRN, two dense layers, two shared experts": (
        "DeepseekV3",
        DEEPSEEK
        | {"num_hidden_layers": 3, "rope_parameters": MSCALE}
        | {"first_k_dense_replace": 2, "n_shared_experts": 2},
    ),
    "DeepSeek-V3, no query latent, halves rotated, no dense layer, one group": (
        "DeepseekV3",
        DEEPSEEK
        | {"q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 0}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "v_head_dim": 10},
    ),
    "GLM-4.5": ("Glm4Moe", GLM),
    "MiniMax-M2": (
        "MiniMaxM2",
        MIXTRAL | {"head_dim": 8, "rotary_dim": 4, "num_experts_per_tok": 2},
    ),
    "Qwen3.5": ("Qwen3_5", QWEN_DELTA),
    "Qwen3-Next": ("Qwen3Next", QWEN_DELTA | SHARED),
    "gpt-oss": ("GptOss", GPT_OSS),
}
YARN_DEEPSEEK = "DeepSeek-V3, YaRN, two dense layers, two shared experts"
MECHANISMS = [name for name in CASES if name not in ("Mixtral", "GLM-4.5", "Qwen3.5")]


def by_default(*names, among=CASES):
    """Run a test with these models, and with the others where slow tests are run."""
    cases = [n if n in names else pytest.param(n, marks=pytest.mark.slow) for n in among]
    return pytest.mark.parametrize("name", cases)


class Loaded(NamedTuple):
    """A model of transformers, where it is saved, and our spec and parameters read from there."""

    model: Any
    directory: Any
    spec: ModelSpec
    params: Params


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    @functools.cache
    def load_case(name):
        family, changes = CASES[name]
        model, directory = build(family, **changes), tmp_path_factory.mktemp("source")
        model.save_pretrained(directory)
        params, spec = load(directory)
        return Loaded(model, directory, spec, params)

    return load_case


@by_default(*MECHANISMS)
def test_logits_of_packed_and_padded_rows_equal(name, loaded):
    model, _, spec, params = loaded(name)
    tokens, positions, segment_ids = packed_batch(spec.vocab_size)
    theirs = their_packed_logits(model, tokens, segment_ids)
    real = segment_ids > 0
    ours = np.asarray(our_logits(params, spec, tokens, positions, segment_ids))
    assert_near(ours[real], theirs[real])
    assert np.isfinite(ours).all()


@pytest.mark.parametrize("original", [24, 23])
def test_all_sequences_have_the_long_factors_where_one_may_need_them(original, tmp_path):
    """transformers chooses by the longest row of a batch, here 24 tokens."""
    model = build("Phi3", **PHI | {"original_max_position_embeddings": original})
    model.save_pretrained(tmp_path)
    params, spec = load(tmp_path)
    rows = batch(spec.vocab_size)
    chosen = spec.for_length(24)
    assert chosen.rope_scaling.long == (original < 24)
    assert_near(our_logits(params, chosen, *rows), their_logits(model, rows[0]))
    other = spec.for_length(24 if original == 24 else 1000)
    assert make_config(other) == make_config(spec), "what is saved has both lists"


@by_default("gpt-oss")
def test_the_engine_continues_as_transformers(name, loaded):
    """Greedily, by sinks, windows, latents and states; over rows and over pages where they lie."""
    model, _, spec, params = loaded(name)
    prompts, new = [[5, 1, 4, 9, 7, 30, 2], [7, 11]], 8
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    kernel = attend_gathered if name == "gpt-oss" else None
    settings = EngineSettings(2, 16, dtype="float32")
    engine = NativeEngine(Decoder(spec), settings, layout=layout, steps=4, kernel=kernel)
    try:
        engine.load(params, version=0)
        asked = SamplingParams(new, temperature=0.0)
        answers = engine.sample([Request(tuple(prompt), asked, seed=0) for prompt in prompts])
    finally:
        engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new)
        assert answer.tokens.tolist() == out[0, len(prompt) :].tolist()
        scores = torch.from_numpy(their_logits(model, out.numpy())[0, len(prompt) - 1 : -1])
        chosen = scores.log_softmax(-1).numpy()[np.arange(new), answer.tokens]
        np.testing.assert_allclose(answer.logprobs, chosen, atol=1e-4)


@by_default("Gemma2", among=MECHANISMS[:10])  # routers choose otherwise where numbers are rounded
def test_bfloat16_is_as_near_as_theirs(name, loaded):
    """In bfloat16 we are no further from float32 than transformers is, packed and padded."""
    model, _, spec, params = loaded(name)
    tokens, positions, segment_ids = packed_batch(spec.vocab_size)
    real = segment_ids > 0
    exact = their_packed_logits(model, tokens, segment_ids)[real]
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    theirs = their_packed_logits(narrow, tokens, segment_ids)[real]
    ours = our_logits(params, spec, tokens, positions, segment_ids, "bfloat16")
    error = np.abs(np.asarray(ours)[real] - exact).mean()
    assert 0 < error < 1.2 * np.abs(theirs - exact).mean()


def stored_names(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].keys()


@by_default(*MECHANISMS)
def test_saved_model_loads_in_transformers(name, loaded, tmp_path):
    """With a config of our own, under the names of transformers; test_loading has the source's."""
    model, _, spec, params = loaded(name)
    saved = tmp_path / "saved"
    save_params(saved, params, spec, source=None, dtype=np.float32, max_shard_bytes=10_000)
    again, read = load(saved)
    assert read == spec
    chex.assert_trees_all_equal(again, params)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        saved, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not any(report.values()), report
    assert type(theirs) is type(model)
    tokens = batch(spec.vocab_size)[0]
    np.testing.assert_array_equal(their_logits(theirs, tokens), their_logits(model, tokens))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert stored_names(saved) == stored_names(tmp_path / "theirs")


@by_default("gpt-oss", "Qwen3-Next")
def test_gradient_of_a_masked_loss_equals_autograd(name, loaded, tmp_path):
    """The loss is the weighted sum of the log-probs of some tokens of packed rows."""
    model, _, spec, params = loaded(name)
    model = copy.deepcopy(model)
    tokens, positions, segment_ids = packed_batch(spec.vocab_size)
    rng = np.random.default_rng(1)
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    weights = rng.normal(size=inside.shape) * inside * (rng.random(inside.shape) < 0.6)
    weights = weights.astype(np.float32)

    def loss(params):
        scores = jax.nn.log_softmax(our_logits(params, spec, tokens, positions, segment_ids))
        chosen = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return (weights * chosen).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    total = torch.zeros(())
    for row, segment in [(0, 1), (0, 3), (1, 1)]:
        at = np.flatnonzero(segment_ids[row] == segment)
        piece = torch.from_numpy(tokens[row, at])[None]
        scores = torch.log_softmax(model(piece).logits[0, :-1], dim=-1)
        chosen = scores.gather(1, piece[0, 1:, None])[:, 0]
        total = total + (torch.from_numpy(weights[row, at[:-1]]) * chosen).sum()
    total.backward()
    np.testing.assert_allclose(value, total.item(), rtol=1e-4)

    with torch.no_grad():  # write the gradients to files as if they were weights
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradient")
    expected = load_params(tmp_path / "gradient", spec)
    for tree in (gradient, expected):
        tree["layers"].pop("router_bias", None)  # has no gradient; its buffer was not replaced
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(expected), strict=True
    ):
        scale = float(np.abs(theirs).max())
        assert scale > 0, path
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=1e-4, err_msg=str(path))


def test_critic_of_a_language_model_loads_in_transformers(loaded, tmp_path):
    model, source, spec, params = loaded("Qwen3, untied, one kv head, wide heads")
    critic, critic_spec = with_value_head(params, spec)
    critic["score_bias"] = critic["score_bias"] + 0.5
    save_params(tmp_path / "saved", critic, critic_spec, source=source, dtype=np.float32)
    assert read_spec(tmp_path / "saved") == critic_spec
    theirs, report = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not any(report.values()), report
    np.testing.assert_array_equal(their_logits(theirs.eval(), batch(spec.vocab_size)[0]), 0.5)
    for key, value in model.model.state_dict().items():
        assert torch.equal(value, theirs.model.state_dict()[key]), key


def test_the_bias_of_a_bfloat16_model_stays_float32(tmp_path):
    """As transformers saves it; also where the other arrays have an odd number of entries."""
    model = build("DeepseekV3", **DEEPSEEK | dict(hidden_size=25, q_lora_rank=7, vocab_size=63))
    model.save_pretrained(tmp_path / "source")
    params, spec = load(tmp_path / "source")
    save_params(tmp_path / "x", params, spec, source=tmp_path / "source", dtype=jnp.bfloat16)
    again = load_params(tmp_path / "x", spec)["layers"]
    np.testing.assert_array_equal(again["router_bias"], params["layers"]["router_bias"])
    rounded = np.asarray(params["layers"]["router"]).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(again["router"], rounded)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    assert theirs.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        kept = "e_score_correction_bias" in name
        # Releases of transformers differ in which other arrays they hold in float32.
        rounded = value if kept else value.to(torch.bfloat16).to(value.dtype)
        assert torch.equal(theirs.state_dict()[name].to(value.dtype), rounded), name


@pytest.mark.parametrize("name", [YARN_DEEPSEEK, pytest.param("GLM-4.5", marks=pytest.mark.slow)])
def test_layers_for_multi_token_prediction_are_passed_over(name, loaded, tmp_path):
    def add_layer(number):
        stored = load_file(tmp_path / "model.safetensors")
        stored[f"model.layers.{number}.eh_proj.weight"] = np.ones((24, 48), np.float32)
        save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})

    model, _, spec, params = loaded(name)
    model.save_pretrained(tmp_path)
    add_layer(spec.layers)
    chex.assert_trees_all_equal(load_params(tmp_path, spec), params)
    config = config_to_save(spec, tmp_path, np.dtype("float32"))
    assert config["num_nextn_predict_layers"] == 0, "what is saved does not claim them"
    add_layer(spec.layers - 1)
    with pytest.raises(ValueError, match=f"layers.{spec.layers - 1}.eh_proj"):
        load_params(tmp_path, spec)
