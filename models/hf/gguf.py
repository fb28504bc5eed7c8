"""GGUF files (https://huggingface.co/docs/hub/gguf) as Hugging Face directories.

The weights of such a file are mostly quantized. They are restored to floats one array at a time.
"""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.files import check_new_directory, whole_directory, write_shards
from jaxrl_llm.models.parameters import declare

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral's files say so, too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
TOKEN_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile(NamedTuple):
    """A file that is open: its metadata, and its arrays by their Hugging Face names."""

    metadata: dict[str, Any]
    tensors: dict[str, Any]


def convert_gguf(
    path: str | Path,
    directory: str | Path,
    *,
    dtype: DTypeLike = "float32",
    tokenizer: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a GGUF file's model and tokenizer as a Hugging Face directory.

    The directory appears complete or not at all. One array is in memory at a time.

    Args:
        path: Of the file: a model of Llama's, Qwen 2's or Qwen 3's architecture.
        directory: To create; it must not exist, unless empty.
        dtype: Of the saved arrays: float32, bfloat16 or float16.
        tokenizer: Directory or repository whose tokenizer is taken instead of the file's, which
            transformers can only read where torch is installed.
        max_shard_bytes: Size above which the arrays are split over several files.

    Raises:
        ImportError: The package gguf is not installed, or torch, where it is needed.
        FileExistsError: The directory exists and is not empty.
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or its model is not supported.
    """
    path, directory = Path(path), Path(directory)
    check_new_directory(directory, dtype)
    file = open_gguf(path)
    config = config_of_gguf(file, path)
    with whole_directory(directory) as place:
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shapes = {name: _shape(tensor) for name, tensor in file.tensors.items()}
        _check_arrays(path, place, shapes)
        write_shards(
            place,
            shapes,
            _arrays(file, config),
            dict.fromkeys(shapes, np.dtype(dtype)),
            max_bytes=max_shard_bytes,
        )
        _save_tokenizer(path, place, tokenizer)


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file.

    Raises:
        ImportError: The package gguf is not installed.
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or has arrays that we do not know.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(
            f"{path}: to read GGUF files, install the package gguf: pip install 'jaxrl_llm[gguf]'"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no GGUF file, or damaged or truncated: {error}") from error
    tensors, unknown = {}, []
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        tensors[name] = tensor
        if name is None:
            unknown.append(tensor.name)
    if unknown:
        raise ValueError(f"{path}: the arrays {unknown} are not supported")
    return GGUFFile(metadata, tensors)


def _hf_name(name: str) -> str | None:
    """Return the name of an array in a Hugging Face directory.

    >>> _hf_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    prefix = "" if layer is None else f"model.layers.{layer}."
    known = (WHOLE if layer is None else IN_LAYERS).get(part)
    return known and f"{prefix}{known}.{kind}"


def config_of_gguf(file: GGUFFile, path: Path) -> dict[str, Any]:
    """Return the `config.json` of a file's model.

    Raises:
        ValueError: The architecture, or its positions, are not supported, or a size is missing.
    """
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path}: the architecture is {architecture!r}, expected one of {[*ARCHITECTURES]}"
        )
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{path}: rope.scaling.type={scaling!r}, expected none")
    sizes = {name: metadata.get(f"{architecture}.{name}") for name in (*SIZES, *OPTIONAL)}
    missing = [name for name in SIZES if sizes[name] is None]
    if missing:
        raise ValueError(f"{path}: the metadata {missing} are missing")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": _shape(file.tensors["model.embed_tokens.weight"])[0],
        "tie_word_embeddings": "lm_head.weight" not in file.tensors,
        "rope_theta": 10000.0,
    }
    keys = SIZES | OPTIONAL
    config |= {keys[name]: value for name, value in sizes.items() if value is not None}
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if architecture == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in file.tensors
    for theirs, ours in TOKEN_IDS.items():
        if (token := metadata.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[ours] = token
    return config


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return an array's shape; a file has its axes the other way round."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _arrays(file: GGUFFile, config: dict[str, Any]) -> Iterator[np.ndarray]:
    """Restore the arrays to float32, one after another."""
    from gguf.quants import dequantize

    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, tensor in file.tensors.items():
        array = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
        match = re.search(r"self_attn\.([qk])_proj\.", name)
        if match is not None and config["model_type"] == "llama":
            array = _halves_apart(array, heads[match.group(1)])
        yield array


def _halves_apart(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the outputs of each head, whose rotated pairs lie side by side in Llama's files.

    Here, as in transformers, the first and the second numbers of all pairs are two halves.

    >>> _halves_apart(np.arange(8)[:, None], 2).ravel().tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _check_arrays(path: Path, directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Compare the arrays of a file with those of the model that its config describes."""
    expected = {
        name: leaf.hf_shape
        for leaf in jax.tree.leaves(declare(read_spec(directory)))
        for name, _ in leaf.hf_indices()
    }
    problems = [
        f"{name}: got {shapes.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in sorted(shapes.keys() | expected.keys())
        if shapes.get(name) != expected.get(name)
    ]
    if problems:
        raise ValueError(f"{path}: the arrays do not fit the metadata:\n  " + "\n  ".join(problems))


def _save_tokenizer(path: Path, directory: Path, source: str | Path | None) -> None:
    from transformers import AutoTokenizer

    load = functools.partial(AutoTokenizer.from_pretrained, str(source))
    if source is None:
        load = functools.partial(AutoTokenizer.from_pretrained, path.parent, gguf_file=path.name)
    try:
        load().save_pretrained(directory)
    except ImportError as error:
        raise ImportError(
            f"{path}: transformers reads a GGUF file's tokenizer with torch, which is not here: "
            "install torch, or name a directory with the tokenizer (--tokenizer)"
        ) from error
