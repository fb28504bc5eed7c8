"""What whole runs are compared with: other runs, and transformers."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxrl_llm import export
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from tests.decoders import forward, logits

EXACTLY = ("optim.optimizer=sgd", "optim.schedule.value=0.1")  # Adam's first steps amplify rounding
TOKENS = np.array([[5, 9, 77, 31, 200, 258, 3]])
EVERY_SECOND = ("rollout.dump_every=2", "validation.every=2", "checkpoint.every=2")


def by_name(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def parameters(folder):
    return by_name(load_params(folder, read_spec(folder)))


def same(actual, expected):
    """Assert that two mappings from names to arrays are equal, bit for bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def files(folder):
    """Return the bytes of all of a folder's files."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def close(workshop, actual, expected, *, apart=()):
    """Assert that two runs learned the same; metrics whose names begin with `apart` may differ."""
    before = workshop.params(expected.run_dir)
    for name, value in workshop.params(actual.run_dir).items():
        np.testing.assert_allclose(value, before[name], atol=2e-6, err_msg=name)
    assert [line["step"] for line in actual.learned] == [line["step"] for line in expected.learned]
    for a, b in zip(actual.learned, expected.learned, strict=True):
        assert a.keys() == b.keys()
        for name in (name for name in b if not name.startswith(apart)):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


def exported(run_dir, out, *words):
    assert export.main([str(run_dir), str(out), *words]) == 0
    return out


def our_logits(directory):
    spec = read_spec(directory)
    params, positions = load_params(directory, spec), np.arange(TOKENS.shape[1])[None]
    hidden = forward(params, spec, *map(jnp.asarray, (TOKENS, positions, np.ones_like(TOKENS))))
    return np.asarray(logits(params, spec, hidden))


def their_logits(directory, adapter=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if adapter is not None:
        import peft  # which takes seconds

        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS)).logits.numpy()


@functools.cache
def loaded(folder, kind="CausalLM"):
    """Return a tokenizer and a model of transformers."""
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        folder, dtype=torch.float32
    )
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = None
    return transformers.AutoTokenizer.from_pretrained(folder), model.eval()


def encoded(folder, chat, **options):
    """Return the tokens of a chat, by the template of a folder's tokenizer."""
    tokenizer, _ = loaded(folder, **options)
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def distributions(folder, chat, answer):
    """Return what transformers says of the places of an answer's tokens behind a chat [T V]."""
    prompt = encoded(folder, chat)
    with torch.no_grad():
        logits = loaded(folder)[1](torch.tensor([[*prompt, *answer]])).logits[0]
    return logits[len(prompt) - 1 : -1].double().log_softmax(-1).numpy()


def random_model(folder, like, seed=1, kind="Qwen3ForCausalLM", **changes):
    """Write a random model with the tokenizer of another one, and some other keys in its config."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(like)
    for name, value in changes.items():
        setattr(config, name, value)
    getattr(transformers, kind)(config).save_pretrained(folder)
    for path in like.iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            shutil.copy(path, folder)
    return folder
