"""Generation by the native engine for `benchmarks.generation.generate`.

`generate_ours.py JOB RESULT` in its environment.

The library is that of PYTHONPATH, which may be an earlier commit: the engine's constructor tells
by its parameters which one it is.
"""

from meter import Meter, read_job  # isort: skip  (first: it starts the clock)

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import jax

import jaxrl_llm
from jaxrl_llm.config import cli
from jaxrl_llm.models.model import model_of
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.mesh import make_mesh

COMPILED = "/jax/core/compile/backend_compile_duration"


try:
    from jaxrl_llm.models.hf.config import read_spec
    from jaxrl_llm.models.hf.load import load_params
except ImportError:  # an earlier commit
    from jaxrl_llm.models import hf, hf_config

    load_params, read_spec = hf.load_params, hf_config.read_spec

try:
    from jaxrl_llm.rollout.types import Request, SamplingParams
except ImportError:  # an earlier commit
    from jaxrl_llm.types import Request
    from jaxrl_llm.types import Sampling as SamplingParams


def engine_of(spec: Any, job: dict[str, Any], slots: int, longest: int) -> Any:
    """Build the engine of whatever commit this is, on one device."""
    mesh = make_mesh({}, jax.devices()[:1])
    known = inspect.signature(NativeEngine).parameters
    max_tokens = job["longest_prompt"] + longest
    if "settings" in known:
        from jaxrl_llm.rollout.engine import EngineSettings
        from jaxrl_llm.sharding.layout import Layout

        return NativeEngine(model_of(spec), EngineSettings(slots, max_tokens), layout=Layout(mesh))
    given: dict[str, Any] = {"slots": slots, "max_tokens": max_tokens}
    if "mesh" in known:
        given["mesh"] = mesh
    else:
        from jaxrl_llm.sharding.layout import Layout

        given["layout"] = Layout(mesh)
    if "prompts_per_fill" in known:  # the engines of waves
        prompts = {"max_prompt_tokens": job["longest_prompt"], "prompts_per_fill": job["distinct"]}
        given |= prompts
    return NativeEngine(model_of(spec), **given)


def main() -> None:
    """Generate, pass after pass, and write what it took."""
    if hasattr(cli, "take_huge_pages"):
        cli.take_huge_pages()  # as the programs of jaxrl_llm do
    job = read_job()
    source = Path(str(jaxrl_llm.__file__)).parents[1]
    if source != Path(os.environ["PYTHONPATH"]):
        raise RuntimeError(f"jaxrl_llm is that of {source}, not of {os.environ['PYTHONPATH']}")
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(seconds) if event == COMPILED else None
    )
    longest = max(map(max, job["lengths"]))
    spec = read_spec(job["model"])
    engine = engine_of(spec, job, len(job["lengths"][0]), max(longest, job["greedy_tokens"]))
    engine.load(load_params(job["model"], spec), version=0)
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
        meter.end_step()
        at_work += len(compiled) - before if number else 0
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
