"""Our models against `transformers`, for every family, from the files that it writes."""

import copy
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.decoder import Decoder, with_value_head
from jaxrl_llm.models.hf.config import make_config, read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.native.programs import (
    DecodeState,
    PrefillChunk,
    decode,
    gather_pages,
    make_pool,
    prefill,
)
from jaxrl_llm.rollout.native.sampler import BatchSamplingParams
from tests.parity.reference import (
    assert_near,
    batch,
    load,
    our_logits,
    packed_batch,
    randomize,
    their_logits,
    their_packed_logits,
)

FAMILIES = {
    "Qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "Qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "Llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "Mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "Gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "Gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "Olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
    "SmolLM3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "Phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
BASE = dict(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=40,
    rope_parameters=DEFAULT,
    tie_word_embeddings=True,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = dict(num_hidden_layers=3, sliding_window=4, query_pre_attn_scalar=10)
OWN = {  # what every model of a family has here
    "Gemma2": GEMMA | dict(attn_logit_softcapping=3.0, final_logit_softcapping=4.0),
    "Gemma3": GEMMA
    | dict(
        layer_types=MIXED,
        rope_parameters={
            "full_attention": DEFAULT | {"rope_theta": 1e3},
            "sliding_attention": DEFAULT,
        },
    ),
}
YARN = DEFAULT | dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = DEFAULT | dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LINEAR = DEFAULT | dict(rope_type="linear", factor=3.0)
LONGROPE = DEFAULT | dict(  # 6 of 8 dimensions are rotated
    rope_type="longrope",
    short_factor=[1.0, 1.2, 1.9],
    long_factor=[1.5, 4.0, 9.0],
    partial_rotary_factor=0.75,
)
PHI = dict(hidden_size=32, head_dim=8, rope_parameters=LONGROPE)
OLMO = dict(
    num_hidden_layers=3,
    sliding_window=4,
    layer_types=MIXED,
    rope_parameters={"full_attention": YARN, "sliding_attention": DEFAULT},
)
ALL_FULL = ["full_attention"] * 3
ALL_SLIDE = ["sliding_attention"] * 3
CASES = {
    "Qwen2": ("Qwen2", {}),
    "Qwen2, untied, width of heads derived": (
        "Qwen2",
        {"tie_word_embeddings": False, "head_dim": None},
    ),
    "Qwen2, window in the last layers": (
        "Qwen2",
        dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "Qwen2, yarn": ("Qwen2", {"rope_parameters": YARN}),
    "Qwen2, yarn with its own attention factor": (
        "Qwen2",
        {"rope_parameters": YARN | dict(attention_factor=0.7, beta_fast=16, truncate=False)},
    ),
    "Qwen3": ("Qwen3", {}),
    "Qwen3, untied, one kv head, wide heads": (
        "Qwen3",
        dict(tie_word_embeddings=False, num_key_value_heads=1, head_dim=16),
    ),
    "Qwen3, as many kv heads, other theta and eps": (
        "Qwen3",
        dict(
            num_key_value_heads=4, rope_parameters=DEFAULT | {"rope_theta": 1e6}, rms_norm_eps=1e-2
        ),
    ),
    "Qwen3, one layer, narrow heads": (
        "Qwen3",
        dict(num_hidden_layers=1, head_dim=2, intermediate_size=16),
    ),
    "Qwen3, biases, mixed windows": (
        "Qwen3",
        dict(
            num_hidden_layers=3,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=MIXED,
        ),
    ),
    "Llama": ("Llama", {"tie_word_embeddings": False}),
    "Llama, llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "Llama, linear, biases": (
        "Llama",
        dict(rope_parameters=LINEAR, attention_bias=True, mlp_bias=True),
    ),
    "Llama, dynamic, wide heads": (
        "Llama",
        dict(rope_parameters=LINEAR | {"rope_type": "dynamic"}, head_dim=10),
    ),
    "Llama, yarn with mscale, gelu": (
        "Llama",
        dict(
            rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5),
            hidden_act="gelu_pytorch_tanh",
            num_key_value_heads=4,
        ),
    ),
    "Mistral": ("Mistral", dict(sliding_window=5, tie_word_embeddings=False)),
    "Mistral without window": ("Mistral", dict(sliding_window=None, head_dim=8)),
    "Gemma2": ("Gemma2", {}),
    "Gemma2, untied, biases, no caps": (
        "Gemma2",
        dict(
            tie_word_embeddings=False,
            attention_bias=True,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            query_pre_attn_scalar=6,
        ),
    ),
    "Gemma2, all layers full, linear": (
        "Gemma2",
        dict(layer_types=ALL_FULL, rope_parameters=LINEAR, num_key_value_heads=1),
    ),
    "Gemma3": ("Gemma3", {}),
    "Gemma3, linear, cap, biases": (
        "Gemma3",
        dict(
            rope_parameters={"full_attention": LINEAR, "sliding_attention": DEFAULT},
            final_logit_softcapping=4.0,
            attention_bias=True,
        ),
    ),
    "Gemma3, all layers slide": ("Gemma3", {"layer_types": ALL_SLIDE}),
    "Gemma3, all layers full": ("Gemma3", {"layer_types": ALL_FULL}),
    "Olmo3": ("Olmo3", OLMO | {"tie_word_embeddings": False}),
    "Olmo3, biases, as many kv heads": (
        "Olmo3",
        OLMO | dict(attention_bias=True, num_key_value_heads=4),
    ),
    "Phi3": ("Phi3", PHI | {"original_max_position_embeddings": 32}),
    "Phi3, window, untied": (
        "Phi3",
        dict(hidden_size=32, head_dim=8, sliding_window=5, tie_word_embeddings=False),
    ),
    "SmolLM3": ("SmolLM3", dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1])),
    "SmolLM3, windows where nothing is rotated, biases": (
        "SmolLM3",
        dict(
            num_hidden_layers=3,
            no_rope_layers=[0, 1, 0],
            use_sliding_window=True,
            sliding_window=5,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
}
# one of each family with what is special to it
TYPICAL = {
    name.split(",")[0]: name
    for name in (
        "Qwen2, window in the last layers",
        "Qwen3",
        "Llama, llama3",
        "Mistral",
        "Gemma2",
        "Gemma3",
        "Olmo3",
        "SmolLM3",
        "Phi3",
    )
}
each_case = pytest.mark.parametrize("case", CASES, indirect=True)
each_family = pytest.mark.parametrize("case", TYPICAL.values(), ids=TYPICAL.keys(), indirect=True)


class Case(NamedTuple):
    """A model of transformers, where it is saved, and our spec and parameters read from there."""

    model: Any
    directory: Path
    spec: ModelSpec
    params: Params


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    family, changes = CASES[request.param]
    model, directory = reference_model(family, **changes), tmp_path_factory.mktemp("source")
    model.save_pretrained(directory)
    params, spec = load(directory)
    return Case(model, directory, spec, params)


def reference_config(family="Qwen3", **changes):
    given = BASE | OWN.get(family, {}) | changes
    given = {key: value for key, value in given.items() if (key, value) != ("head_dim", None)}
    return FAMILIES[family][0](**given, attn_implementation="eager")


def reference_model(family="Qwen3", **changes):
    torch.manual_seed(0)
    return randomize(FAMILIES[family][1](reference_config(family, **changes)))


@each_case
def test_logits_of_packed_and_padded_rows_equal(case):
    model, _, spec, params = case
    tokens, positions, segment_ids = packed_batch(spec.vocab_size)
    theirs = their_packed_logits(model, tokens, segment_ids)
    real = segment_ids > 0
    ours = np.asarray(our_logits(params, spec, tokens, positions, segment_ids))
    assert_near(ours[real], theirs[real])


WITHOUT_WINDOW = {"window": None, "windowed_layers": (), "local_rope_theta": None}
WITHOUT = {
    "Qwen2": [WITHOUT_WINDOW],
    "Qwen3": [{"qk_norm": False}],
    "Llama": [{"rope_scaling": None}],
    "Mistral": [WITHOUT_WINDOW],
    "Gemma2": [{"score_softcap": None}, {"query_scalar": None}],
    "Gemma3": [{"local_rope_theta": None}],
    "Olmo3": [{"local_rope_theta": None}],
    "SmolLM3": [{"rotary_layers": ()}, {"rotary_layers": (False,) * 3}],
    "Phi3": [{"rope_scaling": None}],
}


@each_family
def test_what_a_family_adds_matters_here(case):
    """The comparisons of this file would notice if a part of the model were left out."""
    model, _, spec, params = case
    rows = packed_batch(spec.vocab_size)
    whole = our_logits(params, spec, *rows)
    for fields in WITHOUT[type(model).__name__.removesuffix("ForCausalLM")]:
        difference = our_logits(params, dataclasses.replace(spec, **fields), *rows) - whole
        assert jnp.abs(difference)[rows[2] > 0].max() > 1e-2, fields


@pytest.mark.parametrize("original", [24, 23])
def test_all_sequences_have_the_long_factors_where_one_may_need_them(original, tmp_path):
    """transformers chooses by the longest row of a batch, here 24 tokens."""
    changes = PHI | {"original_max_position_embeddings": original}
    model = reference_model("Phi3", **changes)
    model.save_pretrained(tmp_path)
    params, spec = load(tmp_path)
    rows = batch(spec.vocab_size)
    chosen = spec.for_length(24)
    assert chosen.rope_scaling.long == (original < 24)
    assert_near(our_logits(params, chosen, *rows), their_logits(model, rows[0]))
    other = spec.for_length(24 if original == 24 else 1000)
    assert make_config(other) == make_config(spec), "what is saved has both lists"
    short = our_logits(params, spec, *rows)
    longer = our_logits(params, spec.for_length(1000), *rows)
    assert jnp.abs(short - longer).max() > 1e-2


@partial(jax.jit, static_argnames=("spec", "new", "dtype"))
def decode_greedily(params, spec, prompts, lengths, last, *, new, dtype="float32"):
    """Read all but the last token of each prompt, then decode as the native engine does."""
    count, width = prompts.shape
    size = -(-(width + new) // 2)
    table = jnp.arange(2 * count).reshape(count, 2)
    pool = make_pool(Decoder(spec), 1, 2 * count, size, slots=count, dtype=dtype)
    none, off, own = jnp.zeros(count, jnp.int32), jnp.zeros(count), jnp.arange(count)
    slots = (own, own) if pool.states else None
    chunk = PrefillChunk(table, prompts, none, lengths, table, slots)
    pool = prefill(params, Decoder(spec), pool, chunk)
    rows = DecodeState(
        tokens=last,
        positions=lengths,
        generated=none,
        left=jnp.full(count, new),
        stop_ids=jnp.full((count, 1), -1),
        sampling=BatchSamplingParams(
            none.astype("uint32"), off, top_p=off + 1, top_k=none, min_p=off
        ),
    )
    cache = gather_pages(pool, table, own if pool.states else None)
    _, drawn = decode(params, Decoder(spec), cache, rows, steps=new)
    return drawn.tokens, drawn.logprobs


@each_family
def test_greedy_continuations_are_identical(case):
    model, _, spec, params = case
    prompts, new = batch(spec.vocab_size, rows=3, length=9)[0], 12
    lengths = np.array([9, 2, 6])
    before = lengths - 1
    last = prompts[np.arange(3), before]
    answers, logprobs = decode_greedily(params, spec, prompts, before, last, new=new)
    for row, length in enumerate(lengths):
        prompt = torch.from_numpy(prompts[row : row + 1, :length])
        whole = model.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None)
        np.testing.assert_array_equal(answers[row], whole[0, length:].numpy())
        scores = jax.nn.log_softmax(their_logits(model, whole.numpy())[0, length - 1 : -1])
        chosen = np.asarray(scores)[np.arange(new), answers[row]]
        np.testing.assert_allclose(logprobs[row], chosen, atol=1e-4)


@each_family
def test_bfloat16_is_as_near_as_theirs(case):
    """In bfloat16 we are no further from float32 than transformers is, packed and padded."""
    model, _, spec, params = case
    tokens, positions, segment_ids = packed_batch(spec.vocab_size)
    real = segment_ids > 0
    exact = their_packed_logits(model, tokens, segment_ids)[real]
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    theirs = their_packed_logits(narrow, tokens, segment_ids)[real]
    ours = our_logits(params, spec, tokens, positions, segment_ids, "bfloat16")
    error = np.abs(np.asarray(ours)[real] - exact).mean()
    assert 0 < error < 1.2 * np.abs(theirs - exact).mean()


@pytest.mark.parametrize("case", ["Gemma3"], indirect=True)
def test_bfloat16_decoding_is_near_float32(case):
    """Gemma 3 has all that decoding treats in its own way: windows, two rotations, offset norms."""
    _, _, spec, params = case
    prompts, before = packed_batch(spec.vocab_size)[0][1:, :9], np.array([8])
    answers, logprobs = decode_greedily(
        params, spec, prompts, before, prompts[:, 8], new=6, dtype="bfloat16"
    )
    whole = np.concatenate([prompts, answers], axis=1)
    rows = (np.arange(15)[None], np.ones((1, 15), int))
    scores = jax.nn.log_softmax(our_logits(params, spec, whole, *rows)[0, 8:-1])
    chosen = np.asarray(scores)[np.arange(6), answers[0]]
    np.testing.assert_allclose(logprobs[0], chosen, atol=0.15)


@each_family
def test_saved_model_loads_in_transformers(case, tmp_path):
    """With a config of our own; test_loading saves with the source's."""
    model, _, spec, params = case
    saved = tmp_path / "saved"
    save_params(saved, params, spec, source=None, dtype=np.float32, max_shard_bytes=10_000)

    again, read = load(saved)
    assert read == spec
    chex.assert_trees_all_equal(again, params)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        saved, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert type(loaded) is type(model)
    assert loaded.dtype == torch.float32
    tokens = batch(spec.vocab_size)[0]
    np.testing.assert_array_equal(their_logits(loaded, tokens), their_logits(model, tokens))
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    names = model.state_dict().keys() - ({"lm_head.weight"} if spec.tied_embeddings else set())
    assert index["weight_map"].keys() == names
    assert len(set(index["weight_map"].values())) > 1


@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES.keys())
def test_configs_of_every_case_are_written_and_read(family, changes, tmp_path):
    """What we write says the same to us and, where we can compare it, to transformers."""
    reference_config(family, **changes).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architectures": [f"{family}ForCausalLM"]}))
    spec = read_spec(tmp_path)
    written = make_config(spec)
    path.write_text(json.dumps(written))
    assert read_spec(tmp_path) == spec
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    loaded.architectures = written["architectures"]
    loaded.save_pretrained(tmp_path)
    assert read_spec(tmp_path) == spec


def test_what_is_saved_is_params_and_not_the_source(tmp_path):
    model = reference_model()
    model.save_pretrained(tmp_path / "source")
    params, spec = load(tmp_path / "source")
    params["layers"]["up"] = params["layers"]["up"] * 2
    saved = tmp_path / "saved"
    save_params(saved, params, spec, source=tmp_path / "source", dtype=np.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved)
    for ours, theirs in zip(loaded.model.layers, model.model.layers, strict=True):
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight * 2)
        assert torch.equal(ours.mlp.gate_proj.weight, theirs.mlp.gate_proj.weight)


def test_bfloat16_checkpoint(tmp_path):
    model = reference_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    params, spec = load(tmp_path / "source")
    embed = model.model.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(np.asarray(params["embed"]), embed)

    save_params(tmp_path / "saved", params, spec, source=tmp_path / "source", dtype=jnp.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


@pytest.mark.parametrize("case", [TYPICAL[n] for n in ("Qwen2", "Gemma2", "Olmo3")], indirect=True)
def test_gradient_of_a_masked_loss_equals_autograd(case, tmp_path):
    """The loss is the weighted sum of the log-probs of some tokens of packed rows."""
    model, _, spec, params = case
    model = copy.deepcopy(model)
    tokens, positions, segment_ids = packed_batch(spec.vocab_size)
    rng = np.random.default_rng(1)
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    weights = (rng.normal(size=inside.shape) * inside * (rng.random(inside.shape) < 0.6)).astype(
        np.float32
    )

    def loss(params):
        scores = jax.nn.log_softmax(our_logits(params, spec, tokens, positions, segment_ids))
        chosen = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return (weights * chosen).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    total = torch.zeros(())
    for row, segment in [(0, 1), (0, 2), (0, 3), (1, 1)]:
        at = np.flatnonzero(segment_ids[row] == segment)
        piece = torch.from_numpy(tokens[row, at])[None]
        scores = torch.log_softmax(model(piece).logits[0, :-1], dim=-1)
        chosen = scores.gather(1, piece[0, 1:, None])[:, 0]
        total = total + (torch.from_numpy(weights[row, at[:-1]]) * chosen).sum()
    total.backward()
    np.testing.assert_allclose(value, total.item(), rtol=1e-5)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradient")
    expected = load_params(tmp_path / "gradient", spec)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(expected), strict=True
    ):
        scale = float(jnp.abs(theirs).max())
        assert scale > 1e-3, path
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * scale, err_msg=str(path))


def reference_critic(family="Qwen3", **changes):
    torch.manual_seed(0)
    config = FAMILIES[family][0](**BASE | OWN.get(family, {}) | {"num_labels": 1} | changes)
    return randomize(transformers.AutoModelForTokenClassification.from_config(config))


def load_critic_in_transformers(directory):
    loaded, report = transformers.AutoModelForTokenClassification.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.config.num_labels == 1
    return loaded.eval()


def test_critics_of_gemma3_cannot_be_saved(tmp_path):
    model = reference_model("Gemma3")
    model.save_pretrained(tmp_path / "source")
    critic, spec = with_value_head(*load(tmp_path / "source"))
    for source in (tmp_path / "source", None):
        with pytest.raises(ValueError, match="no token classifier for Gemma3"):
            save_params(tmp_path / "saved", critic, spec, source=source, dtype=np.float32)


@pytest.mark.parametrize(("dtype", "with_source"), [("float32", False), ("bfloat16", True)])
def test_saved_critic_loads_in_transformers(with_source, dtype, tmp_path):
    model = reference_critic().to(getattr(torch, dtype))
    source, saved = tmp_path / "source", tmp_path / "saved"
    model.save_pretrained(source)
    spec = read_spec(source)
    params = load_params(source, spec)
    np.testing.assert_array_equal(params["score"], model.score.weight.detach().float().numpy().T)
    np.testing.assert_array_equal(params["score_bias"], model.score.bias.detach().float().numpy())
    origin = source if with_source else None
    save_params(saved, params, spec, source=origin, dtype=jnp.dtype(dtype))

    assert read_spec(saved) == spec
    again = load_params(saved, spec)
    for ours, first in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, first)
    loaded = load_critic_in_transformers(saved)
    assert loaded.dtype == model.dtype
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_critic_of_a_language_model_loads_in_transformers(tied, tmp_path):
    model = reference_model(tie_word_embeddings=tied)
    source, saved = tmp_path / "source", tmp_path / "saved"
    model.save_pretrained(source)
    spec = read_spec(source)
    critic, critic_spec = with_value_head(load_params(source, spec), spec)
    critic["score_bias"] = critic["score_bias"] + 0.5
    save_params(saved, critic, critic_spec, source=source, dtype=np.float32)

    assert read_spec(saved) == critic_spec
    loaded = load_critic_in_transformers(saved)
    np.testing.assert_array_equal(their_logits(loaded, batch(spec.vocab_size)[0]), 0.5)
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name]), name


def test_classifiers_of_transformers_are_refused(tmp_path):
    for labels in (2, 3):
        reference_critic(num_labels=labels).save_pretrained(tmp_path / str(labels))
        with pytest.raises(ValueError, match=f"with {labels} labels; supported is 1"):
            read_spec(tmp_path / str(labels))
