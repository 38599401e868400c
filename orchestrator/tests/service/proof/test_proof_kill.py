"""Processes are killed, paused and drained while clients stream; no client may see it in its text."""

from __future__ import annotations

import time

import pytest
from proof_kit import Load, check, counted, lasting, some

from bench.service import faults
from bench.service.clients import complaints
from bench.service.processes import look

SPARE = 400 * 2**20  # bytes that a worker may keep: caches of code and of prefixes


def one_of(park, role):
    return max((w for w in park.workers() if w.role == role), key=lambda worker: worker.held)


def test_each_kind_of_process_is_killed(reference, park):
    """24 streams; the router, the encoder, a prefill and a decode worker die one after the other."""
    wanted = some(41, 24, tokens=96)
    check(reference, park, wanted[:8])  # so that memory is compared with that of workers that have worked
    expected = reference.answers(wanted)
    before = park.memory()
    lives = {worker.name: worker.life for worker in park.workers()}
    killed = []
    with Load(park, wanted, at_once=12) as load:
        for role in ("decode", "prefill", "encoder", "router"):
            time.sleep(1.0)
            fault = faults.kill(park, one_of(park, role))
            assert fault is not None
            killed.append(fault.name)
    assert complaints(expected, load.got) == {} and load.got.keys() == expected.keys()
    park.wait_up(180)
    park.wait_idle()
    now = {worker.name: worker.life for worker in park.workers()}
    assert {name for name in now if now[name] > lives[name]} >= set(killed)
    assert {row["name"] for row in park.status()["recoveries"]} >= set(killed)
    for name, memory in park.memory().items():
        assert memory < before[name] + SPARE, name


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_all_of_a_role_are_killed(reference, park, role):
    """Nobody is left to do the work; it waits for the new ones."""
    wanted = some(42, 8, kinds=("sampled", "long"), tokens=96)
    expected = reference.answers(wanted)
    with Load(park, wanted, at_once=8) as load:
        time.sleep(1.5)
        for worker in park.workers():
            if worker.role == role:
                faults.kill(park, worker)
    assert complaints(expected, load.got) == {} and load.got.keys() == expected.keys()
    park.wait_up(180)
    park.wait_idle()


def test_a_paused_worker(reference, park):
    """Longer than an entry's patience and shorter than the supervisor's: what it says afterwards is of an old epoch."""
    wanted = some(43, 8, kinds=("sampled",), tokens=160)
    expected = reference.answers(wanted)
    with Load(park, wanted, at_once=8) as load:
        time.sleep(1.0)
        assert faults.pause(park, one_of(park, "decode"), 6.0) is not None
    assert complaints(expected, load.got) == {} and load.got.keys() == expected.keys()
    park.wait_idle()


def test_a_decode_worker_is_drained(reference, park, device):
    """Its streams move with their state, it exits, another takes its place; no prompt is read again for them."""
    tokens = 400 if device == "cpu" else 2500  # beyond the grace, and beyond the start of an only worker's successor
    wanted = lasting(44, 6, tokens=tokens)
    expected = reference.answers(wanted)
    due = read_of_prompts(park) + sum(answer.prompt for answer in expected.values())
    with Load(park, wanted, at_once=6) as load:
        park.wait(lambda: held(park, "decode") == 6 and not held(park, "prefill"), 60, "to decode them all")
        park.wait(lambda: read_of_prompts(park) >= due, 60, "to tell of all prompts")
        worker = one_of(park, "decode")
        arrived = sum(w.numbers.get("handoffs in", 0) for w in park.workers() if w.role == "decode" and w != worker)
        process = look(worker.pid)
        answer = park.drain(worker.name)
        assert process is not None and answer.is_success, answer.text
        park.wait(lambda: not process.alive(), 120, f"to let {worker.name} go")
    assert complaints(expected, load.got) == {} and load.got.keys() == expected.keys()
    successor = answer.json()["successor"]
    park.wait(lambda: park.worker(successor).state == "up", 120, "to start another")
    row = next(row for row in park.status()["workers"] if row["name"] == worker.name)
    assert (row["state"], row["last_exit"]) == ("gone", "exit 0"), row
    park.wait_idle()
    assert read_of_prompts(park) == due
    assert counted(park)["decode handoffs in"] > arrived


def read_of_prompts(park):
    """Tokens that prefill workers computed or had."""
    numbers = counted(park)
    return numbers["prefill prompt tokens"] + numbers["prefill cached tokens"]


def held(park, role):
    return sum(worker.held for worker in park.workers() if worker.role == role)
