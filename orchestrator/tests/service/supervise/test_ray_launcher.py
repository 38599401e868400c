from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from supervise_kit import alive, file_of, parent_of, until

from orchestrator.commands.errors import UsageError

CONFIG = {"roles": {"prefill": 1, "decode": 1}, "cluster": {"launcher": "ray"}}
have_ray = importlib.util.find_spec("ray") is not None
with_ray = pytest.mark.skipif(not have_ray, reason="Ray is not installed here")

# A driver in a process of its own: Ray is for once in a process, and has to end with it.
DRIVER = """
import sys
sys.path.insert(0, {kit!r})
from supervise_kit import DRAINS, WAITS, from_values, python, spec_of
from orchestrator.service.supervise.launch.ray import RayLauncher
config = from_values({config!r})
launcher = RayLauncher(config, "test", python({child}))
handles = dict()
def start(name, life=1):
    handles[name] = launcher.start(spec_of(config, name, name.split("-")[0], life, {folder!r}))
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


class Driver:
    def __init__(self, folder, child="WAITS", config=CONFIG):
        kit = os.path.dirname(os.path.abspath(__file__))
        code = DRIVER.format(kit=kit, config=config, child=child, folder=str(folder))
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, code):
        self.process.stdin.write(code + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if "(raylet)" not in line and "\x1b" not in line:
                return eval(line)
        raise AssertionError("the driver has ended")

    def started(self, name, life=1):
        self(f"start({name!r}, {life})")
        return until(lambda: self(f"handles[{name!r}].pid or handles[{name!r}].poll()"), f"start of {name}", 120)

    def ended(self, name):
        return until(lambda: self(f"handles[{name!r}].poll()"), f"end of {name}", 120)


@pytest.fixture
def driver(tmp_path):
    made = []

    def make(**options):
        made.append(Driver(tmp_path, **options))
        return made[-1]

    yield make
    for driver in made:
        driver.process.kill()
        driver.process.communicate()


def ancestors(pid):
    """Processes above one, up to the test's own."""
    found = []
    while pid > 1 and pid != os.getpid():
        found.append(pid)
        pid = parent_of(pid)
    return found


def test_missing_ray_says_how_to_get_it(monkeypatch):
    from orchestrator.service.supervise.launch.ray import import_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'pip install "ray>=2.58"'):
        import_ray()


def test_ray_is_not_imported_unless_asked_for():
    modules = "sys, orchestrator.service.run, orchestrator.service.supervise.launch.ray"
    code = f"import {modules}; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
@with_ray
def test_lives_of_workers_and_of_their_actors(driver, tmp_path):
    run = driver()
    for name in ("router", "prefill-0", "decode-0"):
        assert isinstance(run.started(name), int)
    assert "spec of" in until(lambda: file_of(tmp_path, "decode-0"), "its first word")
    # The child is killed: its actor tells at once, and keeps the next life.
    pid = run("handles['decode-0'].pid")
    actor = parent_of(pid)
    os.kill(pid, signal.SIGKILL)
    assert run.ended("decode-0") == "signal 9 (SIGKILL)"
    again = run.started("decode-0", 2)
    assert parent_of(again) == actor and again != pid
    # The actor is killed: its child ends with it, and the next life has another actor.
    os.kill(actor, signal.SIGKILL)
    assert run.ended("decode-0") == "actor died"
    until(lambda: not alive(again), "the end of the child")
    third = run.started("decode-0", 3)
    assert isinstance(third, int) and parent_of(third) != actor
    # One more than the placement group was made for, as when a drained worker and the next one live side by side.
    extra = run.started("decode-1")
    assert isinstance(extra, int)
    run("handles['decode-1'].kill()")
    assert run.ended("decode-1") == "signal 9 (SIGKILL)"
    pids = [run(f"handles[{name!r}].pid") for name in ("router", "prefill-0", "decode-0")]
    above = set().union(*(ancestors(pid) for pid in pids)) - {run.process.pid}
    run("launcher.close()")
    for pid in (*pids, *above):
        until(lambda pid=pid: not alive(pid), f"the end of process {pid}")


@pytest.mark.slow
@with_ray
def test_terminate_lets_a_worker_leave(driver, tmp_path):
    run = driver(child="DRAINS")
    run.started("decode-0")
    until(lambda: file_of(tmp_path, "decode-0"), "its first word")
    run("handles['decode-0'].terminate()")
    assert run.ended("decode-0") == "exit 0" and run("handles['decode-0'].tail()") == "ready"


@pytest.mark.slow
@with_ray
def test_nothing_is_left_of_a_driver_that_is_killed(driver):
    run = driver()
    pids = [run.started(name) for name in ("router", "decode-0")]
    above = set().union(*(ancestors(pid) for pid in pids)) - {run.process.pid}
    assert len(above) >= 3  # the children, their actors, Ray's own
    run.process.kill()
    for pid in (*pids, *above):
        until(lambda pid=pid: not alive(pid), f"the end of process {pid}", 120)


@pytest.mark.slow
@with_ray
def test_cluster_without_room_is_refused(tmp_path):
    code = f"""
        from orchestrator.service.config import from_values
        from orchestrator.service.supervise.launch import ray
        ray._PLACE = 3.0
        try:
            ray.RayLauncher(from_values({ {**CONFIG, "cluster": {"launcher": "ray", "gpus": 1000.0}}!r}), "test")
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("UsageError --cluster ray: no room for bundles"), done.stdout + done.stderr
