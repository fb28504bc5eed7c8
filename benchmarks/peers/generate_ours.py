"""Generation by the native engine for `benchmarks.generation.generate`.

`generate_ours.py JOB RESULT` in its environment.

The library is that of PYTHONPATH, which may be another checkout.
"""

from meter import Meter, read_job  # isort: skip  (first: it starts the clock)

import os
import sys
from pathlib import Path
from typing import Any

import jax

import jaxrl_llm
from jaxrl_llm.cli import take_huge_pages
from jaxrl_llm.compilation import BACKGROUND
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh

COMPILED = "/jax/core/compile/backend_compile_duration"


def build_engine(job: dict[str, Any], longest: int) -> NativeEngine:
    """Build the engine on one device, and give it the model's weights."""
    spec = read_spec(job["model"])
    settings = EngineSettings(len(job["lengths"][0]), job["longest_prompt"] + longest)
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    engine = NativeEngine(Decoder(spec), settings, layout=layout)
    engine.load(load_params(job["model"], spec), version=0)
    return engine


def main() -> None:
    """Generate, pass after pass, and write what it took."""
    job = read_job()
    take_huge_pages()  # as the programs of jaxrl_llm do
    source = Path(str(jaxrl_llm.__file__)).parents[1]
    if source != Path(os.environ["PYTHONPATH"]):
        raise RuntimeError(f"jaxrl_llm is that of {source}, not of {os.environ['PYTHONPATH']}")
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(seconds) if event == COMPILED else None
    )
    engine = build_engine(job, max(*map(max, job["lengths"]), job["greedy_tokens"]))
    requests = [
        Request(tuple(prompt), SamplingParams(max_new_tokens=length), seed)
        for seed, (prompt, length) in enumerate(
            (prompt, length)
            for batch, lengths in zip(job["tokens"], job["lengths"], strict=True)
            for prompt, length in zip(batch, lengths, strict=True)
        )
    ]
    at_work, meter = 0, Meter()
    for number in range(job["passes"]):
        before = len(compiled)
        answers = engine.sample(requests)
        meter.add(generated=sum(len(answer.tokens) for answer in answers))
        if number:
            at_work += len(compiled) - before
        else:  # the engine still compiles, in a thread, what other numbers of requests would need
            BACKGROUND.wait()
        meter.end_step()
    sampling = SamplingParams(max_new_tokens=job["greedy_tokens"], temperature=0.0)
    greedy = engine.sample([Request(tuple(prompt), sampling, 0) for prompt in job["greedy"]])
    engine.close()
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    meter.write(
        **({"peak_gb": peak / 1e9} if peak else {}),
        compilations=at_work,
        greedy=[answer.tokens.tolist() for answer in greedy],
        versions={"Python": sys.version.split()[0], "jax": jax.__version__},
    )


if __name__ == "__main__":
    main()
