"""Families with experts or DeltaNets against `transformers`: logits, decoding, files, gradients."""

import dataclasses
import json
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.cache import init_cache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import config_to_save, read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.moe.routing import RouterStats, load_balance_loss
from jaxrl_llm.models.moe.spec import ClippedSwiglu
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.decoders import extend, forward, forward_with_router, logits
from tests.parity.reference import randomize

pytestmark = pytest.mark.guards("models/")

VOCAB, ROWS, LENGTH = 61, 2, 12
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=20,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
QWEN3_MOE = dict(
    num_key_value_heads=2,
    head_dim=6,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    norm_topk_prob=True,
)
MIXTRAL = dict(num_key_value_heads=2, num_local_experts=4)
DEEPSEEK_V3 = dict(
    num_hidden_layers=3,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=10,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    q_lora_rank=8,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
)
GLM_4_MOE = dict(
    num_hidden_layers=3,
    num_key_value_heads=2,
    head_dim=8,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    routed_scaling_factor=2.5,
)
LINEAR, FULL = "linear_attention", "full_attention"
QWEN3_5 = dict(
    num_key_value_heads=2,
    head_dim=8,
    layer_types=[LINEAR, FULL],
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
SHARED = dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    shared_expert_intermediate_size=14,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
GPT_OSS = dict(
    num_key_value_heads=2,
    head_dim=6,
    num_local_experts=6,
    num_experts_per_tok=3,
    sliding_window=4,
    swiglu_limit=0.5,
    rope_parameters=YARN | {"truncate": False, "mscale": None, "mscale_all_dim": None},
)
CASES = {
    "Qwen3-MoE": ("Qwen3Moe", QWEN3_MOE),
    "Qwen3-MoE, weights not normalized, biased, tied": (
        "Qwen3Moe",
        QWEN3_MOE
        | {"norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True}
        | {"num_experts_per_tok": 3, "num_key_value_heads": 4},
    ),
    "Mixtral": ("Mixtral", MIXTRAL),
    "Mixtral, window, explicit head width": (
        "Mixtral",
        MIXTRAL | {"sliding_window": 4, "head_dim": 10, "num_experts_per_tok": 1},
    ),
    "DeepSeek-V3": ("DeepseekV3", DEEPSEEK_V3),
    "DeepSeek-V3, YaRN, two dense layers, two shared experts": (
        "DeepseekV3",
        DEEPSEEK_V3 | {"rope_parameters": YARN, "first_k_dense_replace": 2, "n_shared_experts": 2},
    ),
    "DeepSeek-V3, no query latent, halves rotated, no dense layer, one group": (
        "DeepseekV3",
        DEEPSEEK_V3
        | {"q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 0}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "v_head_dim": 10},
    ),
    "GLM-4.5": ("Glm4Moe", GLM_4_MOE | {"use_qk_norm": True, "attention_bias": True}),
    "MiniMax-M2": (
        "MiniMaxM2",
        MIXTRAL | {"head_dim": 8, "rotary_dim": 4, "num_experts_per_tok": 2},
    ),
    "Qwen3.5": ("Qwen3_5", QWEN3_5),
    "Qwen3.5-MoE, a longer period, half a head rotated, tied, biased": (
        "Qwen3_5Moe",
        QWEN3_5
        | SHARED
        | {"num_hidden_layers": 3, "layer_types": [LINEAR, LINEAR, FULL]}
        | {"tie_word_embeddings": True, "attention_bias": True}
        | {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "Qwen3-Next": ("Qwen3Next", QWEN3_5 | SHARED),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss, no biases in attention, all layers slide, plain rotation, tied": (
        "GptOss",
        GPT_OSS
        | {"attention_bias": False, "tie_word_embeddings": True, "swiglu_alpha": 1.0}
        | {"layer_types": ["sliding_attention"] * 2, "rope_parameters": PLAIN_ROPE},
    ),
}


def build(family, changes, **more):
    torch.manual_seed(0)
    of_text = getattr(transformers, f"{family}TextConfig", None)
    config = (of_text or getattr(transformers, f"{family}Config"))(**BASE | changes | more)
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return randomize(model)


LESS_OFTEN = {
    "gpt-oss, no biases in attention, all layers slide, plain rotation, tied",
    *(name for name in CASES if name.startswith("Qwen3.5-MoE")),  # as Qwen3-Next, but for names
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=pytest.mark.slow if name in LESS_OFTEN else ())
        for name, case in CASES.items()
    ],
)
def case(request, tmp_path_factory):
    """A model of transformers, its directory, and our spec and parameters read from there."""
    directory = tmp_path_factory.mktemp("source")
    model = build(*request.param)
    model.save_pretrained(directory)
    spec = read_spec(directory)
    return model, directory, spec, load_params(directory, spec)


@partial(jax.jit, static_argnums=1)
def our_logits(params, spec, tokens, positions, segment_ids):
    return logits(params, spec, forward(params, spec, tokens, positions, segment_ids))


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(np.ascontiguousarray(tokens))).logits.float().numpy()


def assert_close(ours, theirs, tolerance=1e-4):
    assert np.std(theirs) > 0.1  # the comparison would see a difference
    error = np.max(np.abs(np.asarray(ours) - theirs)) / np.max(np.abs(theirs))
    assert error < tolerance


def draw_rows():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))
    return tokens, np.tile(np.arange(LENGTH), (ROWS, 1)), np.ones_like(tokens)


def as_jax(*arrays):
    return tuple(jnp.asarray(array) for array in arrays)


def test_logits_equal(case):
    model, _, spec, params = case
    rows = draw_rows()
    assert_close(our_logits(params, spec, *as_jax(*rows)), their_logits(model, rows[0]))


def test_packed_and_padded_rows_equal_separate_sequences(case):
    model, _, spec, params = case
    tokens = draw_rows()[0]
    rows = [[5, 1, 4], [7]]
    positions, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
    pieces = []
    for r, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths, start=1):
            piece = slice(start, start + length)
            positions[r, piece], segment_ids[r, piece] = np.arange(length), number
            pieces.append((r, piece))
            start += length
    ours = our_logits(params, spec, *as_jax(tokens, positions, segment_ids))
    assert np.isfinite(ours).all()
    for r, piece in pieces:
        assert_close(ours[r : r + 1, piece], their_logits(model, tokens[r : r + 1, piece]))


def continue_greedily(params, spec, prompts, lengths, new):
    run = jax.jit(extend, static_argnums=1, donate_argnums=2)
    at, tokens, scores = np.array(lengths)[:, None], [], []
    index = np.arange(prompts.shape[1])
    positions = np.where(index < at, index, LENGTH)
    hidden, cache = run(params, spec, init_cache(spec, ROWS, LENGTH), prompts, positions)
    hidden = jnp.take_along_axis(hidden, at[:, :, None] - 1, axis=1)
    for done in range(new):
        scores.append(logits(params, spec, hidden[:, 0]))
        tokens.append(scores[-1].argmax(-1))
        hidden, cache = run(params, spec, cache, tokens[-1][:, None], at + done)
    return np.stack(tokens, axis=1), np.stack(scores, axis=1)


def test_greedy_continuations_and_their_logits_equal(case):
    model, _, spec, params = case
    lengths, new = [5, 3], 6
    prompts = draw_rows()[0][:, : lengths[0]]
    theirs, forced = [], []
    for prompt, length in zip(prompts, lengths, strict=True):
        with torch.no_grad():
            out = model.generate(
                torch.from_numpy(prompt[None, :length]), do_sample=False, max_new_tokens=new
            )
        theirs.append(out[0, length:].tolist())
        forced.append(their_logits(model, out.numpy())[0, length - 1 : -1])
    tokens, scores = continue_greedily(params, spec.for_decoding, prompts, lengths, new)
    assert tokens.tolist() == theirs
    assert_close(scores, np.stack(forced))


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        pytest.param(CASES[name], kernel, id=f"{name}, {form}", marks=marks)
        for name, form, kernel, marks in (
            ("gpt-oss", "rows", None, pytest.mark.slow),
            ("gpt-oss", "pages", attend_gathered, ()),
            ("Qwen3.5", "rows", None, ()),
        )
    ],
    indirect=["case"],
)
def test_the_engine_answers_as_transformers(case, kernel):
    """By sinks, windows and states, over rows gathered from pages and pages where they lie."""
    model, _, spec, params = case
    prompts, new = [[5, 1, 4, 9, 7, 30, 2], [7, 11]], 8
    settings = dataclasses.replace(EngineSettings(2, 16), dtype="float32")
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    engine = NativeEngine(Decoder(spec), settings, layout=layout, steps=4, kernel=kernel)
    try:
        engine.load(params, version=0)
        asked = SamplingParams(new, temperature=0.0)
        answers = engine.sample([Request(tuple(prompt), asked, seed=0) for prompt in prompts])
    finally:
        engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new)
        assert answer.tokens.tolist() == out[0, len(prompt) :].tolist()
        scores = jax.nn.log_softmax(their_logits(model, out.numpy())[0, len(prompt) - 1 : -1])
        chosen = np.asarray(scores)[np.arange(new), answer.tokens]
        np.testing.assert_allclose(answer.logprobs, chosen, atol=1e-4)


def changed(params, **arrays):
    """Return parameters with other values in all stacks that have such arrays."""
    return {
        stack: {n: jnp.full_like(x, arrays[n]) if n in arrays else x for n, x in layers.items()}
        if isinstance(layers, dict)
        else layers
        for stack, layers in params.items()
    }


@pytest.mark.parametrize("case", [CASES["Qwen3-Next"]], ids=["Qwen3-Next"], indirect=True)
def test_what_qwen3_next_adds_matters_here(case):
    """The comparisons of this file would notice if a part of the model were left out."""
    _, _, spec, params = case
    rows = as_jax(*draw_rows())
    whole = our_logits(params, spec, *rows)
    for name in ("attention_gate", "shared_expert_gate", "delta_gate", "delta_beta", "delta_decay"):
        without = our_logits(changed(params, **{name: 0.0}), spec, *rows)
        assert jnp.abs(without - whole).max() > 1e-2, name
    rotated = our_logits(params, dataclasses.replace(spec, rotary_fraction=1.0), *rows)
    assert jnp.abs(rotated - whole).max() > 1e-2


@pytest.mark.parametrize("case", [CASES["gpt-oss"]], ids=["gpt-oss"], indirect=True)
def test_what_gpt_oss_adds_matters_here(case):
    """The comparisons of this file would notice if a part of the model were left out."""
    _, _, spec, params = case
    rows = as_jax(*draw_rows())
    whole = our_logits(params, spec, *rows)
    zeroed = ("sinks", "router_logit_bias", "expert_gate_bias", "expert_up_bias")
    for name in (*zeroed, "expert_down_bias"):
        value = -1e9 if name == "sinks" else 0.0
        layers = params["layers"] | {name: jnp.full_like(params["layers"][name], value)}
        assert jnp.abs(our_logits(params | {"layers": layers}, spec, *rows) - whole).max() > 1e-2
    wider = dataclasses.replace(spec.moe, swiglu=ClippedSwiglu(alpha=1.702, limit=7.0))
    unclipped = our_logits(params, dataclasses.replace(spec, moe=wider), *rows)
    assert jnp.abs(unclipped - whole).max() > 1e-2


def stored_names(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].keys()


@pytest.mark.parametrize(("dtype", "with_source"), [("float32", False), ("bfloat16", True)])
def test_saved_model_is_identical_and_loads_in_transformers(case, dtype, with_source, tmp_path):
    model, source, spec, params = case
    exact = jax.tree.map(lambda x: x.astype(dtype), params)
    save_params(
        tmp_path / "saved",
        exact,
        spec,
        source=source if with_source else None,
        dtype=jnp.dtype(dtype),
        max_shard_bytes=20_000,
    )
    assert read_spec(tmp_path / "saved") == spec
    again = load_params(tmp_path / "saved", spec, dtype=dtype)
    for ours, first in zip(jax.tree.leaves(again), jax.tree.leaves(exact), strict=True):
        np.testing.assert_array_equal(ours, first)

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(report.values()), report
    assert type(loaded) is type(model)
    assert loaded.dtype == getattr(torch, dtype)
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert stored_names(tmp_path / "saved") == stored_names(tmp_path / "theirs")
    theirs = loaded.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value.to(getattr(torch, dtype)), theirs[name].to(getattr(torch, dtype)))
    if dtype == "float32":
        tokens = draw_rows()[0]
        np.testing.assert_array_equal(their_logits(loaded, tokens), their_logits(model, tokens))


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-MoE",
        pytest.param("Mixtral", marks=pytest.mark.slow),
        "DeepSeek-V3",
        "gpt-oss",
        "Qwen3-Next",
        pytest.param("Qwen3.5", marks=pytest.mark.slow),
    ],
)
def test_gradient_of_masked_log_prob_loss_equals_autograd(name, tmp_path):
    model = build(*CASES[name])
    model.save_pretrained(tmp_path / "source")
    spec = read_spec(tmp_path / "source")
    params = load_params(tmp_path / "source", spec)
    tokens, positions, segment_ids = draw_rows()
    weights = np.random.default_rng(1).normal(size=(ROWS, LENGTH - 1)).astype(np.float32)
    weights[0, :4] = 0.0

    out = model(torch.from_numpy(tokens)).logits[:, :-1].log_softmax(-1)
    chosen = out.gather(-1, torch.from_numpy(tokens[:, 1:, None]))[..., 0]
    loss = -(chosen * torch.from_numpy(weights)).sum()
    loss.backward()
    with torch.no_grad():  # write the gradients to files as if they were weights
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    theirs = load_params(tmp_path / "gradients", spec)

    def our_loss(params):
        rows = as_jax(tokens, positions, segment_ids)
        out = jax.nn.log_softmax(logits(params, spec, forward(params, spec, *rows)))
        chosen = jnp.take_along_axis(out[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return -(chosen * weights).sum()

    value, ours = jax.jit(jax.value_and_grad(our_loss))(params)
    assert float(value) == pytest.approx(loss.item(), rel=1e-4)
    ours.get("layers").pop("router_bias", None)  # has no gradient, and its buffer was not replaced
    theirs.get("layers").pop("router_bias", None)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        scale = np.abs(b).max()
        assert scale > 0, path
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-4, err_msg=str(path))


def test_load_balance_loss_of_a_model_equals_transformers(tmp_path):
    model = build("Qwen3Moe", QWEN3_MOE)
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    params = load_params(tmp_path, spec)
    tokens, positions, segment_ids = draw_rows()
    segment_ids[1, 8:] = 0
    with torch.no_grad():
        theirs = model(
            torch.from_numpy(tokens),
            attention_mask=torch.from_numpy(segment_ids),
            output_router_logits=True,
        ).aux_loss
    run = jax.jit(forward_with_router, static_argnums=1)
    _, reports = run(params, spec, *as_jax(tokens, positions, segment_ids))
    stats = RouterStats(**reports)
    assert stats.choices.shape == (2, 6)
    assert stats.tokens.tolist() == [20.0, 20.0]
    np.testing.assert_allclose(load_balance_loss(stats), theirs, rtol=1e-4)


def test_a_missing_expert_is_named(tmp_path):
    model = build("Qwen3Moe", QWEN3_MOE)
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.experts\.3\.up_proj"):
        load_params(tmp_path, spec)


def test_the_bias_of_a_bfloat16_model_stays_float32(tmp_path):
    """As transformers saves it; also where the other arrays have an odd number of entries."""
    model = build("DeepseekV3", DEEPSEEK_V3, hidden_size=25, q_lora_rank=7, vocab_size=63)
    model.save_pretrained(tmp_path / "source")
    spec = read_spec(tmp_path / "source")
    params = load_params(tmp_path / "source", spec)
    save_params(tmp_path / "x", params, spec, source=tmp_path / "source", dtype=jnp.bfloat16)
    again = load_params(tmp_path / "x", spec)["layers"]
    np.testing.assert_array_equal(again["router_bias"], params["layers"]["router_bias"])
    rounded = params["layers"]["router"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(again["router"], rounded.astype(jnp.float32))
    stored = load_file(tmp_path / "x" / "model.safetensors")
    for name, value in stored.items():
        kept = "e_score_correction_bias" in name
        assert value.dtype == (np.float32 if kept else jnp.bfloat16), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    assert loaded.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        kept = "e_score_correction_bias" in name
        # Releases of transformers differ in which other arrays they hold in float32.
        rounded = value if kept else value.to(torch.bfloat16).to(value.dtype)
        assert torch.equal(loaded.state_dict()[name].to(value.dtype), rounded), name


def test_layers_for_multi_token_prediction_are_passed_over(tmp_path):
    def add_layer(directory, number):
        stored = load_file(directory / "model.safetensors")
        norm = stored["model.norm.weight"]
        stored[f"model.layers.{number}.shared_head.norm.weight"] = norm
        stored[f"model.layers.{number}.eh_proj.weight"] = np.ones((24, 48), np.float32)
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})

    build("DeepseekV3", DEEPSEEK_V3).save_pretrained(tmp_path / "v3")
    build("Qwen3Moe", QWEN3_MOE).save_pretrained(tmp_path / "qwen")
    spec = read_spec(tmp_path / "v3")
    before = load_params(tmp_path / "v3", spec)
    add_layer(tmp_path / "v3", spec.layers)
    after = load_params(tmp_path / "v3", spec)
    chex.assert_trees_all_equal(after, before)
    save_params(tmp_path / "x", after, spec, source=tmp_path / "v3", dtype=np.float32)
    counts = [
        json.loads((tmp_path / name / "config.json").read_text())["num_nextn_predict_layers"]
        for name in ("v3", "x")
    ]
    assert counts == [1, 0], "what is saved does not claim them"
    add_layer(tmp_path / "v3", spec.layers - 1)
    with pytest.raises(ValueError, match=r"surplus: model\.layers\.2\.eh_proj\.weight"):
        load_params(tmp_path / "v3", spec)
    add_layer(tmp_path / "qwen", 2)
    with pytest.raises(ValueError, match=r"surplus: model\.layers\.2\.eh_proj\.weight"):
        load_params(tmp_path / "qwen", read_spec(tmp_path / "qwen"))


def test_those_of_glm_are_passed_over_too(tmp_path):
    build("Glm4Moe", GLM_4_MOE).save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    before = load_params(tmp_path, spec)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.3.eh_proj.weight"] = np.ones((24, 48), np.float32)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    chex.assert_trees_all_equal(load_params(tmp_path, spec), before)
    config = config_to_save(spec, tmp_path, np.dtype("float32"))
    assert config["num_nextn_predict_layers"] == 0
