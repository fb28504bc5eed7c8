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

BASE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 264}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
BASE |= {"max_position_embeddings": 64, "initializer_range": 0.1, "bos_token_id": None}
BASE |= {"eos_token_id": 257, "pad_token_id": 256}
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
KEYS = {  # a critic has experts of its own; choices of stale answers are kept with them
    "Qwen3Moe": ("model.router_loss_coef=0.01", "model.router_replay=old_policy"),
    "DeepseekV3": (
        *("algorithm.advantage=gae_whitened", "model.router_bias_rate=0.01"),
        *("model.router_replay=rollout", "rollout.staleness=1"),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_samples_learns_and_exports(run, workshop, tmp_path, caplog, family):
    """Two steps of two updates."""
    directory = shutil.copytree(workshop.root / "random", tmp_path / family)
    (directory / "config.json").unlink()
    torch.manual_seed(0)
    sizes = BASE | FAMILIES[family]
    if family == "DeepseekV3":
        del sizes["head_dim"]
    config = getattr(transformers, f"{family}Config")(**sizes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    # answers that score alike give no gradient
    words = KEYS.get(family, ("algorithm.entropy_coef=0.01",))
    where = (f"model.path={directory}", "checkpoint.every=2", "validation.before=false")
    trained = run(*where, *words).ok()
    assert trained.steps == [1, 2]
    for line in trained.metrics:
        assert line["actor/grad_norm"] > 0
        if family in KEYS:
            assert 0 <= line["actor/router_replaced"] < 0.5 and "actor/router_entropy" in line
        assert ("critic/router_entropy" in line) == (family == "DeepseekV3")
    assert trained.metrics[0]["training/rollout_probs_diff_mean"] < 1e-5
    assert ("long factors" in caplog.text) == (family == "Phi3")
    out = exported(trained.run_dir, tmp_path / "out")
    actual, expected = our_logits(out), their_logits(out)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(actual - our_logits(directory)).max() > 1e-3, "it was trained"
