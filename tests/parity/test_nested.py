"""The language model of one that sees images, against `transformers`: read, saved whole, scored."""

import copy
import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import load_file as torch_file
from safetensors.torch import save_file as save_torch_file

from jaxrl_llm.models.hf.config import config_to_save, make_config, read_spec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.rollout.vllm.engine import WeightBuffer
from jaxrl_llm.rollout.vllm.setup import language_model
from tests.parity.reference import (
    assert_near,
    load,
    our_logits,
    packed_batch,
    their_logits,
    their_packed_logits,
)
from tests.parity.vision import WORDS, make_seeing

pytestmark = pytest.mark.guards("models/hf/", "models/delta.py")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dense")
    model = make_seeing("Qwen3_5", tied=True, tie_word_embeddings=True)
    model.save_pretrained(directory)
    return model, directory


def assert_logits_equal(model, directory):
    params, spec = load(directory)
    tokens, positions, segment_ids = packed_batch(WORDS)
    model.config.vocab_size = spec.vocab_size
    theirs, real = their_packed_logits(model, tokens, segment_ids), segment_ids > 0
    ours = np.asarray(our_logits(params, spec, tokens, positions, segment_ids))
    assert_near(ours[real], theirs[real])
    return spec


def test_logits_of_text_equal(dense):
    assert assert_logits_equal(*dense).hf_prefix == "model.language_model."


def test_an_export_in_bfloat16_has_the_dtypes_of_published_files(dense, tmp_path):
    """The decays and a norm of DeltaNets in float32; `mtp.*` and the tower to the last bit."""
    model, source = dense[0], tmp_path / "source"
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(source)
    before = torch_file(source / "model.safetensors")
    for name, value in before.items():
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            before[name] = value.float() + 1e-4
    before["mtp.fc.weight"] = torch.randn(16, 32, dtype=torch.bfloat16)
    save_torch_file(before, source / "model.safetensors", metadata={"format": "pt"})
    params, spec = load(source)
    save_params(tmp_path / "x", params, spec, source=source, dtype="bfloat16", max_shard_bytes=9000)
    after = {}
    for path in (tmp_path / "x").glob("*.safetensors"):
        after |= torch_file(path)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "x")
    assert loaded.dtype == torch.bfloat16


def test_vllm_gets_the_language_model_alone(dense, tmp_path):
    alone, config = language_model(read_spec(dense[1]), str(dense[1]), "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path)
    )
    buffer = WeightBuffer(alone, "bfloat16")
    sent = {entry.name: entry.shape for entry in buffer.entries}
    buffer.close()
    assert sent == {name: tuple(value.shape) for name, value in theirs.named_parameters()}
    buffer = WeightBuffer(alone, "bfloat16", quantized=True)
    kinds = {entry.name: entry.dtype for entry in buffer.entries}
    buffer.close()
    query = "model.layers.1.self_attn.q_proj.weight"  # joined with the gate
    assert (kinds[query], kinds[f"{query}_scale_inv"]) == ("float8_e4m3fn", "float32")
    assert kinds["model.layers.0.linear_attn.in_proj_qkv.weight"] == "bfloat16"


def test_keys_of_the_outer_config(dense, tmp_path):
    """The outer one says whether the head is tied, else the inner one."""
    config = json.loads((dense[1] / "config.json").read_text())
    for inside, outside in itertools.product((True, False), (True, False, None)):
        config["text_config"]["tie_word_embeddings"] = inside
        config["tie_word_embeddings"] = outside
        given = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(given))
        expected = inside if outside is None else outside
        assert read_spec(tmp_path).tied_embeddings == expected, (inside, outside)
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": None}))
    with pytest.raises(ValueError, match="text_config"):
        read_spec(tmp_path)


def test_a_text_model_keeps_the_names_that_it_had(dense, tmp_path):
    """transformers saves it under the names of the larger model, with a flat config."""
    text = transformers.AutoModelForCausalLM.from_pretrained(dense[1])
    text.save_pretrained(tmp_path / "text")
    params, spec = load(tmp_path / "text")
    assert spec == read_spec(dense[1])
    assert make_config(spec)["architectures"] == ["Qwen3_5ForCausalLM"]
    for source in (tmp_path / "text", None):
        saved = tmp_path / str(source is None)
        save_params(saved, params, spec, source=source, dtype=np.float32)
        again, report = transformers.AutoModelForCausalLM.from_pretrained(
            saved, output_loading_info=True
        )
        assert not any(report.values()), report
        tokens = packed_batch(WORDS)[0]
        np.testing.assert_array_equal(their_logits(again, tokens), their_logits(text, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_experts_of_one_that_sees_images(fused, tmp_path):
    """Each matrix of an expert by itself, and as the published checkpoints join them."""
    model = make_seeing("Qwen3_5Moe", tied=True)
    model.save_pretrained(tmp_path, save_original_format=not fused)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.endswith("experts.gate_up_proj") for name in names) == fused
    spec = assert_logits_equal(model, tmp_path)
    with pytest.raises(ValueError, match="Qwen3_5Moe"):
        config_to_save(dataclasses.replace(spec, reward_head=True), tmp_path, np.dtype(np.float32))
