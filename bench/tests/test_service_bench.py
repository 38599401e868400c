"""The harness itself: requests, what clients notice, processes, page."""

import asyncio
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bench import findings
from bench.service import asks, clients, command, figures, processes
from bench.service.answers import Answer, difference
from bench.service.recovery import gap_around
from bench.service.run import Wanted


def test_requests_depend_on_their_seed_alone() -> None:
    first, again, other = (asks.make(seed, 48, model="m") for seed in (1, 1, 2))
    assert first == again and [ask.body for ask in first] == [ask.body for ask in again]
    assert [ask.body for ask in first] != [ask.body for ask in other]
    assert {(ask.kind, ask.protocol) for ask in first} == {(k, p) for k in asks.KINDS for p in asks.PATHS}
    assert len({ask.name for ask in first}) == 48
    with pytest.raises(ValueError, match="kind: got 'x'"):
        asks.one(1, 1, model="m", kind="x")


def chat(text: str | None = None, finish: str | None = None, **more: object) -> dict:
    delta = {} if text is None else {"content": text}
    logprobs = None if text is None else {"content": [{"token": text, "logprob": -0.5}]}
    return {"choices": [{"delta": delta, "logprobs": logprobs, "finish_reason": finish}], **more}


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
EVENTS = [chat("one"), chat(" two"), chat(None, "stop", usage=USAGE)]


def collect(events: list[dict], protocol: str = "chat") -> Answer:
    answer = Answer(began=0.0)
    for at, event in enumerate(events):
        answer.take(protocol, event, float(at + 1))
    return answer


def test_what_clients_notice() -> None:
    good = collect(EVENTS)
    assert good.parts == {"text": "one two"} and (good.finish, good.completion) == ("stop", 2)
    assert good.first == 1.0 and good.per_token == 1.0 and good.longest_gap == 1.0
    assert difference(good, collect(EVENTS)) == ""
    assert difference(good, collect([EVENTS[0], EVENTS[2]])).startswith("lost: text at character 3")
    assert difference(good, collect([EVENTS[0], *EVENTS])).startswith("changed: text")
    assert difference(good, collect([*EVENTS[:2], EVENTS[1], EVENTS[2]])).startswith("changed: text")
    assert difference(good, collect(EVENTS[:2])).startswith("changed: finish")
    other = copy.deepcopy(EVENTS)
    other[1]["choices"][0]["logprobs"]["content"][0]["logprob"] = -0.25
    assert difference(good, collect(other)).startswith("changed: token 1")
    assert difference(good, collect([{"error": {"message": "no"}}])).startswith("failed: ")
    gone = collect(EVENTS[:1])
    gone.left = True
    assert difference(good, gone) == ""
    gone.parts["text"] = "two"
    assert difference(good, gone).startswith("changed")


def test_events_of_the_other_protocols() -> None:
    usage = {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
    events = [
        {"type": "response.output_text.delta", "output_index": 0, "delta": "a", "logprobs": [{"token": "a"}]},
        {"type": "response.output_text.done", "output_index": 0, "text": "a"},
        {"type": "response.completed", "response": {"status": "completed", "usage": usage}},
    ]
    answer = collect(events, "responses")
    assert (answer.parts, answer.finish, answer.cached) == ({"text 0": "a"}, "completed", 1)
    events[1]["text"] = "aa"
    assert "deltas" in collect(events, "responses").trouble
    events = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "name": "weather"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}},
    ]
    answer = collect(events, "messages")
    assert answer.parts == {"call 0 name": "weather", "partial_json 0": "{}"}
    assert (answer.finish, answer.prompt, answer.completion, answer.cached) == ("tool_use", 4, 2, 1)


def test_a_client_waits_when_told_to_and_sees_a_broken_stream() -> None:
    calls = []

    def serve(request: httpx.Request) -> httpx.Response:
        calls.append(json.loads(request.content))
        if len(calls) == 1:
            return httpx.Response(429, headers={"retry-after": "0"})
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS)
        return httpx.Response(200, text=lines + ("data: [DONE]\n\n" if len(calls) < 3 else ""))

    ask = asks.one(1, 0, model="m", kind="greedy", protocol="chat")

    async def both() -> list[Answer]:
        async with httpx.AsyncClient(base_url="http://here", transport=httpx.MockTransport(serve)) as client:
            return [await clients.answer_of(client, ask), await clients.answer_of(client, ask),
                    await clients.answer_of(client, ask, leave_after=1)]  # fmt: skip

    whole, broken, left = asyncio.run(both())
    assert (whole.refusals, whole.trouble, whole.parts) == (1, "", {"text": "one two"})
    assert broken.trouble == "the stream broke off" and left.left and left.parts == {"text": "one"}
    assert set(clients.complaints({"a": whole, "b": whole}, {"a": broken, "b": left})) == {"a"}


def test_processes_are_found_by_their_mark_and_ended() -> None:
    mark = f"test-{os.getpid()}"
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {processes.MARK: mark})
    try:
        while len(processes.marked(mark)) < 2:
            assert parent.poll() is None
        parent.kill()
        parent.wait()
        (orphan,) = processes.wait_gone(mark, 0.2)
        assert processes.resident(orphan.pid) > 0 and orphan.alive()
    finally:
        processes.end(processes.marked(mark))
    assert processes.wait_gone(mark, 10.0) == [] and not orphan.alive() and processes.resident(orphan.pid) == 0


SPREAD = {"p50": 1.0, "p90": 2.0, "max": 3.0}
FOUND = {
    "about": {"machine": "some", "cores": 2, "python": "3", "load": 0.1, "date": "2026-01-01", "model": "v41-mini",
              "device": "cpu", "quick": False},
    "latency": [{"shape": shape, "at_once": n, "requests": 3, "failed": 0, "prompt_tokens": 5, "first_ms": SPREAD,
                 "token_ms": SPREAD, "tokens_a_second": 9.0} for shape in ("colocated", "local") for n in (1, 4)],
    "prefixes": [{"shape": "colocated", "way": "cold", "prompt_tokens": 5, "cached_tokens": 0, "first_ms": SPREAD,
                  "different": 0}],
    "transfer": [{"shape": "local", "of": "clients", "handoffs": 2, "bytes": 2**21, "ahead": 0.5,
                  "taken_ahead": 0.5, "there": 0.75, "load_ms": 3.0, "rate": 2.0**20, "numbers": {}}],
    "recovery": [{"shape": "2 prefill, local", "role": "decode", "up_s": 3.0, "gap_s": 4.0, "stopped": 1,
                  "flowing": 3, "flowing_gap_s": 2.0, "requests": 8, "wrong": {}}],
    "storm": [{"shape": "local", "requests": 2, "at_once": 2, "seconds": 9.0, "faults": {"kill decode": 1},
               "fault_times": [[1.0, "kill decode"]], "left": 0, "refusals": 0, "silent": 1, "first_s": SPREAD,
               "wrong": {"1": "lost"}, "gap_s": SPREAD, "spans": [[0.0, 4.0, 3.5], [1.0, 2.0, 0.1]],
               "memory_before": {"a": 2**20}, "memory_after": {"a": 2**21}}],
    "ends": [{"shape": "local", "status": 1, "left": ["python"]}],
}  # fmt: skip


def test_page_pictures_and_complaints(tmp_path: Path) -> None:
    findings.save(tmp_path / "found.json", FOUND)
    found = figures.load(tmp_path / "found.json")
    pictures = figures.draw(found, tmp_path, "page")
    assert [p.name for p in pictures] == ["page_latency.png", "page_recovery.png", "page_storm.png"]
    assert all(picture.stat().st_size > 1000 for picture in pictures)
    text = figures.page(found, [picture.name for picture in pictures])
    assert "(page_storm.png)" in text and "| 1 x kill decode |" in text and "1 processes were left" in text
    assert command.complaints(found) == ["local: 1: lost", "local ended with 1 and left ['python']"]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no measurement of a service"):
        figures.load(tmp_path / "other.json")


def test_gaps_count_from_the_kill_on() -> None:
    answer = Answer(began=0.0, times=[5.0, 6.0, 9.0])
    assert gap_around(answer, 1.0) == 5.0 and gap_around(answer, 5.5) == 3.0 and gap_around(answer, 10.0) == 0.0


def test_parts_are_checked() -> None:
    with pytest.raises(ValueError, match="parts: got x, allowed are latency"):
        Wanted(parts=("x",))
