"""A model of the benchmarks as Tunix describes it."""

import json
from pathlib import Path
from typing import Any

from tunix.models.qwen3 import model as qwen3


def model_config(job: dict[str, Any]) -> qwen3.ModelConfig:
    """Return Tunix's config of a job's model."""
    hf = json.loads((Path(job["model"]) / "config.json").read_text())
    return qwen3.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        norm_eps=hf["rms_norm_eps"],
        rope_theta=int(job["rope_theta"]),
        use_tied_embedding=True,
    )
