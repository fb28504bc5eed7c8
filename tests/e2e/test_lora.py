"""Runs that train an adapter: what they hold, write, and continue from."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import peft
import pytest
import torch
import transformers

from jaxrl_llm import export
from jaxrl_llm.models.hf.adapter import read_adapter_spec
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.sft import main as sft_main
from tests.decoders import forward, logits
from tests.guarded import MODEL, UPDATE

pytestmark = [
    # peft asks transformers under a name that transformers has deprecated
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning"),
    # peft looks for its own pattern among modules, and applies it to parameters
    pytest.mark.filterwarnings("ignore:.*ignored.*gate_up_proj:RuntimeWarning"),
    pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/runs/"),
]

CONFIGS = Path(__file__).parents[2] / "configs"
LORA = ("model.lora={rank: 4, alpha: 8}", "optim.schedule.value=3e-3")
TOKENS = np.array([[5, 9, 77, 31, 200, 258, 3]])


def our_logits(directory):
    spec, params = read_spec(directory), load_params(directory, read_spec(directory))
    positions = np.arange(TOKENS.shape[1])[None]
    hidden = forward(params, spec, *map(jnp.asarray, (TOKENS, positions, np.ones_like(TOKENS))))
    return np.asarray(logits(params, spec, hidden))


def peft_logits(base, adapter):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def exported(run_dir, out, *words):
    assert export.main([str(run_dir), str(out), *words]) == 0
    return out


def arrays(run_dir):
    """Return every array of the newest checkpoint's state, by name."""
    newest = max((run_dir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    tree = ocp.PyTreeCheckpointer().restore(newest / "state")
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.fixture(scope="module")
def adapted(run):
    """Four steps with a KL to the reference, checkpoints in between."""
    return run(
        *LORA, "steps=4", "checkpoint.every=2", "validation.every=2", "algorithm.kl_loss=k3"
    ).ok()


def test_the_reference_is_the_base(adapted):
    """The adapter begins at zero: no KL at step 1, some at step 4."""
    kls = [line["actor/kl"] for line in adapted.metrics[1:]]
    assert kls[0] == 0.0
    assert kls[3] > 1e-6
    assert all(line["actor/grad_norm"] > 0 for line in adapted.metrics[1:])


def test_the_engine_samples_from_the_merged_weights(adapted):
    """At every step, and not only at the first, where the adapter adds nothing."""
    for line in adapted.metrics[1:]:
        assert line["training/rollout_probs_diff_mean"] < 1e-4


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(workshop, adapted):
    saved = arrays(adapted.run_dir)
    spec = read_spec(workshop.base)
    rank, layers = 4, spec.layers
    n, k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sides = [
        (spec.hidden_size, n),
        (n, spec.hidden_size),
        *[(spec.hidden_size, k)] * 2,
    ]  # attention
    sides += [(spec.hidden_size, spec.ff_width)] * 2 + [(spec.ff_width, spec.hidden_size)]
    adapter = 4 * layers * rank * sum(map(sum, sides))
    moments = sum(x.nbytes for name, x in saved.items() if "opt_state" in name and x.ndim)
    assert moments == 2 * adapter
    counters = 4 * 4  # updates, skipped, Adam's count and the schedule's
    assert sum(x.nbytes for x in saved.values()) == 3 * adapter + counters
    assert all("_lora_" in name for name, x in saved.items() if x.ndim)


def test_an_exported_run_is_the_base_with_the_adapter(workshop, adapted, tmp_path):
    whole = exported(adapted.run_dir, tmp_path / "whole")
    alone = exported(adapted.run_dir, tmp_path / "alone", "--adapter")
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    np.testing.assert_allclose(our_logits(whole), peft_logits(workshop.base, alone), atol=1e-4)
    assert np.abs(our_logits(whole) - our_logits(workshop.base)).max() > 1e-3, "it was trained"
    model = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(our_logits(whole), theirs, atol=1e-4)


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(workshop, same, until):
    words = (*LORA, "steps=8", "checkpoint.every=2", "algorithm.kl_loss=k3")
    folders = [workshop.folder(), workshop.folder()]
    expected = workshop.finish(workshop.start(*words, run_dir=folders[0]), folders[0]).ok()
    process = workshop.start(*words, run_dir=folders[1])
    reached = until((folders[1] / "checkpoints/2").exists, process)
    process.kill()
    process.communicate()
    assert reached, "the run ended before it could be killed"
    result = workshop.finish(workshop.start(*words, run_dir=folders[1]), folders[1]).ok()
    assert "continuing after step" in result.err
    assert result.learned == expected.learned
    same(arrays(folders[1]), arrays(folders[0]))


@pytest.mark.slow
def test_other_weights_or_another_adapter_can_not_continue_a_run(
    workshop, adapted, copy_of, tmp_path
):
    folder = copy_of(adapted)
    result = workshop(*LORA, "model.lora.rank=2", "algorithm.kl_loss=k3", "steps=6", run_dir=folder)
    assert result.status == 2
    assert "model.lora.rank: 4 -> 2" in result.err
    base = tmp_path / "base"
    shutil.copytree(workshop.base, base)
    words = (*LORA, f"model.path={base}", "checkpoint.every=1")
    first = workshop(*words, "steps=1").ok()
    shutil.rmtree(base)
    exported(adapted.run_dir, base)
    result = workshop(*words, "steps=2", run_dir=first.run_dir)
    assert result.status == 2
    assert "model.path: its contents are not those that this run began with" in result.err


@pytest.mark.slow
def test_training_goes_on_from_an_adapter_of_peft(workshop, adapted, tmp_path):
    """The adapter as it was exported, once through peft: the same policy, the base as reference."""
    alone = exported(adapted.run_dir, tmp_path / "alone", "--adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(workshop.base)
    peft.PeftModel.from_pretrained(model, alone).save_pretrained(tmp_path / "theirs")
    result = workshop(f"model.adapter={tmp_path}/theirs", "algorithm.kl_loss=k3", "steps=1").ok()
    last = adapted.metrics[-1]["val-core/arithmetic/reward/mean@1"]
    assert result.metrics[0]["val-core/arithmetic/reward/mean@1"] == last
    assert result.metrics[1]["actor/kl"] > 1e-6
    again = exported(result.run_dir, tmp_path / "again", "--adapter")
    base = read_spec(workshop.base)
    assert read_adapter_spec(again, base) == read_adapter_spec(alone, base)
    np.testing.assert_allclose(
        our_logits(exported(result.run_dir, tmp_path / "whole")),
        peft_logits(workshop.base, again),
        atol=1e-4,
    )


@pytest.mark.slow
def test_sft_trains_an_adapter_and_exports_the_whole(workshop, tmp_path):
    result = workshop(
        f"export_to={tmp_path}/out",
        f"model.path={workshop.base}",
        "model.random_init=false",
        "model.lora={rank: 2, alpha: 4, targets: [q_proj, v_proj], rslora: true}",
        "steps=4",
        main=sft_main,
        config="sft.yaml",
    ).ok()
    saved = arrays(result.run_dir)
    assert {name.split("'")[-2] for name, x in saved.items() if x.ndim} == {
        f"{name}_lora_{factor}" for name in ("query", "value") for factor in "ab"
    }
    alone = exported(result.run_dir, tmp_path / "alone", "--adapter")
    ours = our_logits(tmp_path / "out")
    np.testing.assert_allclose(ours, peft_logits(workshop.base, alone), atol=1e-4)
    np.testing.assert_array_equal(ours, our_logits(exported(result.run_dir, tmp_path / "whole")))
    assert np.abs(ours - our_logits(workshop.base)).max() > 1e-3


@pytest.mark.slow
def test_routed_experts_are_adapted(workshop, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(workshop.root / "random", base)
    (base / "config.json").unlink()
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=32,
        moe_intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=256,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(base)
    words = ("model.lora.targets=['*.experts.*']", "checkpoint.every=2", "validation.before=false")
    result = workshop(*LORA, *words, f"model.path={base}").ok()
    for line in result.metrics:
        assert line["training/rollout_probs_diff_mean"] < 1e-4
    assert {name.split("'")[-2] for name, x in arrays(result.run_dir).items() if x.ndim} == {
        f"expert_{name}_lora_{factor}" for name in ("gate", "up", "down") for factor in "ab"
    }
    whole = exported(result.run_dir, tmp_path / "whole")
    alone = exported(result.run_dir, tmp_path / "alone", "--adapter")
    np.testing.assert_allclose(our_logits(whole), peft_logits(base, alone), atol=1e-4)
    assert np.abs(our_logits(whole) - our_logits(base)).max() > 1e-3, "it was trained"


@pytest.mark.slow
def test_a_critic_beside_an_adapter_is_trained_in_full(workshop):
    result = workshop(*LORA, "algorithm.advantage=gae", "checkpoint.every=2").ok()
    saved = arrays(result.run_dir)
    assert any("critic" in name and "'score'" in name for name in saved)
    assert not any("critic" in name and "_lora_" in name for name in saved)
    assert result.metrics[-1]["critic/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [LORA, ()], ids=["adapter", "whole"])
def test_a_float8_engine_gets_the_merged_weights_and_is_corrected(workshop, words):
    """A sync whose checksum were not that of what the trainer would quantize stops the run."""
    result = workshop(*words, "rollout.quantization=fp8", "steps=2").ok()
    for line in result.metrics[1:]:
        assert 1e-4 < line["training/rollout_logprobs_diff_mean"] < 0.2
        assert line["rollout_corr/weight/max"] != 1.0


@pytest.mark.slow
def test_a_base_in_bfloat16(workshop, tmp_path):
    result = workshop(*LORA, "model.dtype=bfloat16", "algorithm.kl_loss=k3").ok()
    assert result.metrics[1]["actor/kl"] == 0.0
    whole = exported(result.run_dir, tmp_path / "whole")
    alone = exported(result.run_dir, tmp_path / "alone", "--adapter")
    np.testing.assert_allclose(our_logits(whole), peft_logits(workshop.base, alone), atol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.lora={rank: 0}"], "model.lora.rank: expected 1 or more, got 0"),
        (["model.lora={alpha: 0}"], "model.lora.alpha: expected a number above 0, got 0"),
        (["model.lora={targets: []}"], "model.lora.targets: expected at least one, got ()"),
        (["model.lora={targets: lm_head}"], "model.lora: 'lm_head' is no matrix"),
        (["model.lora={ranks: 1}"], "unknown key 'model.lora.ranks'"),
        (["model.lora={}", "model.adapter=x"], "model.adapter brings its own rank"),
        (["model.lora={}", "model.random_init=true"], "model.random_init draws a model that is"),
        (["model.adapter=/nowhere"], "model.adapter: "),
    ],
)
def test_wrong_keys(run, words, message):
    result = run(*words)
    assert result.status == 2
    assert message in result.err
    assert len(result.err.strip().splitlines()) <= 2


def test_only_a_run_with_an_adapter_has_one_to_export(finished, tmp_path, capsys):
    assert export.main([str(finished.run_dir), str(tmp_path / "out"), "--adapter"]) == 2
    assert "has no adapter: leave --adapter out" in capsys.readouterr().err
