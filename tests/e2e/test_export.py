"""A checkpoint as a Hugging Face directory."""

import os
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import ModelCard

from jaxrl_llm import export
from jaxrl_llm.train import main as train_main
from jaxrl_llm.training import export as exporting
from tests.e2e.comparing import TOKENS, exported, our_logits, parameters, same, their_logits
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


DOWNLOAD = f"""
import sys
import numpy, torch, transformers
name, out = sys.argv[1:]
transformers.AutoTokenizer.from_pretrained(name)
model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
with torch.no_grad():
    numpy.save(out, model(torch.tensor({TOKENS.tolist()})).logits.numpy())
"""


@pytest.mark.slow
@EXPORTS
def test_a_pushed_model_is_the_same_when_it_is_downloaded(finished, tmp_path):
    out, logits_file = tmp_path / "out", tmp_path / "logits.npy"
    with HubServer().running() as hub:
        env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_ours"}
        push = ("-m", "jaxrl_llm.export", finished.run_dir, out, "--push-to", "ours/adder")
        for words in (push, ("-c", DOWNLOAD, "ours/adder", logits_file)):
            subprocess.run([sys.executable, *words], env=env, check=True)
        assert hub.unknown == []
        files = {path.name: path.read_bytes() for path in out.iterdir()}
        assert files.items() <= hub.repositories["ours/adder"].files.items()
    np.testing.assert_array_equal(np.load(logits_file), their_logits(out))


@pytest.mark.parametrize("is_pushed", [False, True])
def test_without_a_directory_only_what_was_not_pushed_stays(
    finished, tmp_path, monkeypatch, capsys, is_pushed
):
    error = None if is_pushed else exporting.PushError("broke off")
    pushed = Mock(return_value="https://hub/ours/adder", side_effect=error)
    monkeypatch.setattr(exporting, "check_push", lambda repo_id: None)
    monkeypatch.setattr(exporting, "push_model", pushed)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert export.main(["/no/run", "--push-to", "ours/adder"]) == 2
    assert [*tmp_path.iterdir()] == [], "a failed export leaves none"
    status = export.main([str(finished.run_dir), "--push-to", "ours/adder"])
    if is_pushed:
        assert (status, [*tmp_path.iterdir()]) == (0, [])
        assert "https://hub/ours/adder" in capsys.readouterr().out
    else:
        (kept,) = tmp_path.glob("jaxrl_llm-*/adder")
        assert status == 1 and (kept / "config.json").exists()


def test_exports_that_can_not_be_made_are_refused(finished, tmp_path, capsys, subtests):
    run_dir, out = str(finished.run_dir), str(tmp_path / "out")
    for words, name in (
        ([str(tmp_path / "none"), out], "none"),
        ([run_dir, run_dir], "exists"),
        ([run_dir, out, "--step", "3"], "[2, 4]"),
        ([run_dir, out, "--adapter"], "--adapter"),
        ([run_dir, out, "--role", "critic"], "critic"),
        ([run_dir, out, "--private"], "--push-to"),
        ([run_dir, "--push-to", "ours/adder"], "HF_HUB_OFFLINE"),
    ):
        try:
            status = export.main(words)
        except SystemExit as stopped:
            status = stopped.code
        printed = capsys.readouterr().err
        with subtests.test(words=words):
            assert status == 2 and name in printed and "Traceback" not in printed
    assert not [*tmp_path.iterdir()]
