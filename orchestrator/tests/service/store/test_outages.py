"""The store is gone, hangs, or comes back: requests compute what they would have found, and never anything else."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import count
from pathlib import Path

import pytest
from service_kit_store import Worker, prompt_of, same, until

from orchestrator.service.store.io_process import Places

QUICK = {"answer_s": 0.3, "deadline_s": 0.3}
_fresh = count(1000)


def hits_again(writer: Worker, reader: Worker, cold, what: str) -> None:
    """Prompts that nobody has seen, until one that the writer computed is a hit for the reader."""

    def hit() -> bool:
        prompt = prompt_of(400, next(_fresh))
        writer.run(prompt)
        writer.ask(flush=20)
        found = reader.run(prompt)
        assert same(found, cold(prompt))
        return found["cached"] > 0

    until(hit, f"no hits again after {what}")


@pytest.mark.parametrize("kind", ["embedded", "directory"])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_the_io_process_hangs_or_dies(start, configured, machines, cold, kind, how) -> None:
    config, (one, two) = configured(kind), machines(kind)
    writer, reader = start(config, one, patience=QUICK), start(config, two, patience=QUICK)
    writer.up(), reader.up()
    prompt = prompt_of(600, 20)
    writer.run(prompt)
    writer.ask(flush=60)
    reader.stored(prompt, 4)
    io = reader.io_pid()
    os.kill(io, how)
    try:
        for tokens in (prompt, prompt_of(300, 21)):
            assert same(reader.run(tokens), cold(tokens))  # it returned: nothing waits for a process that says nothing
            assert same(writer.run(tokens), cold(tokens))
    finally:
        if how is signal.SIGSTOP:
            os.kill(io, signal.SIGCONT)
    hits_again(writer, reader, cold, how.name)
    if how is signal.SIGKILL:
        assert reader.io_pid() != io and reader.numbers()["store_reconnects"] >= 1


def test_the_mounted_folder_goes_and_comes_back(start, configured, machines, cold, tmp_path) -> None:
    config, (one, two) = configured("directory"), machines("directory")
    writer, reader = start(config, one, patience=QUICK), start(config, two, patience=QUICK)
    writer.up(), reader.up()
    prompt = prompt_of(600, 22)
    writer.run(prompt)
    writer.ask(flush=60)
    reader.stored(prompt, 4)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").mkdir()  # the mount point
    assert same(reader.run(prompt), cold(prompt))
    other = prompt_of(600, 23)
    assert same(writer.run(other), cold(other)) and same(reader.run(other), cold(other))
    assert not list((tmp_path / "store").iterdir()), "something was written below the mount point"
    (tmp_path / "store").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    hits_again(writer, reader, cold, "the mount")


def test_the_master_of_mooncake_dies_and_comes_back(start, configured, machines, cold, master) -> None:
    config, (one, two) = configured("mooncake"), machines("mooncake")
    writer, reader = start(config, one, patience=QUICK), start(config, two, patience=QUICK)
    writer.up(), reader.up()
    hits_again(writer, reader, cold, "the start")
    master.kill()
    for number in range(2):
        prompt = prompt_of(500, 30 + number)
        assert same(writer.run(prompt), cold(prompt)) and same(reader.run(prompt), cold(prompt))
    assert master.start() == ""
    hits_again(writer, reader, cold, "the master's return")


def test_a_machine_of_mooncake_dies_with_what_it_lent(start, configured, machines, cold, master) -> None:
    """Its blocks are gone until they are computed anew; the master learns of it after seconds."""
    config, (one, two) = configured("mooncake"), machines("mooncake")
    writer, reader = start(config, one, patience=QUICK), start(config, two, patience=QUICK)
    writer.up(), reader.up()
    prompt = prompt_of(900, 32)
    writer.run(prompt)
    writer.ask(flush=60)
    os.kill(writer.io_pid(), signal.SIGKILL)
    assert same(reader.run(prompt), cold(prompt))
    hits_again(writer, reader, cold, "the loss of a machine")


@pytest.mark.parametrize("kind", ["embedded", "directory"])
def test_a_worker_dies_in_the_midst_of_a_write(start, configured, machines, cold, kind) -> None:
    """At several steps of filling slots, and with batches handed over: the other worker misses or hits."""
    config, (one, two) = configured(kind), machines(kind)
    reader = start(config, two).up()
    for number, step in enumerate((3, 27)):
        prompt = prompt_of(900, 40 + number)
        writer = start(config, one, kill_at=step).up()
        writer.send(run=prompt)
        assert writer.process.wait(180) == -signal.SIGKILL
        found = reader.run(prompt)
        assert same(found, cold(prompt))


@pytest.mark.parametrize("kind", ["embedded", "directory", "mooncake"])
def test_the_writing_process_dies_in_the_midst_of_a_write(start, configured, machines, cold, kind) -> None:
    config, (one, two) = configured(kind), machines(kind)
    writer, reader = start(config, one), start(config, two)
    writer.up(), reader.up()
    rng = random.Random(kind)
    for number in range(2):
        prompt = prompt_of(900, 50 + number)
        io = until(lambda: running(one), "no I/O process")
        writer.send(run=prompt)
        time.sleep(rng.random() * 0.3)  # whenever that is: in no state of the write may it do harm
        os.kill(io, signal.SIGKILL)
        assert same(writer.answer(), cold(prompt))
        writer.ask(flush=60)
        assert same(reader.run(prompt), cold(prompt))
        until(lambda gone=io: running(one) not in (None, gone), "no new I/O process")
    hits_again(writer, reader, cold, "the writing process died")


def running(folder: Path) -> int | None:
    """Number of the I/O process of a service's folder, if it runs."""
    try:
        pid = int((Places(folder).home / "pid").read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return None
    return pid


@pytest.mark.parametrize("kind", ["embedded", "directory"])
def test_blocks_are_collected_while_others_read_them(start, configured, machines, cold, kind) -> None:
    """A store and a host tier that hold a few of the prompts, and bytes that go soon after their keys."""
    options = {"policy": {"grace_s": 0.2, "high": 0.5, "low": 0.3}}
    config = configured(kind, capacity_gb=0.0015, host_blocks=16, options=options)
    one, two = machines(kind)
    workers = [start(config, one), start(config, two)]
    for worker in workers:
        worker.up()
    prompts = [prompt_of(600 + 64 * number, 60 + number) for number in range(9)]
    expected = [cold(prompt) for prompt in prompts]
    rng, hits = random.Random(kind), 0
    for _ in range(20):
        chosen = [rng.randrange(len(prompts)) for _ in workers]
        for worker, number in zip(workers, chosen, strict=True):
            worker.send(run=prompts[number])
        for worker, number in zip(workers, chosen, strict=True):
            found = worker.answer()
            assert same(found, expected[number])
            hits += found["cached"] > 0
    assert hits
