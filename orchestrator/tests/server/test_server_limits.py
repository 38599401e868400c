"""Admission, settings and health."""

import asyncio

import pytest
from pydantic import ValidationError

from orchestrator.server import ServerSettings
from orchestrator.server.errors import ApiError
from orchestrator.server.limits import Limits, TokenBucket
from orchestrator.server.settings import check_bind


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_bucket_refills_evenly_and_may_go_into_debt():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.wait() == 0
    bucket.spend(90)
    assert bucket.wait() == pytest.approx(31)
    clock.now = 31
    assert bucket.wait() == 0
    clock.now = 1e6
    bucket.wait()
    bucket.spend(60)
    assert bucket.wait() == pytest.approx(1)


def test_each_caller_has_a_rate_of_its_own():
    clock = Clock()
    limits = Limits(10, requests_per_minute=2, tokens_per_minute=100, clock=clock)
    for _ in range(2):
        limits.enter("a")
        limits.leave("a", 30)
    with pytest.raises(ApiError) as caught:
        limits.enter("a")
    assert caught.value.status == 429 and caught.value.headers["retry-after"] == "30"
    limits.enter("b")
    limits.leave("b", 1000)
    with pytest.raises(ApiError, match="tokens"):
        limits.enter("b")
    assert limits.in_flight == 0


def test_rate_limit_over_http(make_rig):
    rig = make_rig(requests_per_minute=2)
    assert [rig.chat().status_code for _ in range(3)] == [200, 200, 429]
    response = rig.messages()
    assert response.json()["error"]["type"] == "rate_limit_error" and int(response.headers["retry-after"]) >= 1


def test_full_engine(rig):
    rig.engine.capacity = 0
    for response in (rig.chat(), rig.chat(stream=True), rig.responses(), rig.messages(stream=True)):
        assert response.status_code == 429 and response.headers["retry-after"] == "2"
    assert rig.in_flight == 0


def test_engine_refusal_is_the_clients_fault(rig, monkeypatch):
    async def refuse(*_):
        raise ValueError("prompt: too long for the cache")
        yield

    monkeypatch.setattr(rig.engine, "generate", refuse)
    assert rig.chat().status_code == 400
    assert rig.messages(stream=True).json()["error"]["message"].endswith("too long for the cache")


def test_dead_engine(rig, monkeypatch):
    async def die(*_):
        raise RuntimeError("the engine is not running")
        yield

    monkeypatch.setattr(rig.engine, "generate", die)
    assert rig.chat(stream=True).status_code == 503
    assert rig.messages().json()["error"]["type"] == "overloaded_error"


def test_nothing_waits_for_ever(make_rig):
    rig = make_rig(ready_timeout=0.05)
    rig.engine.hold = asyncio.Event()
    for response in (rig.chat(), rig.chat(stream=True)):
        assert response.status_code == 503 and "retry-after" in response.headers
    assert not rig.engine.running and rig.in_flight == 0


def test_engine_failure_before_and_inside_a_stream(rig):
    rig.engine.fail_after = 1
    assert rig.chat().status_code == 500
    assert rig.messages().json() == {
        "type": "error",
        "error": {"type": "api_error", "message": "The engine ended the request: scripted failure"},
    }
    assert '"server_error"' in rig.chat(stream=True).text
    assert "event: error" in rig.messages(stream=True).text
    assert "event: error" in rig.responses(stream=True).text
    assert rig.in_flight == 0


def test_silence_is_filled_with_comments(make_rig):
    rig = make_rig(keep_alive=0.01)
    rig.engine.delay = 0.03
    assert ": keep-alive\n\n" in rig.chat(stream=True, max_tokens=2).text


def test_health_looks_at_progress(make_rig):
    rig = make_rig(stall_limit=0.05)
    assert rig.client.get("/health").json()["status"] == "ok"
    rig.engine._last_step -= 10
    assert rig.client.get("/health").status_code == 200, "an idle engine is healthy"
    rig.engine.running.add("stuck")
    response = rig.client.get("/health")
    assert response.status_code == 503 and response.json()["status"] == "stalled"
    assert rig.client.get("/health/live").status_code == 200
    assert rig.client.get("/health/ready").status_code == 503


def test_metrics(rig):
    rig.engine.cached = 4
    rig.chat()
    rig.chat(n=2)
    text = rig.client.get("/metrics").text
    assert 'fathom_requests_total{protocol="chat",status="200"} 1.0' in text
    assert 'fathom_requests_total{protocol="chat",status="400"} 1.0' in text
    assert "fathom_cached_tokens_total 4.0" in text and "fathom_requests_in_flight 0.0" in text
    assert "fathom_time_to_first_token_seconds_count 1.0" in text


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "example.org"])
def test_open_hosts_need_a_key(host):
    with pytest.raises(ValueError, match="API key"):
        check_bind(ServerSettings(host=host))
    check_bind(ServerSettings(host=host, api_keys=("long-enough",)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_none(host):
    check_bind(ServerSettings(host=host))


@pytest.mark.parametrize("bad", [{"api_keys": ("short",)}, {"port": 70000}, {"max_requests": 0}, {"unknown": 1}])
def test_bad_settings(bad):
    with pytest.raises(ValidationError):
        ServerSettings(**bad)
