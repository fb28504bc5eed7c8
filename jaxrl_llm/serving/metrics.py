"""Metrics of the server in Prometheus' text format."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.serving.limits import AdmissionLimiter

NAMESPACE = "jaxrl_llm"
GAUGES = {
    "running": "answers that are decoded",
    "waiting": "answers that wait to be decoded",
    "cached_tokens": "tokens in the cache",
    "cache_tokens": "tokens that the cache can hold",
    "cached_states": "states of linear attention in use",
    "cache_states": "states of linear attention that the cache can hold",
}
COUNTERS = {
    "prompt_tokens": "tokens of prompts",
    "generated_tokens": "tokens sampled",
    "reused_tokens": "tokens of prompts that the cache held already",
    "preemptions": "answers put back to make room in the cache",
}
LATENCY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

prometheus_client.disable_created_metrics()  # a time for each sample, which nobody reads


@runtime_checkable
class MeasuredEngine(Engine, Protocol):
    """An engine that counts what it does."""

    def stats(self) -> Any:
        """Return a named tuple with the fields in `GAUGES` and `COUNTERS`."""
        ...


class EngineCollector(Collector):
    """Reads the state of the engine and of the queue before it, whenever metrics are asked for."""

    def __init__(self, engine: MeasuredEngine, limiter: AdmissionLimiter) -> None:
        """Read nothing yet."""
        self._engine, self._limiter = engine, limiter

    def collect(self) -> Iterator[Metric]:
        """Yield one metric after the other."""
        stats = self._engine.stats()._asdict()
        for name, meaning in GAUGES.items():
            yield GaugeMetricFamily(f"{NAMESPACE}_engine_{name}", meaning, stats[name])
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(f"{NAMESPACE}_engine_{name}", meaning, stats[name])
        limiter = self._limiter
        yield GaugeMetricFamily(
            f"{NAMESPACE}_requests_running", "requests at work", limiter.running
        )
        yield GaugeMetricFamily(f"{NAMESPACE}_requests_waiting", "requests queued", limiter.waiting)


class ServerMetrics:
    """Counts and latencies of responses, beside the state of the engine.

    Args:
        engine: that samples.
        limiter: of the requests at once.
    """

    def __init__(self, engine: MeasuredEngine, limiter: AdmissionLimiter) -> None:
        """Count from zero, in a registry of its own."""
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(EngineCollector(engine, limiter))
        self._responses = prometheus_client.Counter(
            "responses",
            "responses, by path and status",
            ("path", "status"),
            namespace=NAMESPACE,
            registry=self._registry,
        )
        self._seconds = prometheus_client.Histogram(
            "response_seconds",
            "time until responses ended",
            ("path",),
            namespace=NAMESPACE,
            registry=self._registry,
            buckets=LATENCY_BUCKETS_S,
        )

    def record(self, path: str, status: int, seconds: float) -> None:
        """Count a response that has ended."""
        self._responses.labels(path, status).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)
