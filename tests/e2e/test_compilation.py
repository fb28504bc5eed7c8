"""A run that is continued in a new process compiles nothing, and a step of it can be profiled."""

import json
import random
import re
from threading import Event

import jax
import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data import packing
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.build import native_engine
from jaxrl_llm.training import load_model
from jaxrl_llm.training.compile import compile_steps, plan_shapes
from tests.guarded import MODEL, NATIVE, RUN

pytestmark = pytest.mark.guards(*MODEL, *RUN, *NATIVE, "jaxrl_llm/planning/")

COMPILED, FOUND = "perf/compilations", "perf/compilation_cache_hits"
WAITED = "perf/compile_wait_s"
STEPS = ("jit_accumulate", "jit_infer", "jit_apply", "jit_prefill_chunk", "jit_decode_chunk")


@pytest.mark.slow
def test_a_continued_run_finds_its_programs(workshop):
    """Two processes, of which the first compiles for itself: about half a minute."""
    run_dir = workshop.folder()
    words = ("data.validation=[]", "checkpoint.every=1", "log.profile_steps=[1, 3]")

    def go_on(steps):
        process = workshop.start(f"steps={steps}", *words, run_dir=run_dir, cached=False)
        return workshop.finish(process, run_dir).ok()

    first = go_on(3)
    kept = {path.name for path in run_dir.glob("home/**/*-cache")}
    assert first.metrics[0][COMPILED] > 0
    second = go_on(4)
    assert [line["step"] for line in second.metrics] == [1, 2, 3, 4]
    assert second.metrics[-1][COMPILED] == 0
    assert second.metrics[-1][FOUND] >= 8
    assert {path.name for path in run_dir.glob("home/**/*-cache")} >= kept
    assert "step 1 is not profiled: the run goes on at 4" in second.err

    assert "step 3: " in first.out
    folders = sorted(path.name for path in (run_dir / "profile").iterdir())
    assert folders == ["step_1", "step_3"]
    text = (run_dir / "profile/step_3/summary.txt").read_text()
    seconds = dict(re.findall(r"^([a-z_ ]+?) +(\d+\.\d+) ", text, re.MULTILINE))
    timing = {
        name.removeprefix("timing_s/"): value
        for name, value in first.metrics[2].items()
        if name.startswith("timing_s/") and name != "timing_s/step"
    }
    assert set(timing) < set(seconds)
    for name, value in timing.items():
        assert abs(float(seconds[name]) - value) < 0.2, name
    assert float(seconds["matrix products"]) > 0


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_the_run_needs(workshop, tmp_path, monkeypatch, patient):
    """A step whose program were another one by a bit would be there twice."""
    monkeypatch.setattr(packing, "MIN_BUCKET_FLOPS", 0.0)
    monkeypatch.setattr(load_model, "takes_long_rows", lambda *_: False)  # as most batches
    words = ("data.validation=[]", "steps=1", "batch.max_tokens_per_device=32")
    words += ("model.dtype=bfloat16", "algorithm.kl_loss=k3")

    def kept():
        names = [path.name.rpartition("-")[0] for path in tmp_path.glob("*-cache")]
        return [sum(name.startswith(f"{step}-") for name in names) for step in STEPS]

    config = load(TrainConfig, workshop.root / "train.yaml", words)
    with workshop.caching(tmp_path), monkeypatch.context() as patch:
        one = jax.devices()[:1]
        patch.setattr("jax.devices", lambda: one)
        compile_steps(config, Event())
        shapes = plan_shapes(config)
        engine = native_engine(config, Decoder(shapes.spec), shapes.layouts.rollout)
        engine.close()
    buckets = len(shapes.roles["actor"].shape.buckets)
    assert buckets > 1
    steps = [buckets, 2 * buckets, 1]  # the policy's pass, and the reference's
    assert kept() == [*steps, 1, 1]
    workshop(*words, compiled=tmp_path).ok()
    names = [name for name, *_ in engine.programs._keys(1)]
    assert kept() == [*steps, names.count("prefill"), names.count("decode")]


@pytest.mark.slow
def test_nothing_compiles_after_the_first_step(workshop, monkeypatch, patient):
    """Thirty steps of prompts and answers of many lengths, in all buckets."""
    monkeypatch.setattr(packing, "MIN_BUCKET_FLOPS", 0.0)
    rng, lines = random.Random(0), []
    for _ in range(240):
        text = "".join(rng.choices("12+=", k=rng.randint(1, 30)))
        prompt = [{"role": "user", "content": text}]
        row = {"prompt": prompt, "data_source": "digits", "reward_model": {"ground_truth": ""}}
        lines.append(json.dumps(row))
    data = workshop.root / "lengths.jsonl"
    data.write_text("\n".join(lines))
    done = workshop(
        "steps=30",
        f"data.train={data}",
        "data.validation=[]",
        "data.prepare=null",
        "data.max_prompt_tokens=48",
        "rollout.max_new_tokens=8",
        "algorithm.kl_loss=k3",
        "batch.max_tokens_per_device=448",
    ).ok()
    compiled = [line[COMPILED] + line[FOUND] for line in done.metrics]
    assert compiled[0] > 0 and compiled[1] > 0, "what the first step did not need"
    assert compiled[2:] == [0] * 28
    assert done.metrics[0][WAITED] > 0
    assert [line[WAITED] for line in done.metrics[1:]] == [0.0] * 29
    assert len({line["perf/padding"] for line in done.metrics}) > 20
    assert all(0 <= line["perf/padding"] < 0.4 for line in done.metrics)
