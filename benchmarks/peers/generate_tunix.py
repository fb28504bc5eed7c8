"""Generation by Tunix's sampler for `benchmarks.generation.generate`.

`generate_tunix.py JOB RESULT` in its environment.

It is called as Tunix's own ("vanilla") rollout calls it, a batch at a time, until the longest
answer of the workload is done, as its shapes are compiled for one number of steps. The tokens of
padding and of the end of sequence, which its masks would drop, are forbidden.
"""

from meter import Meter, read_job  # isort: skip  (first: it starts the clock)

import importlib.metadata
import sys


def main() -> None:
    """Generate, pass after pass, and write what it took."""
    import jax
    from transformers import AutoTokenizer
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.qwen3 import params as qwen3_params
    from tunix_model import model_config

    job = read_job()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    settings = model_config(job)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = qwen3_params.create_model_from_safe_tensors(job["model"], settings, mesh)
    longest = max(map(max, job["lengths"]))
    cache = CacheConfig(
        cache_size=job["longest_prompt"] + longest,
        num_layers=settings.num_layers,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
    )
    sampler = Sampler(model, tokenizer, cache)
    forbidden = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    meter = Meter()
    for number in range(job["passes"]):
        for texts, lengths in zip(job["texts"], job["lengths"], strict=True):
            output = sampler(
                texts,
                longest,
                max_prompt_length=job["longest_prompt"],
                temperature=1.0,
                top_p=1.0,
                seed=number,
                eos_tokens=[-1],
                forbidden_tokens=forbidden,
            )
            kept = [row[:length] for row, length in zip(output.tokens, lengths, strict=True)]
            meter.add(generated=sum(map(len, kept)))
        meter.end_step()
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    names = {"Tunix": "google-tunix", "jax": "jax", "flax": "flax"}
    meter.write(
        **({"peak_gb": peak / 1e9} if peak else {}),
        versions={"Python": sys.version.split()[0]}
        | {name: importlib.metadata.version(package) for name, package in names.items()},
    )


if __name__ == "__main__":
    main()
