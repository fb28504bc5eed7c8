"""Our models against `transformers`: Qwen3ForCausalLM, Qwen3ForTokenClassification and Llama."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxrl_llm.models.heads import token_values, with_value_head
from jaxrl_llm.models.hf import load_params, save_params
from jaxrl_llm.models.hf_config import make_config, read_spec
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.transformer import forward, logits

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

BASE = dict(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=40,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    tie_word_embeddings=True,
    max_position_embeddings=64,
)
SHAPES = {
    "grouped, tied": {},
    "untied": {"tie_word_embeddings": False},
    "wide heads, one kv head": {"num_key_value_heads": 1, "head_dim": 16},
    "as many kv heads, other theta and eps": {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-2,
    },
    "one layer, narrow heads": {"num_hidden_layers": 1, "head_dim": 2, "intermediate_size": 16},
}


def reference_model(**changes):
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE | changes))
    return randomize(model)


def randomize(model):
    """Give every array, norms included, values at which a wrong scale or order would show."""
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(around + 0.2 * torch.randn_like(parameter))
    return model.eval()


def batch(vocab_size, rows=2, length=11):
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, length))
    return tokens, np.broadcast_to(np.arange(length), tokens.shape), np.ones_like(tokens)


def our_logits(params, spec, tokens, positions, segment_ids):
    hidden = forward(
        params, spec, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segment_ids)
    )
    return np.asarray(logits(params, spec, hidden))


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal(changes, tmp_path):
    model = reference_model(**changes)
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    params = load_params(tmp_path, spec)

    rows = batch(spec.vocab_size)
    theirs = their_logits(model, rows[0])
    assert theirs.std() > 0.5  # the comparison below would see a difference
    np.testing.assert_allclose(our_logits(params, spec, *rows), theirs, atol=1e-4)


def test_logits_equal_without_qk_norm(tmp_path):
    config = transformers.LlamaConfig(**BASE)
    model = randomize(transformers.LlamaForCausalLM(config))
    model.save_pretrained(tmp_path)
    spec = ModelSpec(
        vocab_size=61,
        width=24,
        layers=2,
        heads=4,
        kv_heads=2,
        head_width=6,
        ff_width=40,
        rope_theta=1e4,
        norm_eps=config.rms_norm_eps,
        tied_embeddings=True,
        qk_norm=False,
        max_positions=64,
    )
    rows = batch(61)
    ours = our_logits(load_params(tmp_path, spec), spec, *rows)
    np.testing.assert_allclose(ours, their_logits(model, rows[0]), atol=1e-4)


def test_packed_rows_equal_separate_sequences(tmp_path):
    model = reference_model()
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    params = load_params(tmp_path, spec)

    lengths = [5, 1, 4]
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, (1, 12))
    positions = np.concatenate([np.arange(n) for n in [*lengths, 2]])[None]
    segment_ids = np.repeat([1, 2, 3, 0], [*lengths, 2])[None]
    packed = our_logits(params, spec, tokens, positions, segment_ids)
    starts = np.cumsum([0, *lengths])
    for start, length in zip(starts, lengths, strict=False):
        piece = slice(start, start + length)
        alone = their_logits(model, tokens[:, piece])
        np.testing.assert_allclose(packed[:, piece], alone, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_model_loads_in_transformers(tied, tmp_path):
    model = reference_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "source")
    spec = read_spec(tmp_path / "source")
    params = load_params(tmp_path / "source", spec)
    params["layers"]["up"] = params["layers"]["up"] * 2  # what is saved is params, not the source
    save_params(
        tmp_path / "saved",
        params,
        spec,
        source=tmp_path / "source",
        dtype=np.float32,
        max_shard_bytes=10_000,
    )

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.dtype == torch.float32
    tokens = batch(spec.vocab_size)[0]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(2)
    np.testing.assert_array_equal(their_logits(loaded, tokens), their_logits(model, tokens))


def test_saved_files_name_the_arrays_of_transformers(tmp_path):
    model = reference_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "source")
    spec = read_spec(tmp_path / "source")
    params = load_params(tmp_path / "source", spec)
    save_params(
        tmp_path / "saved",
        params,
        spec,
        source=tmp_path / "source",
        dtype=np.float32,
        max_shard_bytes=10_000,
    )
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    assert len(set(index["weight_map"].values())) > 1


def test_bfloat16_checkpoint(tmp_path):
    model = reference_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    spec = read_spec(tmp_path / "source")
    params = load_params(tmp_path / "source", spec)
    embed = model.model.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(np.asarray(params["embed"]), embed)

    save_params(tmp_path / "saved", params, spec, source=tmp_path / "source", dtype=jnp.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_config_of_a_model_without_ancestor(tmp_path):
    model = reference_model()
    model.save_pretrained(tmp_path / "source")
    spec = read_spec(tmp_path / "source")
    params = load_params(tmp_path / "source", spec)
    save_params(tmp_path / "saved", params, spec, source=None, dtype=np.float32)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = batch(spec.vocab_size)[0]
    np.testing.assert_array_equal(their_logits(loaded, tokens), their_logits(model, tokens))


def test_config_of_transformers_and_ours_agree():
    spec = ModelSpec(
        vocab_size=61,
        width=24,
        layers=2,
        heads=4,
        kv_heads=2,
        head_width=6,
        ff_width=40,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied_embeddings=True,
        max_positions=64,
    )
    theirs = transformers.Qwen3Config(**make_config(spec))
    assert theirs.rope_parameters["rope_theta"] == 1e4
    other = dataclasses.replace(spec, rope_theta=5e5, tied_embeddings=False)
    theirs = transformers.Qwen3Config(**make_config(other))
    assert theirs.rope_parameters["rope_theta"] == 5e5
    assert theirs.tie_word_embeddings is False


def reference_critic(**changes):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**BASE | {"num_labels": 1} | changes)
    return randomize(transformers.Qwen3ForTokenClassification(config))


def load_critic_in_transformers(directory):
    loaded, report = transformers.AutoModelForTokenClassification.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(report.values()), report
    assert isinstance(loaded, transformers.Qwen3ForTokenClassification)
    assert loaded.config.num_labels == 1
    return loaded.eval()


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_values_equal(changes, tmp_path):
    model = reference_critic(**changes)
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.value_head
    params = load_params(tmp_path, spec)

    tokens, positions, segment_ids = (jnp.asarray(x) for x in batch(spec.vocab_size))
    theirs = their_logits(model, np.array(tokens))[..., 0]
    assert theirs.std() > 0.5  # the comparison below would see a difference
    ours = token_values(params, forward(params, spec, tokens, positions, segment_ids))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_source", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
