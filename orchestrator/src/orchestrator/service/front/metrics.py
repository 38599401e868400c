"""The processes of the service, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LABELS = ["worker", "role"]
_GAUGES = {
    "held": ("fathom_worker_requests", "Requests that a worker holds something of"),
    "memory": ("fathom_worker_memory_bytes", "Resident bytes of its process"),
    "waiting": ("fathom_worker_owed_seconds", "Since when its engine owes an answer"),
}
_COUNTERS = {
    "steps": ("fathom_worker_steps", "Steps of its engine in this life; events, of a router"),
    "restarts": ("fathom_worker_restarts", "Lives that ended without being asked to"),
}


class ClusterCollector(Collector):
    """Reads `/cluster/status` when asked. A supervisor that does not answer is a number too: `fathom_supervisor_up` 0.

    Args:
        status: as `Front.status`; raises TimeoutError.
    """

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # nothing is asked while it is registered

    def collect(self) -> Iterator[Metric]:
        try:
            status = self._status()
        except TimeoutError:
            yield GaugeMetricFamily("fathom_supervisor_up", "Whether the supervisor answers", value=0)
            return
        yield GaugeMetricFamily("fathom_supervisor_up", "Whether the supervisor answers", value=1)
        workers = [worker for worker in status["workers"] if worker["state"] != "gone"]
        up = GaugeMetricFamily("fathom_worker_up", "Whether a worker is up", labels=_LABELS)
        numbers = GaugeMetricFamily("fathom_worker_number", "What a worker counts, by name", labels=[*_LABELS, "name"])
        for worker in workers:
            up.add_metric(_of(worker), float(worker["state"] == "up"))
            for name, value in worker["numbers"].items():
                numbers.add_metric([*_of(worker), name], value)
        yield from (up, numbers)
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, (name, text) in table.items():
                family = kind(name, text, labels=_LABELS)
                for worker in workers:
                    family.add_metric(_of(worker), worker[field])
                yield family
        dropped = CounterMetricFamily("fathom_entry_dropped", "Words that the entry refused, by reason", labels=["why"])
        for why, count in status["entry"]["dropped"].items():
            dropped.add_metric([why], count)
        yield dropped


def _of(worker: dict[str, Any]) -> list[str]:
    return [worker["name"], worker["role"]]
