"""Two processes: parts go from one to the other, and either is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transfer_kit import ID, QUICK, STREAMS, WAIT, Wired, dial_of, parts_of
from transfer_peer import SIZES, Address

from orchestrator.transfer import Receiver, TransferFailed


class Process:
    def __init__(self, *words):
        pipe = subprocess.PIPE
        command = [sys.executable, str(Path(__file__).with_name("transfer_peer.py")), *words]
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def line(self):
        return self.child.stdout.readline().split()

    def say(self):
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.child.kill()
        self.child.communicate()


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory():
    def mine():
        return {name for name in os.listdir("/dev/shm") if name.startswith("fathom-transfer-")}

    before = mine()
    yield
    assert mine() <= before


@pytest.mark.parametrize("kind", STREAMS)
def test_from_another_process(kind):
    with Process("send", kind) as process:
        receiver = Receiver(dial_of(kind, Address(process.line())), times=QUICK)
        with receiver.pull(ID, 1) as pull:
            for part in parts_of(SIZES):
                assert pull.take(timeout=WAIT) == part
            process.say()
            assert pull.take(timeout=WAIT) is None
            pull.done(timeout=WAIT)
        assert process.line() == ["concluded"] and process.child.wait(WAIT) == 0


@pytest.mark.parametrize("kind", STREAMS)
def test_the_sender_is_killed(kind):
    """What came whole is given; the rest fails within the lease."""
    with Process("send", kind) as process:
        receiver = Receiver(dial_of(kind, Address(process.line())), times=QUICK)
        with receiver.pull(ID, 1) as pull:
            assert pull.take(timeout=WAIT) == parts_of(SIZES)[0]
            while pull.waiting < sum(SIZES):
                time.sleep(0.01)
            process.child.kill()
            started = time.monotonic()
            assert [pull.take(timeout=WAIT) for _ in SIZES[1:]] == parts_of(SIZES)[1:]
            with pytest.raises(TransferFailed, match="lease"):
                pull.take(timeout=WAIT)
            assert time.monotonic() - started < QUICK.lease + QUICK.dial + 10


@pytest.mark.parametrize("kind", STREAMS)
def test_the_receiver_is_killed(kind):
    """The sender frees what it holds within the lease."""
    with Wired(kind) as wired:
        offered = wired.sender.offer(ID, 1)
        for part in parts_of(SIZES):
            offered.put(*part, timeout=WAIT)
        with Process("receive", kind, *map(str, wired.dial.args)) as process:
            offered._times = type(QUICK)(lease=60)  # until it has begun, however slow this machine is
            assert process.line() == ["taken"]
            offered._times = QUICK
            offered.put("more", bytes(100), timeout=WAIT)
            time.sleep(QUICK.lease * (1.2 if kind != "shared" else 0))
            assert offered.outcome is None  # its owner does nothing, but it lives
            process.child.kill()
            started = time.monotonic()
            with pytest.raises(TransferFailed, match="lease"):
                offered.wait(timeout=WAIT)
            assert time.monotonic() - started < QUICK.lease + 10 and wired.sender.held == 0
