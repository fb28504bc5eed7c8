"""The language model of one that sees images, against `transformers`: read, saved whole, scored."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import load_file as torch_file
from safetensors.torch import save_file as save_torch_file

from jaxrl_llm.models.hf.config import config_to_save, make_config, read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.rollout.vllm.engine import WeightBuffer
from jaxrl_llm.rollout.vllm.setup import language_model
from tests.parity.reference import (
    assert_near,
    load,
    our_logits,
    packed_batch,
    randomize,
    their_logits,
    their_packed_logits,
)

pytestmark = pytest.mark.guards("models/hf/", "models/delta.py")

TEXT = dict(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    tie_word_embeddings=True,
)
DENSE = dict(intermediate_size=40)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    shared_expert_intermediate_size=14,
)
VISION = dict(
    depth=1,
    hidden_size=8,
    intermediate_size=12,
    num_heads=2,
    patch_size=4,
    out_hidden_size=24,
    num_position_embeddings=16,
)
NAMES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
TOKENS = {name: 57 + i for i, name in enumerate(NAMES)}  # which the rows here do not have


def make(name, text):
    """A model that sees images, with sections of positions for them as in the published ones."""
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5} | sections
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | text | {"rope_parameters": rope},
        vision_config=VISION,
        tie_word_embeddings=True,
        **TOKENS,
    )
    config._experts_implementation = "eager"
    return randomize(getattr(transformers, f"{name}ForConditionalGeneration")(config))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dense")
    model = make("Qwen3_5", DENSE)
    model.save_pretrained(directory)
    return model, directory


def rows():
    tokens, positions, segment_ids = packed_batch(57)
    return tokens, positions, segment_ids


def test_logits_of_text_equal(dense):
    model, directory = dense
    params, spec = load(directory)
    tokens, positions, segment_ids = rows()
    model.config.vocab_size = spec.vocab_size
    theirs, real = their_packed_logits(model, tokens, segment_ids), segment_ids > 0
    ours = np.asarray(our_logits(params, spec, tokens, positions, segment_ids))
    assert_near(ours[real], theirs[real])
    assert spec.hf_prefix == "model.language_model."


def test_an_export_is_the_whole_model(dense, tmp_path):
    model, source = dense
    params, spec = load(source)
    changed = params | {"embed": params["embed"] + 1}
    save_params(tmp_path / "x", changed, spec, source=source, dtype=np.float32)
    before, after = (load_file(place / "model.safetensors") for place in (source, tmp_path / "x"))
    assert before.keys() == after.keys()
    assert any(name.startswith("model.visual.") for name in after)
    for name, value in before.items():
        moved = name == "model.language_model.embed_tokens.weight"
        np.testing.assert_array_equal(after[name], value + moved)
    original, exported = (
        json.loads((p / "config.json").read_text()) for p in (source, tmp_path / "x")
    )
    assert exported == original
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "x", output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(loaded) is type(model)


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
    image = {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, dtype=loaded.dtype),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]]),
    }
    seen, start, end = (TOKENS[NAMES[i]] for i in (0, 2, 3))
    with torch.no_grad():
        tokens = torch.tensor([[5, start, *[seen] * 4, end, 7]])
        assert torch.isfinite(loaded(input_ids=tokens, **image).logits).all()


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


def test_parts_of_a_config_say_the_dtype_too(dense, tmp_path):
    config = json.loads((dense[1] / "config.json").read_text())
    config["text_config"]["dtype"] = "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    saved = config_to_save(read_spec(tmp_path), tmp_path, np.dtype("float16"))
    assert saved["dtype"] == saved["text_config"]["dtype"] == "float16"
    assert "dtype" not in saved["vision_config"]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("outside", [True, False, None])
def test_the_outer_config_says_whether_the_head_is_tied(dense, inside, outside, tmp_path):
    """As in transformers; where it says nothing, the inner one does."""
    config = json.loads((dense[1] / "config.json").read_text())
    config |= {"tie_word_embeddings": outside}
    if outside is None:
        del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = inside
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).tied_embeddings == (inside if outside is None else outside)


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
        tokens = rows()[0]
        np.testing.assert_array_equal(their_logits(again, tokens), their_logits(text, tokens))


def test_keys_of_the_language_model_that_are_not_there(dense, tmp_path):
    config = json.loads((dense[1] / "config.json").read_text()) | {"text_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"text_config=None; expected the keys of the language"):
        read_spec(tmp_path)


HEADS = {"value_head": "Qwen3_5ForTokenClassification"}
HEADS |= {"reward_head": "Qwen3_5ForSequenceClassification"}


@pytest.mark.parametrize("head", HEADS)
def test_heads_load_in_transformers(dense, head, tmp_path):
    params, spec = load(dense[1])
    spec = dataclasses.replace(spec, **{head: True})
    scored = params | {"score": np.full((spec.hidden_size, 1), 0.5, np.float32)}
    if head == "value_head":
        scored |= {"score_bias": np.ones(1, np.float32)}
    save_params(tmp_path / "x", scored, spec, source=dense[1], dtype=np.float32)
    assert read_spec(tmp_path / "x") == spec
    loaded, report = getattr(transformers, HEADS[head]).from_pretrained(
        tmp_path / "x", output_loading_info=True
    )
    assert not any(report.values()), report
    np.testing.assert_array_equal(loaded.score.weight.detach().numpy(), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_experts_of_one_that_sees_images(fused, tmp_path):
    """Each matrix of an expert by itself, and as the published checkpoints join them."""
    model = make("Qwen3_5Moe", EXPERTS)
    model.save_pretrained(tmp_path, save_original_format=not fused)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.endswith("experts.gate_up_proj") for name in names) == fused
    spec = read_spec(tmp_path)
    tokens, positions, segment_ids = rows()
    model.config.vocab_size = spec.vocab_size
    theirs, real = their_packed_logits(model, tokens, segment_ids), segment_ids > 0
    ours = our_logits(load_params(tmp_path, spec), spec, tokens, positions, segment_ids)
    assert_near(np.asarray(ours)[real], theirs[real])
    scored = "no sequence classifier for Qwen3_5Moe"
    with pytest.raises(ValueError, match=scored):
        config_to_save(dataclasses.replace(spec, reward_head=True), tmp_path, np.dtype(np.float32))
