"""Runs that train an adapter: what they hold, write, and continue from."""

import json

import numpy as np
import pytest
import transformers

from jaxrl_llm.models.hf.adapter import read_adapter_spec
from jaxrl_llm.models.hf.config import read_spec
from tests.e2e.comparing import exported, our_logits, their_logits
from tests.guarded import MODEL, UPDATE

pytestmark = [
    # peft asks transformers under a name that transformers has deprecated
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning"),
    # peft looks for its own pattern among modules, and applies it to parameters
    pytest.mark.filterwarnings("ignore:.*ignored.*gate_up_proj:RuntimeWarning"),
    pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/runs/"),
]

LORA = ("model.lora={rank: 4, alpha: 8}", "optim.schedule.value=3e-3")
SCORE = "val-core/arithmetic/reward/mean@1"


@pytest.fixture(scope="module")
def adapted(run):
    """Four steps with a KL to the reference, checkpoints in between."""
    words = ("steps=4", "checkpoint.every=2", "validation.every=2", "algorithm.kl_loss=k3")
    return run(*LORA, *words).ok()


def test_the_reference_is_the_base_and_the_engine_samples_from_merged_weights(adapted):
    """The adapter begins at zero: no KL at step 1, some at step 4."""
    kls = [line["actor/kl"] for line in adapted.metrics[1:]]
    assert kls[0] == 0.0 and kls[3] > 1e-6
    for line in adapted.metrics[1:]:
        assert line["actor/grad_norm"] > 0
        assert line["training/rollout_probs_diff_mean"] < 1e-4


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(workshop, adapted):
    saved, spec, rank = workshop.arrays(adapted.run_dir), read_spec(workshop.base), 4
    n, k, d = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden_size
    sides = [(d, n), (n, d), (d, k), (d, k)]  # attention
    sides += [(d, spec.ff_width)] * 2 + [(spec.ff_width, d)]
    adapter = 4 * spec.layers * rank * sum(map(sum, sides))
    moments = sum(x.nbytes for name, x in saved.items() if "opt_state" in name and x.ndim)
    assert moments == 2 * adapter
    counters = 4 * 4  # updates, skipped, Adam's count and the schedule's
    assert sum(x.nbytes for x in saved.values()) == 3 * adapter + counters
    assert all("_lora_" in name for name, x in saved.items() if x.ndim)


def test_an_exported_run_is_a_model_of_transformers(workshop, adapted, tmp_path):
    whole = exported(adapted.run_dir, tmp_path / "whole")
    np.testing.assert_allclose(our_logits(whole), their_logits(whole), atol=1e-4)
    assert np.abs(our_logits(whole) - our_logits(workshop.base)).max() > 1e-3, "it was trained"


@pytest.mark.slow
def test_an_exported_adapter_is_that_of_peft_and_training_goes_on_from_one(
    workshop, adapted, tmp_path
):
    """The adapter as it was exported, once through peft: the same policy, the base as reference."""
    import peft

    alone = exported(adapted.run_dir, tmp_path / "ours", "--adapter")
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    model = transformers.AutoModelForCausalLM.from_pretrained(workshop.base)
    peft.PeftModel.from_pretrained(model, alone).save_pretrained(tmp_path / "theirs")
    result = workshop(f"model.adapter={tmp_path}/theirs", "algorithm.kl_loss=k3", "steps=1").ok()
    assert result.metrics[0][SCORE] == adapted.metrics[-1][SCORE]
    assert result.metrics[1]["actor/kl"] > 1e-6
    whole = exported(result.run_dir, tmp_path / "whole")
    again = exported(result.run_dir, tmp_path / "again", "--adapter")
    np.testing.assert_allclose(our_logits(whole), their_logits(workshop.base, again), atol=1e-4)
    base = read_spec(workshop.base)
    assert read_adapter_spec(again, base) == read_adapter_spec(alone, base)
