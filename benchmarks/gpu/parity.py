"""How far log-probs and gradients of this library are from transformers' in float32, on one device.

python -m benchmarks.gpu.parity JOB.json RESULT.json
"""

import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch needs memory, too

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from safetensors.torch import load_file

from benchmarks.gpu.cases import run_cases
from benchmarks.gpu.ours import engine_of, layout_of
from benchmarks.gpu.specs import spec_of
from benchmarks.gpu.theirs import DEVICE
from jaxrl_llm.algorithms.losses import ppo_clip
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.kernels import choose_kernel, heads_on, this_device
from jaxrl_llm.models.parameters import declare, init_params
from jaxrl_llm.rollout.engine import Request, SamplingParams
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch

LEARNING_RATE = 1e4  # of plain gradient descent: a step shows the gradient


class Parity(NamedTuple):
    """What both compute.

    Attributes:
        logprobs: of tokens given those before them, [B T-1].
        gradient: of PPO's loss, by the names of transformers; empty where it is not asked for.
    """

    logprobs: np.ndarray
    gradient: dict[str, torch.Tensor]


@functools.cache
def weights(shape: str) -> Params:
    """Draw the model's weights, float32."""
    spec = spec_of(shape)
    draw = jax.jit(
        functools.partial(init_params, spec), out_shardings=layout_of().of(declare(spec))
    )
    return draw(key=jax.random.key(0))


def saved(shape: str, params: Params) -> dict[str, torch.Tensor]:
    """Return parameters, or a gradient of them, by their names in transformers."""
    with tempfile.TemporaryDirectory() as folder:
        save_params(Path(folder) / "model", params, spec_of(shape), source=None, dtype=np.float32)
        files = sorted((Path(folder) / "model").glob("*.safetensors"))
        return {name: array for file in files for name, array in load_file(file).items()}


@functools.cache
def transformers_model(shape: str, dtype: str) -> Any:
    """Return transformers' model with our weights, from the files that we save."""
    import transformers

    kinds: Any = transformers
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        save_params(directory, weights(shape), spec_of(shape), source=None, dtype=np.float32)
        model = kinds.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    return model.to(DEVICE)


def sequences(job: dict[str, Any]) -> np.ndarray:
    """Draw tokens [B T]."""
    return np.random.default_rng(0).integers(1, spec_of(job["shape"]).vocab_size, job["parity"])


def advantages_of(tokens: np.ndarray) -> np.ndarray:
    """Draw an advantage for each sequence, [B 1]."""
    return np.random.default_rng(1).normal(size=(len(tokens), 1)).astype(np.float32)


# --------------------------------------------------------------------------------- the two sides


def by_transformers(job: dict[str, Any], tokens: np.ndarray, dtype: str, *, grad: bool) -> Parity:
    """Score tokens with transformers, and differentiate PPO's loss where the ratio is 1."""
    model = transformers_model(job["shape"], dtype)
    ids = torch.from_numpy(tokens).to(DEVICE)
    with torch.set_grad_enabled(grad):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        scores = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    if not grad:
        return Parity(scores.cpu().numpy(), {})
    advantages = torch.from_numpy(advantages_of(tokens)).to(DEVICE)
    (-torch.exp(scores - scores.detach()) * advantages).mean().backward()
    named = {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Parity(scores.detach().cpu().numpy(), named)


def by_trainer(job: dict[str, Any], tokens: np.ndarray) -> Parity:
    """Score tokens as a run does, in packed rows, and take one step of gradient descent."""
    spec, layout = spec_of(job["shape"]), layout_of()
    params, (count, length) = weights(job["shape"]), tokens.shape
    heads = heads_on(spec, layout)
    kernel = choose_kernel("auto", heads, job["dtype"], device=this_device()).kernel
    model = ForwardConfig(model=Decoder(spec), dtype=job["dtype"], kernel=kernel)
    shape = row_shape(2 * length, 2 * length, sequences=count)
    mask = np.broadcast_to(np.arange(length) > 0, tokens.shape)
    batch = Batch(tokens.astype(np.int32), np.full(count, length, np.int32), {"mask": mask})
    scored = logprob_pass(model, shape, layout.mesh)(params, batch)["logprobs"]
    batch = batch.add(
        advantages=np.where(mask, advantages_of(tokens), 0).astype(np.float32),
        response_lengths=mask.sum(1),
    )
    learner = Learner(
        PolicyObjective(loss=ppo_clip, on_policy=True),
        model,
        optax.sgd(LEARNING_RATE),
        reduce=token_mean,
        shape=shape,
        mesh=layout.mesh,
        params_like=jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params
        ),
    )
    state = learner.init(jax.tree.map(jnp.copy, params))
    state, _ = learner.update(state, batch, {"kl_coef": 0.0, "entropy_coef": 0.0})
    steps = jax.tree.map(lambda old, new: (old - new) / LEARNING_RATE, params, state.params)
    return Parity(np.asarray(scored)[:, 1:], saved(job["shape"], steps))


def by_engine(job: dict[str, Any], tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sample answers to the first halves; return sequences and the log-probs of the answers."""
    half = tokens.shape[1] // 2
    engine = engine_of(job, len(tokens), 2 * half)
    engine.load(weights(job["shape"]), version=0)
    sampling = SamplingParams(max_new_tokens=half)
    prompts = tokens[:, :half].tolist()
    asked = [Request(tuple(prompt), sampling, seed) for seed, prompt in enumerate(prompts)]
    answers = engine.sample(asked)
    engine.close()
    whole = [[*p, *answer.tokens] for p, answer in zip(prompts, answers, strict=True)]
    return np.array(whole), np.array([answer.logprobs for answer in answers])


# ------------------------------------------------------------------------------------ the job


@functools.cache
def _reference(shape: str, parity: tuple[int, int]) -> Parity:
    job = {"shape": shape, "parity": parity}
    return by_transformers(job, sequences(job), "float32", grad=True)


def parity(job: dict[str, Any]) -> dict[str, Any]:
    """Compare the trainer, the engine or transformers in bfloat16 with transformers in float32."""
    begun, tokens = time.perf_counter(), sequences(job)
    if job["by"] == "engine":
        tokens, scored = by_engine(job, tokens)
        expected = by_transformers(job, tokens, "float32", grad=False)
        actual = Parity(scored, {})
        expected = expected._replace(logprobs=expected.logprobs[:, -scored.shape[1] :])
    else:
        expected = _reference(job["shape"], tuple(job["parity"]))
        if job["by"] == "trainer":
            actual = by_trainer(job, tokens)
        else:
            actual = by_transformers(job, tokens, job["dtype"], grad=True)
    off = np.abs(actual.logprobs - expected.logprobs)
    result = {"mean": float(off.mean()), "most": float(off.max())}
    if actual.gradient:
        result["gradient"] = distance(actual.gradient, expected.gradient)
    return result | {"seconds": time.perf_counter() - begun}


def distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    r"""Return $\lVert a - b \rVert / \lVert b \rVert$ over all arrays.

    >>> distance({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 4.5])}) < 0.1
    True
    """
    if missing := actual.keys() ^ expected.keys():
        raise ValueError(f"expected gradients of the same arrays, only one has {sorted(missing)}")
    total = sum(float((actual[name] - b).square().sum()) for name, b in expected.items())
    return (total / sum(float(b.square().sum()) for b in expected.values())) ** 0.5


if __name__ == "__main__":
    run_cases({"parity": parity}, lambda: jax.local_devices()[0].device_kind, __doc__)
