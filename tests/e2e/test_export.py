"""A checkpoint as a Hugging Face directory."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import export
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.train import main as train_main
from jaxrl_llm.training import export as exporting
from tests.decoders import forward, logits
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


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/training/export.py", "jaxrl_llm/export.py", "models/hf")
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


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/training/export.py", "jaxrl_llm/export.py", "models/hf")
def test_a_pushed_model_is_the_same_when_it_is_downloaded(finished, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    logits_file = tmp_path / "logits.npy"

    def run(*words):
        env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_ours"}
        done = subprocess.run(
            [sys.executable, *words], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = tmp_path / "out"
    with HubServer().running() as hub:
        words = ("-m", "jaxrl_llm.export", finished.run_dir, out, "--push-to", "ours/adder")
        said = run(*words, "--private")
        assert said == f"wrote step 4 to {out}\npushed it to {hub.address}/ours/adder\n"
        files = {path.name: path.read_bytes() for path in out.iterdir()}
        assert files.items() <= hub.repositories["ours/adder"].files.items()
        run("-c", DOWNLOAD, "ours/adder", logits_file)
        assert hub.unknown == []
    tokens = transformers.AutoTokenizer.from_pretrained(out)("12+34=").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits.numpy()
    np.testing.assert_array_equal(np.load(logits_file), expected)


@pytest.mark.parametrize("is_pushed", [False, True])
def test_without_a_directory_only_what_was_not_pushed_stays(
    finished, tmp_path, monkeypatch, capsys, is_pushed
):
    def push_model(folder, repo_id, *, private):
        assert (folder / "config.json").exists()
        assert (repo_id, private) == ("ours/adder", False)
        if not is_pushed:
            raise exporting.PushError(f"the model is in {folder}")
        return "https://hub/ours/adder"

    monkeypatch.setattr(exporting, "check_push", lambda repo_id: None)
    monkeypatch.setattr(exporting, "push_model", push_model)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    status = export.main([str(finished.run_dir), "--push-to", "ours/adder"])
    printed = capsys.readouterr()
    if is_pushed:
        assert (status, [*tmp_path.iterdir()]) == (0, [])
        assert printed.out.endswith("pushed it to https://hub/ours/adder\n")
    else:
        (kept,) = tmp_path.glob("jaxrl_llm-*/adder")
        assert (status, printed.err) == (1, f"error: the model is in {kept}\n")


def test_without_a_directory_a_failed_export_leaves_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporting, "check_push", lambda repo_id: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert export.main(["/no/run", "--push-to", "ours/adder"]) == 2
    assert "'/no/run' is not a run" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


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
