"""Runs of models with experts, latent attention, and windows and soft-caps, made by transformers.

At step 1 a run compares the engine's log-probs with the trainer's, and stops if they disagree.
"""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxrl_llm import export
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.sft import main as sft_main
from tests.decoders import forward, logits
from tests.guarded import NATIVE

pytestmark = pytest.mark.guards("models/", *NATIVE)

TOKENS = np.array([[5, 9, 77, 31, 200, 258, 3]])
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
FAMILIES = {
    "Qwen3Moe": EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "DeepseekV3": EXPERTS
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "Gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "Phi3": {  # of which a run's longest sequence takes the long factors
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.0],
            "long_factor": [2.0, 9.0],
        },
    },
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
    made = getattr(transformers, f"{family}ForCausalLM")(config)
    made.save_pretrained(directory)
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


@pytest.mark.slow
def test_a_run_samples_learns_and_exports(model, trained, tmp_path, caplog):
    family, directory = model
    lines = [line for line in trained.metrics if "actor/grad_norm" in line]
    assert len(lines) == 2
    router_metrics = {"Qwen3Moe": routed("actor"), "DeepseekV3": routed("actor") | routed("critic")}
    for line in lines:
        assert line["training/rollout_probs_diff_mean"] < 1e-5
        assert line["actor/grad_norm"] > 0
        assert {name for name in line if "/router_" in name} == router_metrics.get(family, set())

    lines_of_run = [record.getMessage() for record in caplog.get_records("setup")]
    is_long = any("all take the long factors" in line for line in lines_of_run)
    assert is_long == (family == "Phi3")

    out = tmp_path / "out"
    assert export.main([str(trained.run_dir), str(out)]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    actual = our_logits(out)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(actual - our_logits(directory)).max() > 1e-3, "it was trained"


def our_logits(directory):
    spec, params = read_spec(directory), load_params(directory, read_spec(directory))
    positions = np.arange(TOKENS.shape[1])[None]
    hidden = forward(params, spec, *map(jnp.asarray, (TOKENS, positions, np.ones_like(TOKENS))))
    return np.asarray(logits(params, spec, hidden))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["DeepseekV3"], indirect=True)
@pytest.mark.parametrize(
    ("role", "kind"),
    [("actor", "AutoModelForCausalLM"), ("critic", "AutoModelForTokenClassification")],
)
def test_the_biases_of_deepseek_move_in_a_run_and_stay_float32(
    model, trained, tmp_path, role, kind
):
    out = tmp_path / "out"
    words = ["--dtype", "bfloat16", "--role", role]
    assert export.main([str(trained.run_dir), str(out), *words]) == 0
    theirs = getattr(transformers, kind).from_pretrained(out)
    bias = theirs.model.layers[1].mlp.gate.e_score_correction_bias
    assert (theirs.dtype, bias.dtype) == (torch.bfloat16, torch.float32)
    updates = 2 * 2
    steps = bias.numpy() / RATE
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
    assert 0 < np.abs(steps).max() <= updates + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("model", ["DeepseekV3"], indirect=True)
@pytest.mark.parametrize("words", REPLAYS.values(), ids=REPLAYS.keys())
def test_a_run_replays_choices_of_experts(run, model, words):
    """With stale answers, whose record is kept with them, and with those of the old policy."""
    _, directory = model
    where = (f"model.path={directory}", "validation.before=false", "steps=2")
    first, second = run(*where, *words).ok().metrics
    assert first["training/rollout_probs_diff_mean"] < 1e-5
    for line in (first, second):
        assert 0 <= line["actor/router_replaced"] < 0.5
        assert line["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen3Moe"], indirect=True)
def test_supervised_training_reports_its_routers(run, model, tmp_path):
    """The loss that it reports is that of the tokens, without the experts' balance."""
    _, directory = model
    words = ("model.random_init=false", "model.router_loss_coef=10", "steps=1")
    where = (f"model.path={directory}", f"export_to={tmp_path / 'out'}")
    (line,) = run(*where, *words, main=sft_main, config="sft.yaml").ok().metrics
    assert routed("train") <= line.keys()
    assert line["train/router_loss"] > 1.9, "balanced it is 2"
    assert line["train/loss"] == pytest.approx(np.log(BASE["vocab_size"]), abs=1)


def test_keys_of_routers_are_refused_without_such_routers(run, model):
    family, directory = model
    wrong = {
        "Qwen3Moe": ("model.router_bias_rate=0.01",),
        "DeepseekV3": ("model.router_bias_rate=0.01", "model.lora.rank=2"),  # frozen beside it
    }.get(family, ("model.router_loss_coef=0.01",))
    result = run(f"model.path={directory}", *wrong)
    assert result.status == 2
    assert f"{wrong[0]}, but" in result.err
