"""GGUF files, which the package gguf writes, become directories of the models that they hold."""

import shutil
import sys

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxrl_llm.from_gguf import main
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.gguf import convert_gguf

SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama": (gguf.MODEL_ARCH.LLAMA, {"tie_word_embeddings": False}),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, {"tie_word_embeddings": True}),
    "qwen3": (
        gguf.MODEL_ARCH.QWEN3,
        {"tie_word_embeddings": True, "head_dim": 128},
    ),  # it reads no other
}
TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
}


def made(family):
    """Return a small random model of transformers', with biases and norms that are not trivial."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **MODELS[family][1])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def pairs_together(array, heads):
    """Reorder the outputs of each head as llama.cpp's converter does for Llama."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write(path, model, kind="F32", **metadata):
    """Write a model; its arrays' names are those that the package gguf has for them."""
    config = model.config
    arch = MODELS[config.model_type][0]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = [f"<{i}>" for i in range(3)] + [chr(ord("!") + i) for i in range(36)] + ["!!"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 37)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for key, value in metadata.items():
        writer.add_string(key, value)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = pairs_together(array, heads)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        type_ = TYPES[kind] if array.ndim == 2 else TYPES["F32"]
        writer.add_tensor(theirs, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "F32"), ("llama", "Q4_1"), ("qwen2", "Q8_0"), ("qwen3", "F16"), ("qwen3", "F32")],
)
def test_the_directory_is_the_model_that_transformers_reads(tmp_path, family, kind):
    model = made(family)
    path = write(tmp_path / "model.gguf", model, kind)
    convert_gguf(path, tmp_path / "out", max_shard_bytes=100_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ours, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, expected in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], expected), name
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        logits = ours.eval()(tokens).logits
        torch.testing.assert_close(logits, theirs(tokens).logits, rtol=0, atol=1e-6)
        if kind == "F32":
            torch.testing.assert_close(logits, model(tokens).logits, rtol=0, atol=1e-6)


def test_the_tokenizer_and_its_chat_template_come_too(tmp_path):
    path = write(tmp_path / "model.gguf", made("qwen2"))
    convert_gguf(path, tmp_path / "out")
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    text = "!!#$%!"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"] and len(ours(text)["input_ids"]) > 3
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_token_id == theirs.eos_token_id == 2
    convert_gguf(path, tmp_path / "other", tokenizer="configs/quickstart", dtype="bfloat16")
    quickstart = transformers.AutoTokenizer.from_pretrained("configs/quickstart")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "other")
    assert other("12+34=")["input_ids"] == quickstart("12+34=")["input_ids"]


def test_what_can_not_be_read_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    model = made("llama")
    whole = write(tmp_path / "model.gguf", model)
    out = tmp_path / "out"

    def refused(path, *options):
        assert main([str(path), str(out), *options]) == 2
        assert not out.exists() and not list(tmp_path.glob(".out*"))
        return capsys.readouterr().err

    cut = tmp_path / "cut.gguf"
    for size in (10, 2000, whole.stat().st_size - 100):
        cut.write_bytes(whole.read_bytes()[:size])
        assert "no GGUF file, or damaged or truncated" in refused(cut)
    assert "no such file" in refused(tmp_path / "none.gguf")
    scaled = write(tmp_path / "scaled.gguf", model, **{"llama.rope.scaling.type": "yarn"})
    assert "rope.scaling.type='yarn', expected none" in refused(scaled)
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "architecture is 'bert', expected one of ['llama'," in refused(tmp_path / "bert.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'jaxrl_llm[gguf]'" in refused(whole)


def test_arrays_that_do_not_fit_are_named(tmp_path):
    model = made("llama")
    del model.model.layers[1].mlp.up_proj
    path = write(tmp_path / "model.gguf", model)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight: got nothing, expected"):
        convert_gguf(path, tmp_path / "out")


def test_a_file_as_a_models_path_is_answered_with_the_command(tmp_path):
    path = write(tmp_path / "model.gguf", made("llama"))
    with pytest.raises(
        FileNotFoundError, match=r"python -m jaxrl_llm\.from_gguf .*model\.gguf model"
    ):
        read_spec(path)


def test_a_directory_that_is_there_is_not_written_over(tmp_path):
    path = write(tmp_path / "model.gguf", made("llama"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        convert_gguf(path, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    convert_gguf(path, tmp_path / "out", tokenizer="configs/quickstart")
    assert load_file(tmp_path / "out/model.safetensors")["model.norm.weight"].shape == (64,)
