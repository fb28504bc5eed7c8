"""Where the time of a decoded token goes: prefill, programs, the host between them, kernels.

    python -m benchmarks.gpu.decode_probe
    python -m benchmarks.gpu.decode_probe --longest 32768 --answer 64 --no-trace
    XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE python -m benchmarks.gpu.decode_probe
    python -m benchmarks.gpu.decode_probe --small --devices 8 --requests 2048   # the host's part
    python -m benchmarks.gpu.decode_probe --small                               # does it run?

Prints a JSON object a line: what the first call took, with what it compiled; a call with fresh
prompts as it is; the same, and one with prompts that are in the cache, with each program waited
for; the kernels of a trace. Programs are compiled when they are needed, so that a start is short.
With `--devices` the devices are simulated ones of this machine's processor.
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import describe_error, emit
from benchmarks.gpu.jobs import ENGINES

LISTED = 30
TIMED, AGAIN = "fresh prompts, each program waited for", "the same prompts again"
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_seconds",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_seconds",
    "/jax/core/compile/backend_compile_duration": "compile_seconds",
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--small", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--requests", type=int, help="sequences at once; by default 256, or 8")
    parser.add_argument("--prompt", type=int, help="tokens; by default 128, or 16")
    parser.add_argument("--answer", type=int, help="tokens; by default 256, or 64")
    parser.add_argument("--longest", type=int, help="the engine's longest sequence, in 40 GB")
    parser.add_argument("--engine", default="pages", choices=ENGINES)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--devices", type=int, help="simulated ones, which share the sequences")
    parser.add_argument("--no-trace", action="store_true")
    options = parser.parse_args(words)
    small = options.small
    options.shape = "tiny" if small else "qwen3-1.7b"
    options.requests = options.requests or (8 if small else 256)
    options.prompt = options.prompt or (16 if small else 128)
    options.answer = options.answer or (64 if small else 256)
    return options


class Watch:
    """Times an engine's programs, each waited for, and its steps on the host, while it is on."""

    def __init__(self, engine: Any) -> None:
        """Stand between the engine and its programs."""
        self.is_on, programs, runner = False, engine.programs, engine._runner
        for name in ("prefill", "decode", "gather"):
            setattr(programs, name, self._waiting(name, getattr(programs, name)))
        runner.step = self._stepping(runner.step)
        self.restart()

    def restart(self) -> None:
        """Forget what was timed."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.runs: Counter[str] = Counter()
        self.cpu_in_programs = 0.0
        self.between: list[tuple[float, float]] = []  # of each chunk: seconds, those of the CPU

    def _waiting(self, name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        import jax

        def run(compiled: Callable[..., Any], *given: Any) -> Any:
            if not self.is_on:
                return compiled(*given)
            begun, cpu = time.perf_counter(), time.thread_time()
            result = jax.block_until_ready(compiled(*given))
            self.seconds[name] += time.perf_counter() - begun
            self.cpu_in_programs += time.thread_time() - cpu
            self.runs[name] += 1
            return result

        return lambda *size: functools.partial(run, program(*size))

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            if not self.is_on:
                return step(*given, **named)
            inside, cpu_inside = sum(self.seconds.values()), self.cpu_in_programs
            begun, cpu = time.perf_counter(), time.thread_time()
            result = step(*given, **named)
            taken = time.perf_counter() - begun - (sum(self.seconds.values()) - inside)
            worked = time.thread_time() - cpu - (self.cpu_in_programs - cpu_inside)
            self.between.append((taken, worked))
            return result

        return run

    def row(self, steps: int) -> dict[str, Any]:
        """Return what was timed: of prefill in all, of a token and of the host for a chunk."""
        decode, chunks = self.seconds["decode"], self.runs["decode"]
        host, cpu = zip(*self.between, strict=True) if self.between else ((0.0,), (0.0,))
        return {
            "prefill_seconds": self.seconds["prefill"],
            "prefill_programs": self.runs["prefill"],
            "decode_ms_a_token": 1e3 * decode / max(1, chunks) / steps,
            "chunks": chunks,
            "tokens_a_chunk": steps,
            "host_ms_a_chunk": 1e3 * statistics.median(host),
            "host_cpu_ms_a_chunk": 1e3 * statistics.median(cpu),
            "host_seconds": sum(host),
        }


class Probe:
    """An engine with random weights that answers prompts of one length.

    Attributes:
        watch: times its programs.
        started: seconds of tracing, lowering and compiling so far.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Build the engine and give it weights."""
        import jax
        import numpy as np

        from benchmarks.gpu.ours import draw_params, engine_of, layout_of
        from benchmarks.gpu.specs import spec_of
        from jaxrl_llm.sharding.layout import ROLLOUT_RULES, Layout, make_mesh

        self.options, self.spec = options, spec_of(options.shape)
        self.started: defaultdict[str, float] = defaultdict(float)
        jax.monitoring.register_event_duration_secs_listener(self._note)
        layout = layout_of()
        if options.devices:
            devices = jax.devices()[: options.devices]
            layout = Layout(make_mesh({"data": options.devices}, devices), rules=ROLLOUT_RULES)
        job = {
            "shape": options.shape,
            "engine": options.engine,
            "dtype": "float32" if options.small else "bfloat16",
            "settings": {"cache_gb": 0.5 if options.small else 40.0} if options.longest else {},
        }
        longest = options.longest or options.prompt + options.answer
        self.engine = engine_of(job, options.requests, longest, layout)
        self.engine._is_warm = True  # programs are compiled when they are needed
        self.watch = Watch(self.engine)
        self.engine.load(draw_params(self.spec, layout), version=0)
        self._rng = np.random.default_rng(0)
        self.prompts = self.fresh()

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in EVENTS:
            self.started[EVENTS[event]] += duration_secs
            self.started["programs"] += event.endswith("backend_compile_duration")

    def fresh(self) -> list[list[int]]:
        """Draw prompts that were not there before, and keep them."""
        size = self.options.requests, self.options.prompt
        self.prompts = self._rng.integers(1, self.spec.vocab_size, size).tolist()
        return self.prompts

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        """Answer prompts; return the time, and how much of the prompts was read."""
        from jaxrl_llm.rollout.engine import Request, SamplingParams

        sampling = SamplingParams(max_new_tokens=tokens, top_p=self.options.top_p)
        asked = [Request(tuple(p), sampling, seed) for seed, p in enumerate(prompts)]
        before, begun = self.engine.stats().prompt_tokens, time.perf_counter()
        self.engine.sample(asked)
        taken = time.perf_counter() - begun
        return {
            "seconds": taken,
            "tokens_per_second": len(prompts) * tokens / taken,
            "prompt_tokens_read": self.engine.stats().prompt_tokens - before,
        }

    def floor_ms(self, rate: float) -> float:
        """Return the time of a step that reads weights, keys and values at a rate, in ms."""
        from benchmarks.gpu.tables import decoding_bytes

        prompt, new = self.options.prompt, self.options.answer
        settings = ENGINES[self.options.engine].get("settings", {})
        contexts = range(prompt, prompt + new)
        size = decoding_bytes(self.spec, self.options.requests, contexts, **settings)
        return 1e3 * size / new / rate

    def traced(self, tokens: int) -> dict[str, Any]:
        """Trace an answer to prompts that are in the cache; return the time of each kernel."""
        from jaxrl_llm.monitoring.profiler import device_timeline, read_trace, tracing

        with tempfile.TemporaryDirectory() as folder:
            with tracing(Path(folder) / "trace", 1):
                self.generate(self.prompts, tokens)
            (path,) = Path(folder).rglob("*.xplane.pb")
            trace = read_trace(path)
        names = sorted({operation.device for operation in trace.operations})
        timeline = device_timeline(trace, names[0])
        groups: defaultdict[str, float] = defaultdict(float)
        kernels: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for operation, seconds in zip(timeline.operations, timeline.seconds, strict=True):
            groups[operation.group] += float(seconds)
            label = f"{operation.name.rstrip('0123456789._')} {operation.source[-60:]}".strip()
            kernels[label, operation.group].append(float(seconds))
        busy, whole = sum(groups.values()), (trace.step.end - trace.step.start) / 1e9
        longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:LISTED]
        return {
            "seconds": whole,
            "device_busy": busy / whole,
            "busy_ms_a_token": 1e3 * busy / tokens,
            "kernels_a_token": len(timeline.operations) / tokens,
            "shares": {group: seconds / busy for group, seconds in groups.items()},
            "kernels": [
                [name, group, 1e3 * sum(times) / tokens, len(times) / tokens]
                for (name, group), times in longest
            ],
        }


def main(words: Sequence[str] | None = None) -> None:
    """Print the rows."""
    options = arguments(words)
    if options.devices:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    from benchmarks.gpu.ours import peak_bytes, read_rate

    rate = read_rate(2**24 if options.small else 2**32)
    begun = time.perf_counter()
    probe = Probe(options)
    loaded = time.perf_counter() - begun
    first = probe.generate(probe.fresh(), options.answer)
    emit(what="first call", seconds=first["seconds"], load_seconds=loaded, **probe.started)
    emit(what="fresh prompts", **probe.generate(probe.fresh(), options.answer))
    watch, steps = probe.watch, probe.engine.programs.sizes.steps
    probe.generate(probe.prompts, 2)  # compiles what prompts in the cache need
    watch.is_on = True
    for what in (TIMED, AGAIN):
        prompts = probe.fresh() if what == TIMED else probe.prompts
        watch.restart()
        row = probe.generate(prompts, options.answer) | watch.row(steps)
        row |= {"of_floor": probe.floor_ms(rate) / row["decode_ms_a_token"]}
        emit(what=what, **row, bandwidth=rate, peak_bytes=peak_bytes())
    watch.is_on = False
    if not options.no_trace:
        tokens = min(3 * steps, options.answer)
        try:
            emit(what="trace", **probe.traced(tokens))
        except Exception as error:  # what was timed before stands
            emit(what="trace", error=describe_error(error))
    probe.engine.close()


if __name__ == "__main__":
    main()
