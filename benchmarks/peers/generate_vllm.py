"""Generation by a vLLM sidecar for `benchmarks.generation.generate`: `generate_vllm.py JOB RESULT`.

The peak memory is that of this process, without vLLM's.
"""

from meter import Meter, read_job  # isort: skip  (first: it starts the clock)

import sys
import tempfile
from pathlib import Path

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.vllm.engine import VllmEngine
from jaxrl_llm.rollout.vllm.setup import VERSION


def main() -> None:
    """Generate, pass after pass, and write what it took."""
    job = read_job()
    longest = max(*map(max, job["lengths"]), job["greedy_tokens"])
    spec = read_spec(job["model"])
    with tempfile.TemporaryDirectory() as folder:
        engine = VllmEngine(
            spec,
            EngineSettings(len(job["lengths"][0]), job["longest_prompt"] + longest),
            source=job["model"],
            config=VllmConfig(),
            folder=Path(folder),
        )
        engine.load(load_params(job["model"], spec), version=0)
        pairs = [
            pair
            for batch, lengths in zip(job["tokens"], job["lengths"], strict=True)
            for pair in zip(batch, lengths, strict=True)
        ]
        requests = [
            Request(tuple(prompt), SamplingParams(max_new_tokens=length), seed)
            for seed, (prompt, length) in enumerate(pairs)
        ]
        meter = Meter()
        for _ in range(job["passes"]):
            answers = engine.sample(requests)
            meter.add(generated=sum(len(answer.tokens) for answer in answers))
            meter.end_step()
        sampling = SamplingParams(max_new_tokens=job["greedy_tokens"], temperature=0.0)
        greedy = engine.sample([Request(tuple(prompt), sampling, 0) for prompt in job["greedy"]])
        engine.close()
    meter.write(
        greedy=[answer.tokens.tolist() for answer in greedy],
        versions={"Python": sys.version.split()[0], "vLLM": VERSION},
    )


if __name__ == "__main__":
    main()
