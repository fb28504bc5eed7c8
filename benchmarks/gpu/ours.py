"""What `benchmarks.gpu` measures of this library, each job in a process of its own.

python -m benchmarks.gpu.ours JOB.json RESULT.json
"""

import dataclasses
import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.gpu.cases import run_cases
from benchmarks.gpu.jobs import ENGINES
from benchmarks.gpu.shapes import SHAPES, lengths_of, peak_of
from benchmarks.gpu.specs import scored_flops, spec_of
from jaxrl_llm.algorithms.logprobs import token_stats
from jaxrl_llm.algorithms.losses import ppo_clip
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import model_cost, row_shape
from jaxrl_llm.kernel_choice import choose_cache_kernel
from jaxrl_llm.models.attention import PLAIN, attend
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.flops import update_flops
from jaxrl_llm.models.kernels import (
    Heads,
    KernelChoice,
    attend_cudnn,
    choose_kernel,
    difference,
    heads_on,
    objection,
    this_device,
)
from jaxrl_llm.models.moe.grouped import BLOCKED, grouped_matmul
from jaxrl_llm.models.parameters import declare, init_params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch

LEARNING_RATE = 1e-6
COMPILED = "/jax/core/compile/backend_compile_duration"


def peak_bytes() -> int | None:
    """Return the most that the device's memory has held; None where nothing says so."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def layout_of() -> Layout:
    """Return the layout of one device."""
    return Layout(make_mesh({}, jax.devices()[:1]))


def seconds(function: Callable[..., Any], *arguments: Any, runs: int) -> float:
    """Return the time of one run, of several that are queued one behind another."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    results = [function(*arguments) for _ in range(runs)]
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / runs


# ------------------------------------------------------------------------------------ an update


def batch_of(job: dict[str, Any]) -> Batch:
    """Draw the sequences of an update: a quarter of each is prompt, the rest is trained on."""
    sizes = np.array(lengths_of(job), np.int32)
    rng, width = np.random.default_rng(0), int(sizes.max())
    at = np.arange(width)[None]
    mask = (at >= sizes[:, None] // 4) & (at < sizes[:, None]) & (at > 0)
    fields = {
        "mask": mask,
        "response_lengths": mask.sum(1),
        "old_logprobs": np.where(mask, -8.0, 0.0).astype(np.float32),
        "advantages": np.where(mask, rng.normal(size=(len(sizes), 1)), 0.0).astype(np.float32),
    }
    tokens = rng.integers(1, SHAPES[job["shape"]].vocabulary, (len(sizes), width), np.int32)
    return Batch(np.where(at < sizes[:, None], tokens, 0).astype(np.int32), sizes, fields)


def build_learner(job: dict[str, Any], layout: Layout, kernel: Any, params_like: Any) -> Learner:
    """Return the learner of a job's updates: one shape of micro-batches, so one program."""
    spec = spec_of(job["shape"])
    shape = row_shape(
        job["micro"],
        min(job["row"], job["micro"]),
        sequences=len(lengths_of(job)),
        cost=dataclasses.replace(model_cost(spec), flops=0.0),
    )
    forward = ForwardConfig(
        model=Decoder(spec),
        dtype="bfloat16",
        remat=job["remat"],
        logprob_chunk=job.get("logprob_chunk", ForwardConfig.logprob_chunk),
        kernel=kernel,
    )
    return Learner(
        PolicyObjective(loss=ppo_clip),
        forward,
        optax.adamw(LEARNING_RATE),
        reduce=token_mean,
        shape=shape,
        mesh=layout.mesh,
        params_like=params_like,
    )


def learner_of(job: dict[str, Any]) -> tuple[Any, Any, KernelChoice]:
    """Return a learner of the library, its state, and how it attends."""
    spec, layout = spec_of(job["shape"]), layout_of()
    heads = heads_on(spec, layout)
    choice = choose_kernel(job["attention"], heads, "bfloat16", device=this_device())
    params = draw_params(spec, layout)
    like = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params
    )
    learner = build_learner(job, layout, choice.kernel, like)
    state = learner.init(params)
    del params
    return learner, state, choice


def draw_params(spec: ModelSpec, layout: Layout) -> Any:
    """Draw a model's weights where the layout puts them."""
    draw = jax.jit(functools.partial(init_params, spec), out_shardings=layout.of(declare(spec)))
    return draw(key=jax.random.key(0))


def update(job: dict[str, Any]) -> dict[str, Any]:
    """Time updates as the library does them: packing on the host, float32 masters, AdamW."""
    learner, state, choice = learner_of(job)
    batch, coefs = batch_of(job), {"kl_coef": 0.0, "entropy_coef": 0.0}
    times, metrics, start = [], {}, time.perf_counter()
    for _ in range(job["runs"] + 1):
        begun = time.perf_counter()
        state, metrics = learner.update(state, batch, coefs)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - begun)
    spec, lengths = spec_of(job["shape"]), lengths_of(job)
    taken, peak = statistics.median(times[1:]), peak_of(jax.devices()[0].device_kind)
    rates = [count(spec, lengths) / taken for count in (update_flops, scored_flops)]
    mfu = {"mfu": rates[0] / peak.flops, "mfu_scored": rates[1] / peak.flops} if peak else {}
    return {
        "seconds": taken,
        "all_seconds": times[1:],
        **mfu,
        "seconds_to_compile": times[0],
        "seconds_in_all": time.perf_counter() - start,
        "loss": float(metrics["loss"]),
        "attention": f"{choice.name}: {choice.reason}",
        "peak_bytes": peak_bytes(),
    }


def profile(job: dict[str, Any]) -> dict[str, Any]:
    """Trace one update, and share its time out by kinds of operations.

    It is compiled anew: a trace says less of a program that was read from a cache.
    """
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    from jaxrl_llm.monitoring.profiler import (  # which read configs, too
        device_timeline,
        read_trace,
        summarize,
        tracing,
    )

    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    learner, state, choice = learner_of(job)
    batch, coefs = batch_of(job), {"kl_coef": 0.0, "entropy_coef": 0.0}
    for _ in range(2):
        state, _ = learner.update(state, batch, coefs)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with tracing(Path(folder) / "trace", 1):
            jax.block_until_ready(learner.update(state, batch, coefs))
        (path,) = Path(folder).rglob("*.xplane.pb")
        trace = read_trace(path)
    spent: defaultdict[str, float] = defaultdict(float)
    (name,) = {operation.device for operation in trace.operations}
    device = device_timeline(trace, name)
    for operation, length in zip(device.operations, device.seconds, strict=True):
        spent[operation.group] += float(length)
    busy, whole = sum(spent.values()), (trace.step.end - trace.step.start) / 1e9
    return {
        "seconds": whole,
        "device_busy": busy / whole,
        "shares_of_busy": {group: length / busy for group, length in spent.items()},
        "outside_matrix_products_and_attention": 1
        - (spent["matrix products"] + spent["attention"]) / busy,
        "attention": choice.name,
        "summary": summarize(trace, 1),
    }


# ------------------------------------------------------------------------------------ its parts


off_from_float32 = functools.cache(difference)  # it depends on heads, not on rows


def attention(job: dict[str, Any]) -> dict[str, Any]:
    """Time one attention over packed rows, forward, and forward and backward."""
    heads, keys, width = job["heads"]
    rows, length, segments = job["case"]
    of = Heads(heads, keys, width, (PLAIN,))
    kernel = attend
    if job["by"] == "cudnn":
        against = objection(of, "bfloat16", this_device())
        if against is not None:
            return {"error": f"not possible: {against}"}
        kernel = attend_cudnn
    ids = jnp.asarray(np.repeat(np.arange(1, segments + 1), length // segments)[None])
    ids = jnp.tile(ids, (rows, 1))
    drawn = jax.random.split(jax.random.key(0), 4)
    q, k, v, out = (
        jax.random.normal(key, (rows, length, n, width), jnp.bfloat16)
        for key, n in zip(drawn, (heads, keys, keys, heads), strict=True)
    )

    def both(q: Any, k: Any, v: Any, out: Any) -> Any:
        mixed, backward = jax.vjp(lambda q, k, v: kernel(q, k, v, ids), q, k, v)
        return mixed, backward(out)

    forward = seconds(jax.jit(lambda q, k, v: kernel(q, k, v, ids)), q, k, v, runs=job["runs"])
    return {
        "forward_seconds": forward,
        "seconds": seconds(jax.jit(both), q, k, v, out, runs=job["runs"]),
        "difference": off_from_float32(kernel, of, "bfloat16"),
    }


def product_of(name: str) -> Callable[..., Any]:
    """Return a grouped product (rows, matrices, sizes): by our kernels, our blocks, or XLA's."""
    if name == "ragged_dot":
        return jax.lax.ragged_dot
    kernels = BLOCKED
    if name == "triton":
        from jaxrl_llm.models.moe.grouped_triton import TRITON as kernels
    return functools.partial(grouped_matmul, kernels=kernels)


def experts(job: dict[str, Any]) -> dict[str, Any]:
    """Time one grouped product, forward, and forward and backward, on groups of one size."""
    rows, count, width, inner = job["experts"]
    drawn = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(drawn[0], (rows, width), jnp.bfloat16)
    matrices = jax.random.normal(drawn[1], (count, width, inner), jnp.bfloat16)
    out = jax.random.normal(drawn[2], (rows, inner), jnp.bfloat16)
    sizes = jnp.full(count, rows // count, jnp.int32)
    multiply = product_of(job["by"])

    def both(x: Any, matrices: Any, out: Any) -> Any:
        product, backward = jax.vjp(lambda x, m: multiply(x, m, sizes), x, matrices)
        return product, backward(out)

    forward = seconds(jax.jit(lambda x, m: multiply(x, m, sizes)), x, matrices, runs=job["runs"])
    whole = seconds(jax.jit(both), x, matrices, out, runs=job["runs"])
    return {"forward_seconds": forward, "seconds": whole, "peak_bytes": peak_bytes()}


def logprobs(job: dict[str, Any]) -> dict[str, Any]:
    """Time the gradient of log-probs and entropies at one chunk size."""
    tokens, width, vocabulary = job["scored"]
    drawn = jax.random.split(jax.random.key(0), 2)
    hidden = jax.random.normal(drawn[0], (tokens, width), jnp.bfloat16)
    head = 0.02 * jax.random.normal(drawn[1], (width, vocabulary), jnp.float32)
    targets = jnp.arange(tokens) % vocabulary

    def total(hidden: Any, head: Any) -> Any:
        stats = token_stats(hidden, head, targets, chunk=job["chunk"])
        return stats.logprobs.sum() + 1e-3 * stats.entropy.sum()

    run = jax.jit(jax.grad(total, (0, 1))).lower(hidden, head).compile()
    planned: Any = run.memory_analysis()
    scratch = planned.temp_size_in_bytes
    return {"seconds": seconds(run, hidden, head, runs=job["runs"]), "scratch_bytes": scratch}


def engine_of(
    job: dict[str, Any], requests: int, length: int, layout: Layout | None = None
) -> NativeEngine:
    """Return one of the native engines, with room for so many sequences of a length."""
    spec, layout, variant = spec_of(job["shape"]), layout or layout_of(), ENGINES[job["engine"]]
    given = variant.get("settings", {}) | job.get("settings", {})
    settings = EngineSettings(requests, length, dtype=job["dtype"], **given)
    choice = choose_cache_kernel(
        variant.get("attention", "auto"),
        spec,
        layout,
        settings.dtype,
        is_int8=settings.kv_cache_dtype == "int8",
    )
    if job["engine"] == "pages" and choice.kernel is None and jax.default_backend() == "gpu":
        raise ValueError(f"expected a kernel over pages, got none: {choice.reason}")
    return NativeEngine(Decoder(spec), settings, layout=layout, kernel=choice.kernel)


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Time the native engine on as many requests as it has slots, all of one length.

    Each call has prompts of its own, which the engine has not in its cache. What answers of half
    the length take has prefill in it, too: the difference is steps alone.
    """
    spec, (prompt, new), requests = spec_of(job["shape"]), job["answer"], job["requests"]
    engine = engine_of(job, requests, prompt + new)
    engine.load(draw_params(spec, layout_of()), version=0)
    rng, compiled = np.random.default_rng(0), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event == COMPILED else None
    )

    def generate(tokens: int) -> float:
        sampling = SamplingParams(max_new_tokens=tokens)
        prompts = rng.integers(1, spec.vocab_size, (requests, prompt)).tolist()
        asked = [Request(tuple(p), sampling, seed) for seed, p in enumerate(prompts)]
        before, begun = engine.stats().prompt_tokens, time.perf_counter()
        answers = engine.sample(asked)
        taken = time.perf_counter() - begun
        assert all(len(answer.tokens) == tokens for answer in answers), "no stop token was given"
        read = engine.stats().prompt_tokens - before  # some begin as others do
        assert read > 0.8 * requests * (prompt - 1), f"only {read} tokens of prompts were read"
        return taken

    generate(new)
    compiled.clear()
    whole = statistics.median(generate(new) for _ in range(job["runs"]))
    half = statistics.median(generate(new // 2) for _ in range(job["runs"]))
    engine.close()
    return {
        "seconds": whole,
        "half_seconds": half,
        "compilations": len(compiled),
        "peak_bytes": peak_bytes(),
        "bandwidth": job["bandwidth"] or read_rate(job["read_bytes"]),
    }


def read_rate(size: int) -> float:
    """Return the bytes of its memory that the device reads in a second, at best.

    Args:
        size: bytes of the array that is summed up.
    """
    array = jax.jit(lambda: jnp.ones(size // 4, jnp.float32))()
    total = jax.jit(jnp.sum)
    return size / min(seconds(total, array, runs=5) for _ in range(5))


def target(job: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the device that XLA's compiler writes with its dumps."""
    begun, folder = time.perf_counter(), Path(job["dump"])
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(8)))
    texts = [path.read_text() for path in sorted(folder.rglob("*gpu_target_config*"))]
    if not texts:
        return {"error": "XLA has written no description of the device"}
    return {"text": texts[0], "seconds": time.perf_counter() - begun}


JOBS = {f.__name__: f for f in (update, profile, attention, experts, logprobs, decode, target)}


if __name__ == "__main__":
    run_cases(JOBS, lambda: jax.local_devices()[0].device_kind, __doc__)
