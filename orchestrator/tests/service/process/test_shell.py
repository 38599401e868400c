"""The main loop of a worker process with a scripted port: order, words to the supervisor, ends."""

import threading
import time
from types import SimpleNamespace

import pytest
from service_kit_process import LONG, ScriptedPort, Supervisor, sound, until

from orchestrator.roles import Decode, DecodeOptions, Encoder, Prefill, Router, Settings
from orchestrator.roles.engine_port import Begin, Drop, Export, Reform, RunPrefill
from orchestrator.roles.messages import (
    AssignPrefill,
    Drain,
    Gone,
    Release,
    Report,
    RequestSpec,
    Start,
    Submit,
    WorkFailed,
)
from orchestrator.service.config import ServiceConfig
from orchestrator.service.messages import Book, Hello, Leave, Pixels
from orchestrator.service.post.post import Post
from orchestrator.service.process import shell as shell_module
from orchestrator.service.process.events import ShellEvents
from orchestrator.service.process.shell import Shell

from service_kit_process import SECRET  # isort: skip

SETTINGS = Settings(beat=0.05)
SPEC = RequestSpec((1, 2, 3), 4)


class Running:
    """A shell in a thread, and a post that plays all others."""

    def __init__(self, core, port, name):
        self.others = Supervisor("router", "entry", "decode-0")
        events = ShellEvents()
        self.post = Post(lambda to, message: events.message(message), secret=SECRET)
        spec = self.others.spec(name, ServiceConfig(), "")
        self.shell = Shell(core, self.post, port, spec, events=events)
        self.core, self.port, self.name, self.status = core, port, name, None
        self.others.know({name: self.post.address})
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        self.status = self.shell.run()
        self.shell.close()

    def tell(self, message):
        assert self.others.post.send(self.name, message)

    def know_others(self, version=1, **more):
        names = ("router", "entry", "decode-0")
        self.tell(Book(version, {**dict.fromkeys(names, self.others.post.address), **more}))
        until(lambda: (h := self.hello()) and h.book == version)

    def hello(self):
        return self.others.heard.hello(self.name)

    def heard(self, kind):
        return self.others.heard.of(kind)

    def wait(self):
        self._thread.join(LONG)
        assert not self._thread.is_alive()
        return self.status

    def end(self):
        self.shell.leave(-1)
        self._thread.join(LONG)
        self.others.post.close()


@pytest.fixture
def start():
    running = []

    def start(core, port=None, name=None):
        running.append(Running(core, port, name or core.name))
        return running[-1]

    yield start
    for one in running:
        one.end()


def prefill(**options):
    return Prefill("prefill-0", 1, settings=Settings(beat=0.05, **options))


def order(core, request="r", epoch=1):
    return AssignPrefill(request, epoch, core.incarnation, "entry", SPEC, (), "decode-0", 1)


def held_at(kind):
    """A gate, and an engine that answers commands of this kind once it is open."""
    gate = threading.Event()

    def answer(c):
        if isinstance(c, kind):
            gate.wait(LONG)
        return sound(c)

    return gate, answer


def test_hello_at_once_and_each_beat(start):
    run = start(prefill(), ScriptedPort())
    until(lambda: len(run.heard(Hello)) >= 3)
    hello = run.hello()
    assert (hello.name, hello.role, hello.life, hello.book) == ("prefill-0", "prefill", 1, 0)
    assert hello.address == run.post.address and hello.pid > 0 and hello.waiting == 0.0
    assert hello.memory > 1 << 20


def test_reports_go_to_the_router_of_the_book(start):
    run = start(prefill(), ScriptedPort())
    run.know_others()
    until(lambda: run.heard(Report))


def test_an_older_book_changes_nothing(start):
    run = start(prefill(), ScriptedPort())
    run.know_others(version=5)
    run.tell(Book(4, {}))
    count = len(run.heard(Report))
    until(lambda: len(run.heard(Report)) > count + 3)
    assert run.hello().book == 5


def test_a_request_and_its_commands_in_order(start):
    core = prefill()
    run = start(core, ScriptedPort())
    run.know_others()
    run.tell(order(core))
    until(lambda: run.heard(WorkFailed))  # the port has nothing to export
    assert [type(c) for c in run.port.commands][:4] == [Begin, RunPrefill, Export, Drop]
    assert run.port.threads == {"engine"}
    run.tell(Release("r", 1, True))
    until(lambda: run.hello().held == 0 and run.hello().steps == 1)


def test_a_slow_engine_stops_neither_words_nor_reports(start):
    gate, answer = held_at(RunPrefill)
    core = prefill()
    run = start(core, ScriptedPort(answer))
    run.know_others()
    run.tell(order(core))
    until(lambda: len(run.port.commands) == 2)
    hellos, reports = len(run.heard(Hello)), len(run.heard(Report))
    until(lambda: len(run.heard(Hello)) > hellos + 5 and len(run.heard(Report)) > reports + 5)
    until(lambda: run.hello().waiting > 0.2)
    assert run.hello().held == 1 and run.hello().steps == 0
    gate.set()
    until(lambda: run.hello().waiting == 0.0)


def test_a_port_that_raises(start):
    broken = [True]

    def answer(c):
        if isinstance(c, RunPrefill) and broken:
            broken.clear()
            raise RuntimeError("torn")
        return sound(c)

    core = prefill()
    run = start(core, ScriptedPort(answer))
    run.know_others()
    before = core.incarnation
    run.tell(order(core))
    until(lambda: run.heard(WorkFailed))
    until(lambda: any(isinstance(c, Reform) for c in run.port.commands))
    until(lambda: any(r.incarnation > before and r.life == "active" for r in run.heard(Report)))
    count = len(run.port.commands)
    run.tell(order(core, epoch=2))
    until(lambda: len(run.port.commands) >= count + 2)
    until(lambda: run.hello().numbers["engine failures"] == 1)
    assert run.status is None


def test_a_port_that_cannot_form_anew(start):
    core = prefill()
    run = start(core, ScriptedPort(lambda c: 1 / 0))
    run.tell(order(core))
    assert run.wait() == 1


def test_an_engine_that_hangs_ends_the_group(start):
    gate, answer = held_at(RunPrefill)
    core = prefill(answer=0.2)
    run = start(core, ScriptedPort(answer))
    run.know_others()
    run.tell(order(core))
    until(lambda: run.heard(WorkFailed))
    until(lambda: run.hello().waiting > 0.3)  # it still owes what it was asked, so it cannot pass for sound
    gate.set()
    until(lambda: any(r.incarnation > 1000 and r.life == "active" for r in run.heard(Report)))


def test_a_flood_of_messages_starves_nothing(start):
    core = prefill()
    run = start(core, ScriptedPort())
    run.know_others()
    stop = threading.Event()

    def flood():
        while not stop.is_set():
            for _ in range(2_000):
                run.shell.events.message(Release("nobody", 1, True))
            time.sleep(0.001)  # the interpreter's lock is nothing that a peer could hold

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        hellos, reports = len(run.heard(Hello)), len(run.heard(Report))
        for epoch in range(1, 4):
            until(lambda: len(run.shell.events._messages) < 60_000)
            run.tell(order(core, f"r{epoch}"))
        until(lambda: len(run.heard(Hello)) > hellos + 3 and len(run.heard(Report)) > reports + 3)
    finally:
        stop.set()
        thread.join(LONG)


def test_messages_beyond_what_is_kept_are_dropped():
    events = ShellEvents()
    for number in range(70_000):
        events.message(number)
    assert events.dropped == 70_000 - 65_536
    events.answer("answer"), events.notice("notice")
    assert list(events.turn())[:2] == ["notice", "answer"]


def test_a_message_for_another_party(start):
    core = prefill()
    run = start(core, ScriptedPort())
    run.tell(Submit("r", 1, "entry", SPEC))
    until(lambda: run.hello() and run.hello().numbers.get("for another party"))
    assert run.status is None


def test_pixels_go_to_the_port_in_its_thread(start):
    run = start(Encoder("encoder-0", 1, settings=SETTINGS), ScriptedPort())
    run.tell(Pixels("d", b"bytes"))
    until(lambda: run.port.pictures)
    assert run.port.pictures == [("d", b"bytes")] and run.port.threads == {"engine"}


def test_pixels_without_an_encoder(start):
    run = start(Router(1, settings=SETTINGS))
    run.tell(Pixels("d", b"bytes"))
    until(lambda: run.hello() and run.hello().numbers.get("for another party"))


def test_it_leaves_when_it_holds_nothing(start):
    run = start(prefill(), ScriptedPort())
    run.know_others()
    run.shell.leave(30.0)
    assert run.wait() == 0
    until(lambda: len(run.heard(Gone)) == 2)  # router and scaler


def test_it_leaves_when_its_request_has_ended(start):
    gate, answer = held_at(RunPrefill)
    core = prefill()
    run = start(core, ScriptedPort(answer))
    run.know_others()
    run.tell(order(core))
    until(lambda: run.hello().held)
    run.tell(Leave("prefill-0", 1, LONG))
    until(lambda: any(r.life == "draining" for r in run.heard(Report)))
    run.tell(Leave("prefill-0", 1, LONG))  # repeated: no second order to end at once
    count = len(run.heard(Hello))
    until(lambda: len(run.heard(Hello)) > count + 3)
    assert run.status is None
    gate.set()
    run.tell(Release("r", 1, True))
    assert run.wait() == 0


def test_leave_twice_ends_at_once(start):
    gate = threading.Event()
    core = prefill()
    run = start(core, ScriptedPort(lambda c: gate.wait(LONG) and sound(c)))
    run.know_others()
    run.tell(order(core))
    until(lambda: run.hello().held)
    run.shell.leave(LONG)
    until(lambda: any(r.life == "draining" for r in run.heard(Report)))
    run.shell.leave(LONG)
    began = time.monotonic()
    assert run.wait() == 0
    assert time.monotonic() - began < LONG
    gate.set()


def test_leave_of_another_life_changes_nothing(start):
    run = start(prefill(), ScriptedPort())
    run.tell(Leave("prefill-0", 2, -1))
    run.tell(Leave("prefill-1", 1, -1))
    until(lambda: len(run.heard(Hello)) > 3)
    assert run.status is None
    run.tell(Leave("prefill-0", 1, -1))
    assert run.wait() == 0


def test_a_drain_of_the_scaler(start):
    core = Decode("decode-0", DecodeOptions(1000, 4, "toy"), 1, SETTINGS)
    run = start(core, ScriptedPort())
    run.tell(Drain("decode-0", core.incarnation, 1.0))
    assert run.wait() == 0


def test_a_router_leaves_at_once(start):
    run = start(Router(1, settings=SETTINGS))
    until(run.hello)
    run.shell.leave(LONG)
    assert run.wait() == 0


def test_a_core_that_fails_ends_the_process():
    class Torn(Prefill):
        def _beat(self, now):
            raise ZeroDivisionError

    others = Supervisor()
    post = Post(lambda to, message: None, secret=SECRET)
    try:
        core = Torn("prefill-0", 1, settings=SETTINGS)
        shell = Shell(core, post, ScriptedPort(), others.spec("prefill-0", ServiceConfig(), ""))
        with pytest.raises(ZeroDivisionError):
            shell.run()
        shell.close()
    finally:
        post.close()
        others.post.close()


def test_words_that_came_while_it_slept_are_read_first(monkeypatch):
    """A router that was stopped for longer than its workers' lease does not take them for dead."""
    others = Supervisor()
    post = Post(lambda to, message: None, secret=SECRET)
    now = 100.0
    monkeypatch.setattr(shell_module, "time", SimpleNamespace(monotonic=lambda: now))
    try:
        router = Router(1, settings=SETTINGS)
        shell = Shell(router, post, None, others.spec("router", ServiceConfig(), ""))
        shell._step(Start())
        shell._step(report(1))
        now += 50.0
        shell._tick(now)
        assert router.fleet.views  # first what has come meanwhile
        shell._step(report(2))
        now = shell._wake_at
        shell._tick(now)
        assert router.fleet.views and shell._wake_at == now + SETTINGS.beat
        now += 50.0
        for _ in range(2):
            shell._tick(now)
            now += 1.0
        assert not router.fleet.views
    finally:
        post.close()
        others.post.close()


def report(number):
    return Report("prefill-0", "prefill", 1000, number, "active", (), 1.0, 1.0)
