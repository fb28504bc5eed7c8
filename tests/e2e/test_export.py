"""A checkpoint as a Hugging Face directory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import export
from jaxrl_llm.models.heads import logits
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.transformer import forward

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
