"""Directories that `transformers` wrote, loaded and saved again; reward models; host memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from jaxrl_llm.models.decoder import Decoder, with_value_head
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from tests.decoders import forward, head_matrix
from tests.parity.reference import build
from tests.specs import tiny_spec

pytestmark = pytest.mark.guards("models/")

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart"
ROPE = {"rope_type": "default", "rope_theta": 1e4}
REWARD, CRITIC = "SequenceClassification", "TokenClassification"
GEMMA = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA |= {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}
DEEPSEEK = dict(
    **dict(num_experts_per_tok=2, moe_intermediate_size=10, n_routed_experts=8, n_group=4),
    **dict(topk_group=2, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=12),
    **dict(qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, num_key_value_heads=4, head_dim=4),
)
HEADS = [
    *(("Qwen3", {}, REWARD), ("Qwen3", {}, CRITIC), ("Gemma3", GEMMA, REWARD)),
    ("DeepseekV3", DEEPSEEK, REWARD),
]


def model_with_head(family="Qwen3", changes=None, kind=REWARD):
    return build(family, kind, num_labels=1, pad_token_id=0, **changes or {})


def saved_arrays(directory):
    """Every array in a directory's files, by name."""
    arrays = {}
    for path in sorted(directory.glob("*.safetensors")):
        arrays |= load_file(path)
    return arrays


def assert_same_bits(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


@pytest.mark.parametrize(("dtype", "shard_size"), [("float32", "20KB"), ("bfloat16", "5GB")])
def test_load_and_save_keep_every_bit(dtype, shard_size, tmp_path):
    """Whole and in shards, from transformers and back to it, with tokenizer and settings."""
    model = build("Qwen3", tie_word_embeddings=False).to(getattr(torch, dtype))
    source, saved = tmp_path / "source", tmp_path / "saved"
    model.generation_config.update(eos_token_id=[3, 5], temperature=0.6, do_sample=True)
    model.save_pretrained(source, max_shard_size=shard_size)
    transformers.AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(source)
    assert len([*source.glob("*.safetensors")]) > 1 or shard_size == "5GB"
    spec = read_spec(source)
    params = load_params(source, spec, dtype=jnp.dtype(dtype))
    save_params(saved, params, spec, source=source, dtype=jnp.dtype(dtype), max_shard_bytes=20_000)
    assert len([*saved.glob("*.safetensors")]) > 1
    assert_same_bits(saved_arrays(saved), saved_arrays(source))

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        saved, output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.dtype == model.dtype
    assert_same_bits(dict(loaded.state_dict()), dict(model.state_dict()))
    tokens = torch.arange(22).reshape(2, 11)
    with torch.no_grad():
        # not `model`, whose rotary frequencies .to(bfloat16) has rounded
        first = transformers.AutoModelForCausalLM.from_pretrained(source)
        assert torch.equal(loaded(tokens).logits, first(tokens).logits)
    assert loaded.generation_config.eos_token_id == [3, 5]
    assert loaded.generation_config.temperature == 0.6
    chat = [{"role": "user", "content": "1+2="}]
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(p) for p in (saved, source))
    assert ours.get_chat_template() == theirs.get_chat_template()
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)


@pytest.mark.parametrize(("family", "changes", "kind"), HEADS)
def test_scores_and_values_are_those_of_transformers(family, changes, kind, tmp_path):
    """Padded on the right there; here packed two to a row, and padded. Saved, they load there."""
    model = model_with_head(family, changes, kind)
    source, saved = tmp_path / "source", tmp_path / "saved"
    model.save_pretrained(source)
    spec = read_spec(source)
    assert (spec.reward_head, spec.value_head) == (kind == REWARD, kind == CRITIC)
    params = load_params(source, spec)

    sizes = np.array([7, 4, 9, 1])
    tokens = np.random.default_rng(0).integers(1, 61, (4, 9))
    tokens[np.arange(9) >= sizes[:, None]] = 0
    theirs = scores_of(model, tokens)
    row, start = np.array([0, 0, 1, 1]), np.array([0, 7, 0, 9])
    packed = np.zeros((3, 2, 12), np.int32)
    for i, (r, s, n) in enumerate(zip(row, start, sizes, strict=True)):
        packed[:, r, s : s + n] = tokens[i, :n], np.arange(n), np.full(n, i + 1)
    hidden = jax.jit(forward, static_argnums=1)(params, spec, *packed)
    if kind == REWARD:
        theirs = theirs[:, 0]
        places = (jnp.asarray(x) for x in (row, start, sizes))
        ours = Decoder(spec).sequence_scores(params, hidden, *places)
    else:
        real = np.arange(9) < sizes[:, None]
        theirs = theirs[real][:, 0]
        places = [np.arange(s, s + n) for s, n in zip(start, sizes, strict=True)]
        ours = Decoder(spec).token_values(params, hidden)[
            np.repeat(row, sizes), np.concatenate(places)
        ]
    assert ours.dtype == jnp.float32
    assert theirs.std() > 0.2
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    with pytest.raises(ValueError, match="logits"):
        head_matrix(params, spec)

    save_params(saved, params, spec, source=None, dtype=np.float32)
    assert read_spec(saved) == spec
    assert_same_bits(saved_arrays(saved), saved_arrays(source))
    loaded, report = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        saved, output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(loaded) is type(model)
    assert_same_bits(dict(loaded.state_dict()), dict(model.state_dict()))
    save_params(tmp_path / "again", params, spec, source=source, dtype=np.float32)
    before, after = ((path / "config.json").read_text() for path in (source, tmp_path / "again"))
    moved = {"num_nextn_predict_layers": 0} if family == "DeepseekV3" else {}
    assert json.loads(after) == json.loads(before) | moved


def scores_of(model, tokens):
    with torch.no_grad():
        mask = torch.from_numpy((tokens != 0).astype(int))
        return model(torch.from_numpy(tokens), attention_mask=mask).logits.numpy()


def test_a_sequence_without_tokens_scores_zero():
    head, none = {"score": jnp.ones((4, 1))}, jnp.zeros(1, int)
    scorer = Decoder(tiny_spec(reward_head=True))
    scores = scorer.sequence_scores(head, jnp.ones((1, 3, 4)), none, none, none)
    assert scores.tolist() == [0.0]


def test_a_critic_may_begin_as_a_reward_model(tmp_path):
    """Its value at a token is the score of the text up to there."""
    model = model_with_head()
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    critic, critic_spec = with_value_head(load_params(tmp_path, spec), spec)
    assert critic_spec.value_head and not critic_spec.reward_head
    tokens = np.random.default_rng(1).integers(1, 61, (2, 9))
    positions = jnp.tile(jnp.arange(9), (2, 1))
    hidden = forward(critic, critic_spec, jnp.asarray(tokens), positions, positions * 0 + 1)
    with torch.no_grad():
        scores = model(torch.from_numpy(tokens)).logits[:, 0].numpy()
    values = Decoder(critic_spec).token_values(critic, hidden)
    np.testing.assert_allclose(values[:, -1], scores, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_of_loading_and_saving(dtype, tmp_path):
    """A model of 1.2 GB on disk, in 500 MB files: besides itself, less than its largest array."""
    command = [sys.executable, ROOT / "benchmarks" / "memory" / "peak.py", "load", tmp_path, dtype]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    figures = json.loads(done.stdout)
    assert figures["stored_gb"] >= 1.0
    for stage in ("load", "save"):
        above = figures[f"{stage}_peak_gb"] - figures["before_gb"] - figures["model_gb"]
        assert above <= figures["largest_array_gb"] + figures["largest_stored_gb"] + 0.1, figures
