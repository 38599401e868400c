from __future__ import annotations

import signal
import threading

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, generate_latest
from supervise_kit import Bench, until

from orchestrator.server.errors import ApiError, error_response
from orchestrator.server.settings import ServerSettings
from orchestrator.service.config import from_values
from orchestrator.service.front.metrics import ClusterCollector
from orchestrator.service.front.routes import add_cluster_routes
from orchestrator.service.run import threads_of
from orchestrator.service.supervise.signals import Signals, StoppableServer
from orchestrator.service.supervise.thread import SupervisorThread


@pytest.fixture
def client():
    app = FastAPI()
    app.add_exception_handler(ApiError, lambda request, error: error_response(error, request.url.path))
    known = {"decode-0": "decode-1"}

    def drain(name):
        if name == "busy":
            raise ValueError("worker: busy is draining, allowed is one that is up")
        if name == "slow":
            raise TimeoutError
        return known[name]

    settings = ServerSettings(api_keys=("key-of-tests",))
    add_cluster_routes(app, settings, status=lambda: {"version": 1, "workers": []}, drain=drain)
    return TestClient(app, headers={"Authorization": "Bearer key-of-tests"})


def test_routes_show_and_drain(client):
    assert client.get("/cluster/status").json() == {"version": 1, "workers": []}
    done = client.post("/cluster/drain?worker=decode-0")
    assert done.json() == {"worker": "decode-0", "successor": "decode-1"}


@pytest.mark.parametrize(("worker", "status"), [("nobody", 404), ("", 404), ("busy", 409), ("slow", 503)])
def test_drains_that_cannot_be(client, worker, status):
    answer = client.post(f"/cluster/drain?worker={worker}")
    assert answer.status_code == status and answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["", "Bearer wrong-key"])
def test_routes_need_a_key(client, key):
    for method, path in (("GET", "/cluster/status"), ("POST", "/cluster/drain?worker=decode-0")):
        assert client.request(method, path, headers={"Authorization": key}).status_code == 401


def test_thread_runs_a_supervisor_and_tells_of_trouble():
    told, bench = [], None

    def make(now):
        nonlocal bench
        bench = Bench(restarts=0, now=now)
        return bench.supervisor

    thread = SupervisorThread(make, told.append)
    thread.start()
    assert {worker["name"] for worker in thread.status()["workers"]} >= {"router", "decode-1"}
    with pytest.raises(KeyError):
        thread.drain("nobody")
    bench.handle("prefill-0").end = "exit 1"
    until(lambda: told, "word of the trouble")
    assert "prefill" in told[0]
    thread.receive(object())  # means nothing, harms nothing
    assert thread.status()["counts"] == {"unexpected object": 1}
    hurry = threading.Event()
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(thread.end(0.0, 60.0, hurry.is_set)))
    waiting.start()
    hurry.set()
    waiting.join(60)
    assert len(ended) == 1 and thread.ask(lambda supervisor, now: supervisor.ended)
    thread.close()


def test_question_that_is_not_answered_ends():
    thread = SupervisorThread(lambda now: Bench().supervisor)
    with pytest.raises(TimeoutError):
        thread.ask(lambda supervisor, now: 1, timeout=0.05)


def test_first_signal_stops_taking_and_second_ends_at_once():
    stopped = []
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        server = StoppableServer(FastAPI(), ServerSettings(), signals, lambda: stopped.append(1), 7.0, "info")
        assert server.config.timeout_graceful_shutdown == 7 and not server.should_exit
        server.handle_exit(signal.SIGTERM, None)
        assert server.should_exit and not server.force_exit and stopped == [1]
        server.handle_exit(signal.SIGTERM, None)
        assert server.force_exit and stopped == [1] and signals.count == 2
        signal.raise_signal(signal.SIGTERM)
        until(lambda: signals.count == 3, "the third")
        assert StoppableServer(FastAPI(), ServerSettings(), signals, list, 0.0, "info").should_exit
    assert signal.getsignal(signal.SIGTERM) == before


def test_engines_share_the_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert threads_of(from_values({"roles": {"prefill": 2, "decode": 1, "encoder": 1}})) == 2
    assert threads_of(from_values({"roles": {"prefill": 9, "decode": 9}})) == 1
    assert threads_of(from_values({"engine": {"threads": 5}})) == 5


def worker(name, state, **more):
    plain = {"held": 0, "memory": 0, "waiting": 0.0, "steps": 0, "restarts": 0, "numbers": {}}
    return {"name": name, "role": "decode", "state": state, **plain, **more}


def test_metrics_show_workers():
    workers = [
        worker("decode-0", "gone", held=9),
        worker("decode-1", "up", held=3, memory=2_000, steps=7, restarts=1, numbers={"bytes in": 5.0}),
        worker("decode-2", "starting"),
    ]
    registry = CollectorRegistry()
    registry.register(ClusterCollector(lambda: {"workers": workers, "entry": {"dropped": {"delivered before": 2}}}))

    def value(metric, worker, **labels):
        return registry.get_sample_value(metric, {"worker": worker, "role": "decode", **labels})

    assert registry.get_sample_value("fathom_supervisor_up") == 1.0
    assert [value("fathom_worker_up", f"decode-{n}") for n in range(3)] == [None, 1.0, 0.0]
    assert value("fathom_worker_requests", "decode-1") == 3.0
    assert value("fathom_worker_memory_bytes", "decode-1") == 2_000.0
    assert value("fathom_worker_steps_total", "decode-1") == 7.0
    assert value("fathom_worker_restarts_total", "decode-1") == 1.0
    assert value("fathom_worker_number", "decode-1", name="bytes in") == 5.0
    assert registry.get_sample_value("fathom_entry_dropped_total", {"why": "delivered before"}) == 2.0


def test_a_supervisor_that_does_not_answer_is_a_number():
    def status():
        raise TimeoutError

    registry = CollectorRegistry()
    registry.register(ClusterCollector(status))
    assert registry.get_sample_value("fathom_supervisor_up") == 0.0
    assert "fathom_worker_up" not in generate_latest(registry).decode()
