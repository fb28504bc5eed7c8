"""Runs of models with experts, latent attention, and windows and soft-caps, made by transformers.

At step 1 a run compares the engine's log-probs with the trainer's, and stops if they disagree.
"""

import shutil

import numpy as np
import pytest
import torch
import transformers

from tests.e2e.comparing import exported, our_logits, their_logits
from tests.guarded import NATIVE

pytestmark = [pytest.mark.slow, pytest.mark.guards("models/", *NATIVE)]

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
    "vocab_size": 264,
}
RATE = 0.01
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1}
DEEPSEEK |= {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "q_lora_rank": 16}
DEEPSEEK |= {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
ROPE |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 9.0]}
FAMILIES = {
    "Qwen3Moe": EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "DeepseekV3": EXPERTS | DEEPSEEK,
    "Gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    # of which a run's longest sequence takes the long factors
    "Phi3": {"original_max_position_embeddings": 8, "rope_parameters": ROPE},
}
REPLAYS = {
    "rollout": ("model.router_replay=rollout", "rollout.staleness=1"),
    "old_policy": ("model.router_replay=old_policy",),
}


def routed(role):
    """Name the metrics of a model's routers."""
    return {f"{role}/router_{name}" for name in ("loss", "max_load", "idle", "entropy")}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, workshop):
    """A random model's directory, with the tokenizer of the quickstart."""
    family, directory = request.param, workshop.root / request.param
    shutil.copytree(workshop.root / "random", directory)
    (directory / "config.json").unlink()
    torch.manual_seed(0)
    sizes = BASE | FAMILIES[family]
    if family == "DeepseekV3":
        sizes = {name: value for name, value in sizes.items() if name != "head_dim"}
    config = getattr(transformers, f"{family}Config")(**sizes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    return family, directory


@pytest.fixture(scope="module")
def trained(run, model):
    """Two steps of two updates; of DeepSeek with a critic, which has experts of its own."""
    family, directory = model
    words = {
        "Qwen3Moe": ("model.router_loss_coef=0.01",),
        "DeepseekV3": ("algorithm.advantage=gae_whitened", f"model.router_bias_rate={RATE}"),
    }.get(family, ("algorithm.entropy_coef=0.01",))  # answers that score alike give no gradient
    where = (f"model.path={directory}", "checkpoint.every=2", "validation.before=false")
    return run(*where, *words).ok()


def test_a_run_samples_learns_and_exports(model, trained, tmp_path, caplog):
    family, directory = model
    router_metrics = {"Qwen3Moe": routed("actor"), "DeepseekV3": routed("actor") | routed("critic")}
    assert trained.steps == [1, 2]
    for line in trained.metrics:
        assert line["training/rollout_probs_diff_mean"] < 1e-5
        assert line["actor/grad_norm"] > 0
        assert {name for name in line if "/router_" in name} == router_metrics.get(family, set())
    said = [record.getMessage() for record in caplog.get_records("setup")]
    assert any("long factors" in line for line in said) == (family == "Phi3")
    out = exported(trained.run_dir, tmp_path / "out")
    actual, expected = our_logits(out), their_logits(out)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(actual - our_logits(directory)).max() > 1e-3, "it was trained"


@pytest.mark.parametrize("model", ["DeepseekV3"], indirect=True)
@pytest.mark.parametrize("words", REPLAYS.values(), ids=REPLAYS.keys())
def test_a_run_replays_choices_of_experts(run, model, words):
    """With stale answers, whose record is kept with them, and with those of the old policy."""
    where = (f"model.path={model[1]}", "validation.before=false", "steps=2")
    first, second = run(*where, *words).ok().metrics
    assert first["training/rollout_probs_diff_mean"] < 1e-5
    for line in (first, second):
        assert 0 <= line["actor/router_replaced"] < 0.5 and line["actor/grad_norm"] > 0
