"""A checkpoint as a Hugging Face directory."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import ModelCard

from jaxrl_llm import export
from jaxrl_llm.train import main as train_main
from jaxrl_llm.training import export as exporting
from tests.e2e.comparing import exported, our_logits, parameters, same, their_logits
from tests.runs.hub_server import HubServer

EXPORTS = pytest.mark.guards("jaxrl_llm/training/export.py", "jaxrl_llm/export.py", "models/hf")


def test_an_exported_checkpoint_is_the_model_in_transformers(
    workshop, finished, tmp_path, capsys, monkeypatch
):
    """With its tokenizer, and a card whose config trains again; the dtype can be chosen."""
    exact = exported(finished.run_dir, tmp_path / "exact")
    assert capsys.readouterr().out == f"wrote step 4 to {exact}\n"
    ours = our_logits(exact)
    np.testing.assert_allclose(ours, their_logits(exact), atol=1e-4)
    assert np.abs(ours - our_logits(workshop.base)).max() > 1e-3, "it was trained"
    same(parameters(exact), workshop.params(finished.run_dir, 4))

    out = tmp_path / "adder"
    words = ("--step", "2", "--license", "mit", "--dtype", "bfloat16")
    exported(finished.run_dir, out, *words)
    low = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert low.dtype == torch.bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "1+2="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith("<|user|>1+2=")
    for name, array in workshop.params(finished.run_dir, 2).items():
        np.testing.assert_allclose(parameters(out)[name], array, rtol=1e-2, err_msg=name)
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.library_name) == ("mit", "transformers")
    name = "val-core/arithmetic/reward/mean@1"
    before, after = (finished.metrics[step][name] for step in (0, 2))
    best = max(line.get(name, 0.0) for line in finished.metrics[:3])
    row = f"| `{name}` | {before:.3f} (step 0) | {after:.3f} (step 2) | {best:.3f} |"
    assert row in card.text
    monkeypatch.chdir(out)
    again = f"run_dir={workshop.folder()}"
    assert train_main(["--config", "training.yaml", again, "--print-config"]) == 0


def test_an_sft_run_can_be_exported(workshop, tmp_path):
    out = exported(workshop.root / "base.sft", tmp_path / "model", "--step", "40")
    np.testing.assert_array_equal(our_logits(out), our_logits(workshop.base))


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
@EXPORTS
def test_a_pushed_model_is_the_same_when_it_is_downloaded(finished, tmp_path):
    def run(*words):
        env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_ours"}
        words = [sys.executable, *words]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    out, logits_file = tmp_path / "out", tmp_path / "logits.npy"
    with HubServer().running() as hub:
        words = ("-m", "jaxrl_llm.export", finished.run_dir, out, "--push-to", "ours/adder")
        assert f"{hub.address}/ours/adder" in run(*words, "--private")
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
    assert export.main(["/no/run", "--push-to", "ours/adder"]) == 2
    assert [*tmp_path.iterdir()] == [], "a failed export leaves none"
    status = export.main([str(finished.run_dir), "--push-to", "ours/adder"])
    printed = capsys.readouterr()
    if is_pushed:
        assert (status, [*tmp_path.iterdir()]) == (0, [])
        assert "https://hub/ours/adder" in printed.out
    else:
        (kept,) = tmp_path.glob("jaxrl_llm-*/adder")
        assert status == 1 and str(kept) in printed.err


def test_exports_that_can_not_be_made_are_refused(finished, tmp_path, capsys):
    run_dir, out = str(finished.run_dir), str(tmp_path / "out")
    wrong = []
    for words, name in (
        ([str(tmp_path / "none"), out], "none"),
        ([run_dir, run_dir], "exists"),
        ([run_dir, out, "--step", "3"], "[2, 4]"),
        ([run_dir, out, "--adapter"], "--adapter"),
        ([run_dir, out, "--role", "critic"], "critic"),
        ([run_dir], "--push-to"),
        ([run_dir, out, "--private"], "--push-to"),
        ([run_dir, "--push-to", "adder"], "'adder'"),
        ([run_dir, "--push-to", "ours/adder"], "HF_HUB_OFFLINE"),
    ):
        try:
            status = export.main(words)
        except SystemExit as stopped:
            status = stopped.code
        printed = capsys.readouterr().err
        if status != 2 or name not in printed or "Traceback" in printed:
            wrong.append((words, status, printed))
    assert not wrong and not [*tmp_path.iterdir()]
