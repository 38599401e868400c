from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
from supervise_kit import BREEDS, DRAINS, FAILS, WAITS, alive, file_of, python, spec_of, until

from orchestrator.service.config import ServiceConfig
from orchestrator.service.supervise.launch.base import how_it_ended
from orchestrator.service.supervise.launch.local import LocalLauncher


@pytest.fixture
def start(tmp_path):
    launchers = []

    def run(code, name="decode-0", life=1):
        launchers.append(LocalLauncher(command=python(code)))
        return launchers[-1].start(spec_of(ServiceConfig(), name, "decode", life, tmp_path))

    yield run
    for launcher in launchers:
        launcher.close()


def test_child_gets_its_spec_and_waits_for_the_end_of_its_input(start, tmp_path):
    handle = start(WAITS)
    text = until(lambda: file_of(tmp_path, "decode-0"), "its first word")
    assert text.startswith("spec of ") and text.endswith("threads 1\n")
    assert handle.poll() is None and alive(handle.pid)
    handle._child.process.stdin.close()
    assert until(handle.poll, "its end") == "exit 3"


def test_kill_and_how_it_ended(start):
    handle = start(WAITS)
    handle.kill()
    assert until(handle.poll, "its end") == "signal 9 (SIGKILL)"
    handle.kill()
    handle.terminate()  # of one that has ended: no error


def test_kill_takes_all_that_it_has_started(start, tmp_path):
    handle = start(BREEDS)
    child = int(until(lambda: file_of(tmp_path, "decode-0"), "its child's number"))
    assert alive(child)
    handle.kill()
    until(lambda: not alive(child), "the end of its child")


def test_terminate_lets_it_leave(start, tmp_path):
    handle = start(DRAINS)
    until(lambda: file_of(tmp_path, "decode-0"), "its first word")
    handle.terminate()
    assert until(handle.poll, "its end") == "exit 0"


def test_failure_is_told_with_its_last_words_and_each_life_has_a_log(start, tmp_path):
    first, second = start(FAILS), start(FAILS, life=2)
    for handle in (first, second):
        assert until(handle.poll, "its end") == "exit 7" and handle.tail() == "cannot go on"
    assert file_of(tmp_path, "decode-0", 1) == file_of(tmp_path, "decode-0", 2) == "cannot go on\n"


def test_command_that_is_not_there_is_told_by_poll(tmp_path):
    launcher = LocalLauncher(command=["/nowhere/python"])
    handle = launcher.start(spec_of(ServiceConfig(), "decode-0", "decode", 1, tmp_path))
    assert handle.poll().startswith("start failed") and handle.pid == 0
    launcher.close()


def test_close_ends_what_is_left(tmp_path):
    launcher = LocalLauncher(command=python(WAITS))
    handles = [launcher.start(spec_of(ServiceConfig(), f"decode-{i}", "decode", 1, tmp_path)) for i in range(2)]
    launcher.close()
    assert not any(alive(handle.pid) for handle in handles)
    launcher.close()


def test_children_end_with_a_parent_that_is_killed(tmp_path):
    code = f"""
        import sys, time
        sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
        from supervise_kit import WAITS, python, spec_of
        from orchestrator.service.config import ServiceConfig
        from orchestrator.service.supervise.launch.local import LocalLauncher
        handle = LocalLauncher(command=python(WAITS)).start(
            spec_of(ServiceConfig(), "decode-0", "decode", 1, {str(tmp_path)!r}))
        print(handle.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        until(lambda: file_of(tmp_path, "decode-0"), "its first word")
        parent.kill()
    until(lambda: not alive(pid), "the end of the child")


@pytest.mark.parametrize(
    ("status", "words"), [(0, "exit 0"), (7, "exit 7"), (-signal.SIGTERM, "signal 15 (SIGTERM)"), (-99, "signal 99")]
)
def test_ends_in_words(status, words):
    assert how_it_ended(status) == words
