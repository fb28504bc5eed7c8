"""A run that is continued in a new process compiles nothing, and a step of it can be profiled."""

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

pytestmark = [pytest.mark.slow, pytest.mark.guards(*MODEL, *RUN, *NATIVE, "jaxrl_llm/planning/")]

COMPILED, FOUND = "perf/compilations", "perf/compilation_cache_hits"
WAITED = "perf/compile_wait_s"
STEPS = ("jit_accumulate", "jit_infer", "jit_apply", "jit_prefill_chunk", "jit_decode_chunk")


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
    assert second.steps == [1, 2, 3, 4]
    assert second.metrics[-1][COMPILED] == 0 and second.metrics[-1][FOUND] >= 8
    assert {path.name for path in run_dir.glob("home/**/*-cache")} >= kept
    folders = sorted(path.name for path in (run_dir / "profile").iterdir())
    assert folders == ["step_1", "step_3"]
    text = (run_dir / "profile/step_3/summary.txt").read_text()
    seconds = dict(re.findall(r"^([a-z_ ]+?) +(\d+\.\d+) ", text, re.MULTILINE))
    stages = {name.removeprefix("timing_s/") for name in first.metrics[2] if "timing_s/" in name}
    assert stages - {"step"} < set(seconds) and float(seconds["matrix products"]) > 0


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
