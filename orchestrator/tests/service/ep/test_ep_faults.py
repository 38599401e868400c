"""Ranks that die or hang, and a role's process that does: the group serves again, or nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from service_kit_ep import Died, alone, empty, group, requests, single, spec_of, through

from orchestrator.cluster.workers import links_folder
from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.roles.engine_port import DecodeDone, Drop, PrefillDone, RunDecode
from orchestrator.service.ep.scratch import PREFIX, ScratchFolder

COUNT = 3


@pytest.fixture(scope="module")
def expected(folder):
    return alone(folder, requests(COUNT))


@pytest.fixture(scope="module")
def one(folder):
    return single(folder)


def pids(driver):
    numbers = driver.port.numbers()
    return [int(numbers[f"rank{rank}_pid"]) for rank in range(driver.port.ranks)]


def gone(pid):
    """Whether a process has ended; it may still wait to be read by its parent."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def decode_until_death(driver, specs):
    keys, step = tuple(sorted(specs)), driver.step
    while True:
        step += 1
        driver.do(RunDecode(step, keys))
        driver.wait(DecodeDone)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed(folder, tmp_path, one, expected, rank):
    """While it decodes, and once more while it reads prompts: each time the group forms anew with as many ranks."""
    specs = requests(COUNT)
    with group(folder, tmp_path) as pair:
        before = pids(pair)
        pair.load(specs, one.prefill(specs))
        pair.decode(specs, steps=1)
        os.kill(before[rank], signal.SIGKILL)
        with pytest.raises(Died) as died:
            decode_until_death(pair, requests(COUNT, tokens=1000))
        assert died.value.args == (rank,)
        pair.do(Drop("r0", 1))  # nobody answers before the group has formed
        assert not pair.quiet()
        formed = pair.reform()
        assert (formed.ranks, formed.room, formed.rows, formed.why) == (2, 2 * 48 * 128.0, 8, "")
        after = pids(pair)
        assert after[1 - rank] == before[1 - rank] and after[rank] != before[rank]
        empty(pair)
        assert through(one, pair, specs) == expected

        pair.begin(specs)
        os.kill(after[rank], signal.SIGKILL)
        pair.run_prefill(specs)
        with pytest.raises(Died):
            pair.wait(PrefillDone)
            pair.export(specs)
            pair.wait(DecodeDone)  # it was faster than its end
        assert pair.reform().ranks == 2
        assert through(pair, one, specs) == expected
        empty(pair)
        last = pids(pair)
    assert all(gone(pid) for pid in {*before, *after, *last})


def test_a_rank_hangs(folder, tmp_path, one, expected):
    """Its peer finds out in the time-out; it is ended, and another takes its place."""
    specs = requests(COUNT)
    with group(folder, tmp_path, timeout=2.0) as pair:
        before = pids(pair)
        pair.load(specs, one.prefill(specs))
        os.kill(before[1], signal.SIGSTOP)
        with pytest.raises(Died):
            decode_until_death(pair, specs)
        assert pair.reform().ranks == 2
        assert gone(before[1]) and pids(pair)[0] == before[0]
        assert through(one, pair, specs) == expected
        empty(pair)


def test_a_group_that_is_given_up_starts_anew(folder, tmp_path, one, expected):
    """The core waited too long for an answer: nobody knows which rank it is, so all are replaced."""
    specs = requests(COUNT)
    with group(folder, tmp_path) as pair:
        before = pids(pair)
        pair.load(specs, one.prefill(specs))
        pair.do(RunDecode(1, tuple(specs)))
        assert pair.reform().ranks == 2
        assert not pair.quiet()  # what it was asked before is not answered any more
        assert all(gone(pid) for pid in before) and not set(before) & set(pids(pair))
        assert through(one, pair, specs) == expected


def test_both_ranks_are_killed(folder, tmp_path, one, expected):
    with group(folder, tmp_path) as pair:
        for pid in pids(pair):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(Died):
            pair.wait(DecodeDone)
        assert pair.reform().ranks == 2
        assert through(one, pair, requests(COUNT)) == expected


ROLE = """
import sys, msgspec
from orchestrator.service.ep.port import EpPort
from orchestrator.service.messages import WorkerSpec
if __name__ == "__main__":
    port = EpPort(msgspec.json.decode(sys.stdin.readline(), type=WorkerSpec), ranks=2)
    print(*(int(port.numbers()[f"rank{rank}_pid"]) for rank in range(2)), flush=True)
    sys.stdin.read()
"""


def test_ranks_end_with_the_role(folder, tmp_path):
    """However it ends; a rank that is stopped, too."""
    with subprocess.Popen([sys.executable, "-c", ROLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as role:
        role.stdin.write(msgspec.json.encode(spec_of(folder, tmp_path)) + b"\n")
        role.stdin.flush()
        ranks = [int(word) for word in role.stdout.readline().split()]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)
        role.kill()
        assert all(gone(pid) for pid in ranks)
    left = set(links_folder().glob(f"{PREFIX}*"))
    with group(folder, tmp_path) as pair:  # which removes what that one could not
        mine = Path(pair.port._processes._scratch.name)
        assert mine.is_dir() and left and len(left - set(links_folder().glob(f"{PREFIX}*"))) >= 1
        again = ScratchFolder()
        assert mine.is_dir()
        again.cleanup()
    assert not mine.exists()


def test_a_model_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        group(tmp_path, tmp_path)
