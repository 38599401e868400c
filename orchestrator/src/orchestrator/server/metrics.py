"""Numbers for Prometheus, in a registry of their own."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from orchestrator.server.engine_protocol import AsyncEngineProtocol
from orchestrator.server.image_metrics import ImageCollector
from orchestrator.server.limits import Limits

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters that the handlers feed, gauges read from the engine when asked, and what `collectors` bring."""

    def __init__(self, engine: AsyncEngineProtocol, limits: Limits, collectors: Iterable[Collector] = ()) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"registry": self.registry}
        self.requests = Counter(
            "fathom_requests", "Requests by protocol and HTTP status", ["protocol", "status"], **own
        )
        self.finished = Counter("fathom_finished", "Generations by how they ended", ["protocol", "reason"], **own)
        self.prompt_tokens = Counter("fathom_prompt_tokens", "Prompt tokens of admitted requests", **own)
        self.cached_tokens = Counter("fathom_cached_tokens", "Prompt tokens that were in the cache", **own)
        self.output_tokens = Counter("fathom_output_tokens", "Sampled tokens", **own)
        self.first_token = Histogram(
            "fathom_time_to_first_token_seconds", "From arrival to the first token", buckets=_SECONDS, **own
        )
        self.duration = Histogram("fathom_request_seconds", "From arrival to the end", buckets=_SECONDS, **own)
        gauges = {
            "fathom_requests_in_flight": ("Requests that hold a slot", lambda: limits.in_flight),
            "fathom_engine_running": ("Requests in the running batch", lambda: engine.progress.running),
            "fathom_engine_waiting": ("Requests waiting for the batch", lambda: engine.progress.waiting),
            "fathom_engine_steps": ("Engine steps so far", lambda: engine.progress.steps),
            "fathom_engine_idle_seconds": (
                "Seconds since the last step",
                lambda: time.monotonic() - engine.progress.last_step,
            ),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, **own).set_function(read)
        if getattr(engine, "image_counters", None) is not None:
            self.registry.register(ImageCollector(lambda: engine.image_counters))  # type: ignore[attr-defined]
        for collector in collectors:
            self.registry.register(collector)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)
