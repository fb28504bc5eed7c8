"""Checkpoints with random quantized weights, and what these stand for."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def quantize_fp8(directory, block, change=lambda arrays: None, **more):
    """Put random numbers in float8 in place of layers' matrices; return what they stand for.

    Also the arrays as they are stored: safetensors' own reader has no float8 in numpy.
    """
    rng = np.random.default_rng(0)
    plain = load_file(directory / "model.safetensors")
    stored = dict(plain)
    for name, x in plain.items():
        is_router = name.endswith((".gate.weight", "e_score_correction_bias"))
        if x.ndim != 2 or ".layers." not in name or is_router:
            stored[name] = x.astype(ml_dtypes.bfloat16)
            plain[name] = stored[name].astype(np.float32)
            continue
        numbers = rng.integers(0, 127, x.shape).astype(np.uint8)
        numbers |= rng.integers(0, 2, x.shape).astype(np.uint8) << 7
        stored[name] = numbers.view(ml_dtypes.float8_e4m3fn)
        size = [-(-n // side) for n, side in zip(x.shape, block, strict=True)]
        scales = np.exp(rng.normal(size=size) - 5).astype(np.float32)
        stored[f"{name}_scale_inv"] = scales
        plain[name] = np.empty(x.shape, np.float32)
        for i, j in np.ndindex(x.shape):
            number = np.float32(stored[name][i, j])
            plain[name][i, j] = number * scales[i // block[0], j // block[1]]
    change(stored)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = FP8 | {"weight_block_size": [*block]} | more
    (directory / "config.json").write_text(json.dumps(config))
    return plain, stored


def quantize_mxfp4(directory):
    """Put random numbers in MXFP4 in place of the experts of a gpt-oss model."""
    rng = np.random.default_rng(0)
    stored = load_file(directory / "model.safetensors")
    for name in [name for name in stored if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        stored[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
        stored[f"{name}_scales"] = rng.integers(119, 125, shape).astype(np.uint8)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (directory / "config.json").write_text(json.dumps(config))
