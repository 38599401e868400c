"""The shared store stops answering, then dies: everything is computed, nothing is wrong."""

from __future__ import annotations

import signal

import pytest
from proof_kit import check, some

MARK = "io_process"


def io_processes(park):
    return [process for process in park.processes() if MARK in process.command]


def test_the_store_is_away(reference, park):
    found = io_processes(park)
    if not found:
        pytest.skip("no process of the store is running here")
    wanted = some(61, 6, kinds=("long", "shared"), long=700)
    check(reference, park, wanted[:2])
    for process in found:
        process.send(signal.SIGSTOP)
    try:
        check(reference, park, wanted)
    finally:
        for process in found:
            process.send(signal.SIGCONT)
    check(reference, park, wanted)
    for process in io_processes(park):
        process.send(signal.SIGKILL)
    check(reference, park, some(62, 6, kinds=("long", "shared"), long=700))
    park.wait_idle()
