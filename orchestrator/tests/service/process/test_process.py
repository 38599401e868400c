"""Real worker processes with a router's core: they come up, leave, and never outlive their parent."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from service_kit_process import SECRET, Supervisor, Worker, until

from orchestrator.service.config import Model, Roles, ServiceConfig
from orchestrator.service.messages import Book, Hello, Leave


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    path = make_model(v41_nano(), tmp_path_factory.mktemp("model"), seed=20)
    return ServiceConfig(model=Model(str(path)), times={"beat": 0.1})


@pytest.fixture
def supervisor():
    supervisor = Supervisor()
    yield supervisor
    supervisor.post.close()


@pytest.fixture
def start():
    workers = []

    def start(spec):
        workers.append(Worker(spec))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


def up(supervisor, worker, name="router", life=1):
    def there():
        assert worker.process.poll() is None, worker.said
        return supervisor.heard.hello(name, life)

    return until(there)


def test_it_comes_up_and_leaves(supervisor, start, config, tmp_path):
    worker = start(supervisor.spec("router", config, tmp_path))
    hello = up(supervisor, worker)
    assert hello.pid == worker.process.pid and hello.role == "router" and hello.memory > 1 << 20
    supervisor.know({"router": hello.address})
    assert supervisor.post.send("router", Book(7, {"entry": supervisor.post.address}))
    until(lambda: supervisor.heard.hello("router").book == 7)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_it_leaves_when_it_is_told(supervisor, start, config, tmp_path):
    worker = start(supervisor.spec("router", config, tmp_path))
    supervisor.know({"router": up(supervisor, worker).address})
    supervisor.post.send("router", Leave("router", 1, 0.0))
    assert worker.wait() == 0


def test_it_ends_with_its_standard_input(supervisor, start, config, tmp_path):
    worker = start(supervisor.spec("router", config, tmp_path))
    up(supervisor, worker)
    worker.process.stdin.close()
    assert worker.wait() == 3


def test_it_ignores_an_interrupt_from_the_terminal(supervisor, start, config, tmp_path):
    worker = start(supervisor.spec("router", config, tmp_path))
    up(supervisor, worker)
    worker.process.send_signal(signal.SIGINT)
    count = len(supervisor.heard.of(Hello))
    until(lambda: len(supervisor.heard.of(Hello)) > count + 3)
    assert worker.process.poll() is None


def test_killed_and_a_new_life(supervisor, start, config, tmp_path):
    first = start(supervisor.spec("router", config, tmp_path))
    before = up(supervisor, first)
    supervisor.know({"router": before.address})
    first.process.kill()
    assert first.wait() == -signal.SIGKILL
    second = start(supervisor.spec("router", config, tmp_path, life=2))
    after = up(supervisor, second, life=2)
    assert after.address != before.address and after.pid != before.pid
    supervisor.know({"router": after.address})
    until(lambda: supervisor.post.send("router", Book(2, {})) and supervisor.heard.hello("router", 2).book == 2)


PARENT = """
import subprocess, sys, time
line = sys.stdin.readline()
child = subprocess.Popen(
    [sys.executable, "-m", "orchestrator.service.process"], stdin=subprocess.PIPE, start_new_session=True
)
child.stdin.write(line.encode())
child.stdin.flush()
print(child.pid, flush=True)
time.sleep(3600)
"""


def test_it_goes_with_a_parent_that_is_killed(supervisor, config, tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        parent.stdin.write(msgspec.json.encode(supervisor.spec("router", config, tmp_path)) + b"\n")
        parent.stdin.flush()
        pid = int(parent.stdout.readline())
        until(lambda: supervisor.heard.hello("router"))
        assert supervisor.heard.hello("router").pid == pid
    finally:
        parent.kill()
        parent.wait(60)
        parent.stdin.close()
        parent.stdout.close()
    until(lambda: not alive(pid))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("ends", ["signal", "input"])
def test_while_it_loads(supervisor, start, config, tmp_path, ends):
    """Nothing has been said yet, and nothing is held."""
    fifo = tmp_path / "config.json"
    os.mkfifo(fifo)  # its reader waits, as for a slow disk
    slow = msgspec.structs.replace(config, model=Model(str(tmp_path)))
    worker = start(supervisor.spec("router", slow, tmp_path))
    until(lambda: wchan_is_open(worker.process.pid))
    if ends == "signal":
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
    else:
        worker.process.stdin.close()
        assert worker.wait() == 3
    assert not supervisor.heard.messages


def wchan_is_open(pid):
    """Whether the process has come as far as loading: it listens by then."""
    time.sleep(0.05)
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sum(link.startswith("socket:") for link in links) >= 3


@pytest.mark.parametrize(
    "line, why",
    [
        (b"", "no spec"),
        (b"{", "no spec"),
        (b"[1]", "no spec"),
        (b'{"threads": 1}', "spec"),
        (b'{"threads": "many"}', "no spec"),
    ],
)
def test_no_spec(start, line, why):
    worker = start(line)
    assert worker.wait() == 2
    assert why in worker.said


@pytest.mark.parametrize(
    "change, why",
    [
        ({"secret": "zz"}, "spec"),
        ({"secret": "00"}, "secret"),
        ({"host": "203.0.113.7"}, "cannot listen"),
        ({"config": {"model": {"path": "/nonexistent"}}}, "nonexistent"),
        ({"config": {"model": {}, "times": {"beat": -1}}}, "beat"),
    ],
)
def test_a_spec_that_cannot_be_used(supervisor, start, config, tmp_path, change, why):
    values = msgspec.to_builtins(supervisor.spec("router", config, tmp_path))
    worker = start(json.dumps({**values, **change}).encode())
    assert worker.wait() == 2
    assert why in worker.said


def test_its_secret_is_not_said(supervisor, start, config, tmp_path):
    broken = msgspec.structs.replace(config, roles=Roles())
    worker = start(supervisor.spec("router", broken, tmp_path))
    up(supervisor, worker)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert SECRET.hex() not in worker.said
