"""What `benchmarks.gpu` measures of plain torch, each job in a process of its own.

python -m benchmarks.gpu.theirs JOB.json RESULT.json
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.cases import run_cases
from benchmarks.gpu.shapes import SHAPES, lengths_of

LEARNING_RATE = 1e-6
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def wait() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def peak_bytes() -> int | None:
    """Return the most that tensors have taken of the device's memory; None on a CPU."""
    return torch.cuda.max_memory_allocated() if CUDA else None


def seconds(function: Callable[[], Any], *, runs: int) -> float:
    """Return the time of one run, of several that are queued one behind another."""
    for _ in range(2):
        function()
    wait()
    start = time.perf_counter()
    for _ in range(runs):
        function()
    wait()
    return (time.perf_counter() - start) / runs


def model_of(name: str, attention: str, dtype: torch.dtype) -> Any:
    """Make transformers' Qwen3 with random weights on the device."""
    import transformers

    kinds: Any = transformers
    shape = SHAPES[name]
    config = kinds.Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ff_width,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        attn_implementation=attention,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return kinds.Qwen3ForCausalLM(config).to(dtype)


def microbatches(lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Cut sequences, longest first, into micro-batches that padded hold at most so many tokens.

    >>> list(microbatches([1, 4, 2], 4))
    [[4], [2, 1]]
    """
    left = sorted(lengths, reverse=True)
    while left:
        count = max(tokens // left[0], 1)
        yield left[:count]
        left = left[count:]


def update(job: dict[str, Any]) -> dict[str, Any]:
    """Time updates of plain torch with PPO's loss: a row per sequence, AdamW in one fused kernel.

    Rows are padded on the right, where causal attention sees no padding: it needs no mask, so torch
    takes its fastest kernel. Weights, gradients and moments are bfloat16, or with `masters` float32
    under autocast.
    """
    model = model_of(
        job["shape"], job["attention"], torch.float32 if job["masters"] else torch.bfloat16
    )
    model.train()
    if job["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    drawn, micros, total = torch.Generator().manual_seed(0), [], 0
    for lengths in microbatches(lengths_of(job), job["micro"]):
        sizes, at = torch.tensor(lengths)[:, None], torch.arange(lengths[0])[None]
        shape = (len(lengths), lengths[0])
        ids = torch.randint(1, SHAPES[job["shape"]].vocabulary, shape, generator=drawn)
        mask = (at >= sizes // 4) & (at < sizes) & (at > 0)
        advantages = torch.randn((shape[0], 1), generator=drawn).expand(shape)
        micros.append([x.to(DEVICE) for x in (ids, mask[:, 1:].float(), advantages[:, 1:])])
        total += int(mask.sum())

    def train() -> None:
        for ids, mask, advantages in micros:
            with (
                torch.autocast(DEVICE, torch.bfloat16)
                if job["masters"]
                else contextlib.nullcontext()
            ):
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            scores = F.cross_entropy(
                logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
            )
            ratio = torch.exp(-scores.view(mask.shape) + 8.0)
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantages, clipped * advantages)
            ((loss * mask).sum() / total).backward()
            del logits, scores, ratio, clipped, loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times = []
    for _ in range(job["runs"] + 2):
        begun = time.perf_counter()
        train()
        wait()
        times.append(time.perf_counter() - begun)
    padded = sum(
        len(lengths) * lengths[0] for lengths in microbatches(lengths_of(job), job["micro"])
    )
    return {
        "seconds": statistics.median(times[2:]),
        "all_seconds": times[2:],
        "padding": 1 - sum(lengths_of(job)) / padded,
        "peak_bytes": peak_bytes(),
    }


def attention(job: dict[str, Any]) -> dict[str, Any]:
    """Time torch's SDPA, causal and without a mask: each segment is a row of its own."""
    heads, keys, width = job["heads"]
    rows, length, segments = job["case"]
    shape = rows * segments, length // segments
    torch.manual_seed(0)

    def drawn(n: int) -> torch.Tensor:
        x = torch.randn(shape[0], n, shape[1], width, device=DEVICE, dtype=torch.bfloat16)
        return x.requires_grad_()

    q, k, v = drawn(heads), drawn(keys), drawn(keys)
    out = torch.randn_like(q)

    def mix() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward() -> None:
        with torch.no_grad():
            mix()

    def both() -> None:
        torch.autograd.grad(mix(), (q, k, v), out)

    return {
        "forward_seconds": seconds(forward, runs=job["runs"]),
        "seconds": seconds(both, runs=job["runs"]),
    }


def experts(job: dict[str, Any]) -> dict[str, Any]:
    """Time torch's grouped product, on groups of one size."""
    rows, count, width, inner = job["experts"]
    torch.manual_seed(0)
    kind = {"device": DEVICE, "dtype": torch.bfloat16}
    x = torch.randn(rows, width, **kind).requires_grad_()
    matrices = torch.randn(count, width, inner, **kind).requires_grad_()
    out = torch.randn(rows, inner, **kind)
    ends = torch.arange(1, count + 1, device=DEVICE, dtype=torch.int32) * (rows // count)

    def multiply() -> torch.Tensor:
        return F.grouped_mm(x, matrices, offs=ends)

    def forward() -> None:
        with torch.no_grad():
            multiply()

    def both() -> None:
        torch.autograd.grad(multiply(), (x, matrices), out)

    return {
        "forward_seconds": seconds(forward, runs=job["runs"]),
        "seconds": seconds(both, runs=job["runs"]),
    }


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Time transformers' generate on a batch of prompts of one length."""
    model = model_of(job["shape"], "sdpa", torch.bfloat16).eval()
    (prompt, new), requests = job["answer"], job["requests"]
    drawn = torch.Generator().manual_seed(0)
    vocabulary = SHAPES[job["shape"]].vocabulary
    ids = torch.randint(1, vocabulary, (requests, prompt), generator=drawn).to(DEVICE)

    def generate(tokens: int) -> float:
        begun = time.perf_counter()
        answers = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            top_k=0,
        )
        wait()
        assert answers.shape == (requests, prompt + tokens), answers.shape
        return time.perf_counter() - begun

    generate(2)
    half, whole = generate(new // 2), generate(new)
    return {"seconds": whole, "half_seconds": half, "peak_bytes": peak_bytes()}


JOBS = {f.__name__: f for f in (update, attention, experts, decode)}


if __name__ == "__main__":
    run_cases(JOBS, lambda: torch.cuda.get_device_name() if CUDA else "cpu", __doc__)
