"""What the image encoder did, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.engine.images import ImageCounters

_COUNTERS = {
    "images": "Images of requests",
    "hits": "Images whose embeddings were there",
    "evictions": "Embeddings given up for others",
    "patches": "Patches encoded",
    "seconds": "Seconds spent encoding",
}
_GAUGES = {
    "bytes": "Bytes of embeddings",
    "held_bytes": "Bytes of embeddings that requests hold",
    "patches_in_work": "Patches that are encoded or wait for it",
}


class ImageCollector(Collector):
    """Reads the counters when asked; all of one answer belong together."""

    def __init__(self, read: Callable[[], ImageCounters]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        counters = self._read()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_name(name), text, value=getattr(counters, name))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(_name(name), text, value=getattr(counters, name))


def _name(field: str) -> str:
    return "fathom_images" if field == "images" else f"fathom_image_{field}"
