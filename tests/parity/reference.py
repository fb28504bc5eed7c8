"""Models of `transformers` with random weights, and our logits beside theirs."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from tests.decoders import forward, logits

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

LENGTHS = [9, 1, 7]
BASE = dict(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=40,
    tie_word_embeddings=True,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
"""The sizes of small models."""


def build(family, kind="CausalLM", **changes):
    """Return the model that transformers chooses for a config, with random weights."""
    torch.manual_seed(0)
    of_text = getattr(transformers, f"{family}TextConfig", None)
    given = copy.deepcopy(BASE | changes)  # a config adds keys to the dicts that it is given
    if given["head_dim"] is None:
        del given["head_dim"]
    config = (of_text or getattr(transformers, f"{family}Config"))(**given)
    config._experts_implementation = config._attn_implementation = "eager"
    return randomize(getattr(transformers, f"AutoModelFor{kind}").from_config(config))


def randomize(model):
    """Give every array, norms and biases included, values at which a wrong use would show."""
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(around + 0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model.eval()


def load(directory):
    spec = read_spec(directory)
    return load_params(directory, spec), spec


def batch(vocab_size, rows=2, length=24):
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, length))
    return tokens, np.broadcast_to(np.arange(length), tokens.shape), np.ones_like(tokens)


def packed_batch(vocab_size):
    """One row of three sequences and padding, and one row of a single sequence."""
    tokens, positions, segment_ids = (x.copy() for x in batch(vocab_size))
    counts = [*LENGTHS, tokens.shape[1] - sum(LENGTHS)]
    positions[0] = np.concatenate([np.arange(n) for n in counts])
    segment_ids[0] = np.repeat([1, 2, 3, 0], counts)
    return tokens, positions, segment_ids


@partial(jax.jit, static_argnums=(1, 5))
def our_logits(params, spec, tokens, positions, segment_ids, dtype="float32"):
    hidden = forward(params, spec, tokens, positions, segment_ids, dtype=jnp.dtype(dtype))
    return logits(params, spec, hidden)


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def their_packed_logits(model, tokens, segment_ids):
    """Run every sequence of packed rows alone; zeros at padding."""
    result = np.zeros((*tokens.shape, model.config.vocab_size), np.float32)
    for row, number in {(r, s) for r, s in np.argwhere(segment_ids >= 0) if segment_ids[r, s]}:
        at = segment_ids[row] == segment_ids[row, number]
        if number == np.argmax(at):  # once per sequence
            result[row, at] = their_logits(model, tokens[row : row + 1, at])[0]
    return result


def assert_near(ours, theirs, tolerance=1e-4):
    """Compare to a share of the scale of the logits, and demand that a difference would show."""
    scale = float(np.abs(theirs).max())
    assert theirs.std() > 0.2
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)
