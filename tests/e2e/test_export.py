"""A checkpoint as a Hugging Face directory."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import export
from jaxrl_llm.models.heads import logits
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.transformer import forward
from jaxrl_llm.train import main as train_main
from tests.runs.hub_server import HubServer

TOKENS = np.array([[5, 9, 77, 31, 200, 258, 3]])


def our_logits(directory):
    spec = read_spec(directory)
    positions = np.arange(TOKENS.shape[1])[None]
    segments = np.ones_like(TOKENS)
    hidden = forward(
        load_params(directory, spec),
        spec,
        *map(jnp.asarray, (TOKENS, positions, segments)),
        dtype=jnp.float32,
    )
    return np.asarray(logits(load_params(directory, spec), spec, hidden))


def their_logits(directory):
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


@pytest.mark.parametrize(("words", "step"), [([], 4), (["--step", "2"], 2)])
def test_an_exported_checkpoint_is_the_model_in_transformers(
    workshop, finished, tmp_path, capsys, same, words, step
):
    out = tmp_path / "model"
    assert export.main([str(finished.run_dir), str(out), *words]) == 0
    assert capsys.readouterr().out == f"wrote step {step} to {out}\n"
    np.testing.assert_allclose(our_logits(out), their_logits(out), atol=1e-4)
    assert np.abs(our_logits(out) - our_logits(workshop.base)).max() > 1e-3, "it was trained"
    expected = workshop.params(finished.run_dir, step)
    spec = read_spec(out)
    leaves = jax.tree_util.tree_leaves_with_path(load_params(out, spec))
    same({jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}, expected)


def test_the_tokenizer_comes_along_and_the_dtype_can_be_chosen(finished, tmp_path):
    import transformers

    out, exact = tmp_path / "model", tmp_path / "exact"
    assert export.main([str(finished.run_dir), str(out), "--dtype", "bfloat16"]) == 0
    assert export.main([str(finished.run_dir), str(exact)]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "1+2="}]
    assert theirs.apply_chat_template(messages, tokenize=False).startswith("<|user|>1+2=")
    difference = np.abs(our_logits(out) - our_logits(exact)).max()
    assert 0 < difference < 0.1


def test_an_sft_run_can_be_exported(workshop, tmp_path):
    out = tmp_path / "model"
    assert export.main([str(workshop.root / "base.sft"), str(out), "--step", "40"]) == 0
    np.testing.assert_array_equal(our_logits(out), our_logits(workshop.base))


def test_training_goes_on_from_an_export(run, finished, tmp_path):
    out = tmp_path / "model"
    assert export.main([str(finished.run_dir), str(out)]) == 0
    result = run(f"model.path={out}", "steps=1").ok()
    last = finished.metrics[-1]["val-core/arithmetic/reward/mean@1"]
    assert result.metrics[0]["val-core/arithmetic/reward/mean@1"] == last


def test_a_card_comes_along_whose_config_trains_again(workshop, finished, tmp_path, monkeypatch):
    from huggingface_hub import ModelCard

    out = tmp_path / "adder"
    assert export.main([str(finished.run_dir), str(out), "--step", "2", "--license", "mit"]) == 0
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.library_name) == ("mit", "transformers")
    name = "val-core/arithmetic/reward/mean@1"
    before, after = (finished.metrics[step][name] for step in (0, 2))
    best = max(line.get(name, 0.0) for line in finished.metrics[:3])
    row = f"| `{name}` | {before:.3f} (step 0) | {after:.3f} (step 2) | {best:.3f} |"
    assert row in card.text
    assert (out / "learning_curve.svg").exists()
    monkeypatch.chdir(out)
    again = workshop.folder()
    words = ["--config", "training.yaml", f"run_dir={again}", "--print-config"]
    assert train_main(words) == 0


DOWNLOAD = """if True:
    import sys
    import numpy, torch, transformers
    name, out = sys.argv[1:]
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    with torch.no_grad():
        numpy.save(out, model(torch.tensor([tokenizer("12+34=").input_ids])).logits.numpy())
"""


def test_a_pushed_model_is_the_same_when_it_is_downloaded(finished, tmp_path):
    import transformers

    torch = pytest.importorskip("torch")
    logits_file = tmp_path / "logits.npy"

    def run(*words, **variables):
        env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")} | variables
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.address, "TMPDIR": str(tmp_path)}
        words = [sys.executable, *words]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False)

    with HubServer().running() as hub:
        words = ("-m", "jaxrl_llm.export", str(finished.run_dir), "--push-to", "ours/adder")
        hub.fail("POST /api/repos/create", 403)
        refused = run(*words, HF_TOKEN="hf_ours")
        assert refused.returncode == 1
        (kept,) = tmp_path.glob("jaxrl_llm-*/adder")
        assert f"`hf upload ours/adder {kept}` pushes it later" in refused.stderr

        done = run(*words, "--private", HF_TOKEN="hf_ours")
        assert done.stdout.endswith(f"pushed it to {hub.address}/ours/adder\n"), done.stderr
        assert [*tmp_path.glob("jaxrl_llm-*/adder")] == [kept], "what was pushed needs no copy"
        files = hub.repositories["ours/adder"].files
        assert {path.name: path.read_bytes() for path in kept.iterdir()}.items() <= files.items()

        stranger = run("-c", DOWNLOAD, "ours/adder", str(logits_file))
        assert stranger.returncode, "it is private"
        done = run("-c", DOWNLOAD, "ours/adder", str(logits_file), HF_TOKEN="hf_ours")
        assert done.returncode == 0, done.stderr
        assert hub.unknown == []
    tokens = transformers.AutoTokenizer.from_pretrained(kept)("12+34=").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits.numpy()
    np.testing.assert_array_equal(np.load(logits_file), expected)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "expected a directory to write, or --push-to ORG/NAME"),
        (["OUT", "--private"], 2, "--private: expected --push-to ORG/NAME, too"),
        (["--push-to", "adder"], 2, "expected a repository's name as ORG/NAME, got 'adder'"),
        (["--push-to", "ours/adder"], 2, "HF_HUB_OFFLINE is set, so nothing can be pushed"),
    ],
)
def test_what_can_not_be_pushed_is_not_exported(words, status, said, capsys, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.export._export", None)
    try:
        assert export.main(["RUN", *words]) == status
    except SystemExit as stopped:
        assert stopped.code == status
    assert said in capsys.readouterr().err
