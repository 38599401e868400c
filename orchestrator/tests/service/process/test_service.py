"""A service over real posts: shells in threads, and worker processes. What a client gets is what one engine gives."""

import signal
import threading

import msgspec
import pytest
from engines_kit import REQUESTS
from engines_kit import alone as of_one_engine
from service_kit_process import LONG, SECRET, Heard, Supervisor, Worker, until

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.roles import Decode, DecodeOptions, Entry, Prefill, Router, Settings
from orchestrator.roles.handoff_port import HandoffPort, encode_params
from orchestrator.roles.messages import Deliver, DeliverEnd, RequestSpec
from orchestrator.service.config import ClusterSettings, EngineSettings, Model, ServiceConfig
from orchestrator.service.front.entry_loop import EntryLoop
from orchestrator.service.messages import Book
from orchestrator.service.post.post import Post
from orchestrator.service.process.build import policy_of
from orchestrator.service.process.events import ShellEvents
from orchestrator.service.process.shell import Shell

TIMES = {"settle": 1.1, "first_token": LONG, "answer": LONG, "admit": LONG}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    path = make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20)
    engine = EngineSettings(num_blocks=40, max_num_seqs=6, speculation="off", prefix_cache="off")
    return ServiceConfig(model=Model(str(path)), engine=engine, times=TIMES, cluster=ClusterSettings(grace=0.2))


@pytest.fixture(scope="module")
def model(config):
    from orchestrator.model.load import load_model

    return load_model(config.model.path)


def engine_of(model):
    return Engine(model, None, EngineConfig(num_blocks=40, max_num_seqs=6, speculation="off"))


@pytest.fixture(scope="module")
def alone(model):
    """Tokens and reasons of one engine."""
    return of_one_engine(model, REQUESTS)


class FrontInbox(Heard):
    """What is for the entry goes to its loop."""

    loop = None

    def __call__(self, to, message):
        if to == "entry":
            self.loop.take(message)
        else:
            super().__call__(to, message)


class Front:
    """Entry and supervisor: keeps the book from what workers say."""

    def __init__(self):
        self.supervisor = Supervisor("entry", heard=FrontInbox())
        self.heard, self._version = self.supervisor.heard, 0
        self.book = {}
        self.tokens, self.ends, self.starts = {}, {}, {}
        self.failed = []
        self._lock = threading.Lock()
        entry = Entry("entry", Settings(**TIMES))
        self.loop = EntryLoop(
            entry, self.supervisor.post, deliver=self._deliver, pixels=lambda digest: b"", failed=self.failed.append
        )
        self.heard.loop = self.loop
        self.loop.start()

    def _deliver(self, deliveries):
        for delivery in deliveries:
            if isinstance(delivery, Deliver):
                assert delivery.index == len(self.tokens[delivery.request])
                self.tokens[delivery.request].extend(delivery.tokens)
            elif isinstance(delivery, DeliverEnd):
                self.ends[delivery.request] = delivery

    def meet(self, lives, check=lambda: None):
        """Wait until these lives of workers are there, and tell everybody where everybody is."""

        def there():
            check()
            return all(self.heard.hello(name, life) for name, life in lives.items())

        until(there)
        self.book = {name: self.heard.hello(name, life).address for name, life in lives.items()}
        self.supervisor.know(self.book)
        self._version += 1
        mine = self.supervisor.post.address
        book = Book(self._version, {"entry": mine, "supervisor": mine, "scaler": mine, **self.book})
        for name, life in lives.items():
            until(
                lambda n=name, i=life: (
                    self.supervisor.post.send(n, book) and self.heard.hello(n, i).book == self._version
                )
            )

    def ask(self, name, request="one", prompt=()):
        known, params = REQUESTS[name if name in REQUESTS else request]
        self.tokens[name] = []
        spec = RequestSpec(
            tuple(prompt or known), params.max_tokens, params.seed, expected_output=32, params=encode_params(params)
        )
        self.loop.request(name, spec)

    def finish(self, check=lambda: None):
        def done():
            check()
            return set(self.ends) == set(self.tokens)

        until(done, 3 * LONG)

    def close(self):
        assert self.loop.close(LONG)
        self.supervisor.post.close()


def compare(front, alone, names=None):
    tokens, ends = alone
    for name, end in front.ends.items():
        of = name.split("/")[0]
        assert (end.outcome, end.reason) == ("finished", ends[of]), (name, end)
        assert front.tokens[name] == tokens[of], name


# Shells in threads, states by value


class Thread:
    """A worker without a process of its own."""

    def __init__(self, front, name, config, make):
        events = ShellEvents()
        self.post = Post(lambda to, message: events.message(message), secret=SECRET)
        self.port = None if name == "router" else HandoffPort(make(), room=40 * 128)
        settings = Settings(**config.times)
        if name == "router":
            core = Router(1, policy_of(config), settings)
        elif name.startswith("prefill"):
            core = Prefill(name, 1, None, settings)
        else:
            core = Decode(name, DecodeOptions(40 * 128, 6, self.port.layout), 1, settings)
        spec = front.supervisor.spec(name, config, "")
        self.shell = Shell(core, self.post, self.port, spec, events=events)
        self.thread = threading.Thread(target=self._run)
        self.status = None
        self.thread.start()

    def _run(self):
        self.status = self.shell.run()
        self.shell.close()

    def end(self):
        self.shell.leave(-1)
        self.thread.join(LONG)
        assert not self.thread.is_alive()


def test_in_threads(config, model, alone):
    front, workers = Front(), {}
    try:
        for name in ("router", "prefill-0", "decode-0", "decode-1"):
            workers[name] = Thread(front, name, config, lambda: engine_of(model))
        front.meet(dict.fromkeys(workers, 1))
        for name in REQUESTS:
            front.ask(name)
        front.finish()
        compare(front, alone)
        until(lambda: all(front.heard.hello(name).held == 0 for name in workers))
        assert not front.failed
    finally:
        for worker in workers.values():
            worker.end()
        front.close()


# Worker processes, states by transfer


@pytest.fixture
def processes(config, tmp_path):
    """A front, `start(name, life)`, and workers by name; all ended in the end."""
    front, workers = Front(), {}

    def start(name, life=1, config=config):
        if name in workers:
            workers[name].end()
        workers[name] = Worker(front.supervisor.spec(name, config, tmp_path, life=life))
        return workers[name]

    def sound():
        for name, worker in workers.items():
            assert worker.process.poll() is None, f"{name}: {worker.said}"

    start.workers, start.sound, start.front = workers, sound, front
    yield start
    for worker in workers.values():
        worker.end()
    front.close()


def test_in_processes(processes, alone):
    front = processes.front
    for name in ("router", "prefill-0", "decode-0"):
        processes(name)
    front.meet(dict.fromkeys(processes.workers, 1), processes.sound)
    for name in REQUESTS:
        front.ask(name)
    front.finish(processes.sound)
    compare(front, alone)
    until(lambda: front.heard.hello("decode-0").numbers["output tokens"] > 0)  # words are a beat behind
    until(lambda: all(front.heard.hello(name).held == 0 for name in processes.workers))
    assert front.heard.hello("decode-0").numbers["engine failures"] == 0
    for worker in processes.workers.values():
        worker.process.send_signal(signal.SIGTERM)
    assert [worker.wait() for worker in processes.workers.values()] == [0, 0, 0]
    assert not front.failed


@pytest.mark.parametrize(
    "role", ["decode-0", *(pytest.param(role, marks=pytest.mark.slow) for role in ("router", "prefill-0"))]
)
def test_a_worker_that_is_killed(processes, alone, role):
    """Requests go on, elsewhere or later, and bring what they would have brought."""
    front = processes.front
    for name in ("router", "prefill-0", "decode-0"):
        processes(name)
    front.meet(dict.fromkeys(processes.workers, 1), processes.sound)
    for round in range(4):
        for name in REQUESTS:
            front.ask(f"{name}/{round}", name)
    until(lambda: sum(map(len, front.tokens.values())) > 5)
    processes(role, life=2)
    front.meet({"router": 1, "prefill-0": 1, "decode-0": 1, role: 2}, processes.sound)
    front.finish(processes.sound)
    compare(front, alone)
    assert not front.failed


@pytest.mark.slow
def test_a_drained_worker_hands_its_requests_over(processes, alone):
    """Streams go on at the other decode worker."""
    front = processes.front
    names = ("router", "prefill-0", "decode-0")
    for name in names:
        processes(name)
    front.meet(dict.fromkeys(names, 1), processes.sound)
    for round in range(4):
        for name in REQUESTS:
            front.ask(f"{name}/{round}", name)
    until(lambda: sum(map(len, front.tokens.values())) > 5)
    processes("decode-1")
    front.meet(dict.fromkeys((*names, "decode-1"), 1), processes.sound)
    leaving = processes.workers.pop("decode-0")
    leaving.process.send_signal(signal.SIGTERM)
    try:
        front.finish(processes.sound)
        compare(front, alone)
        assert leaving.wait() == 0, leaving.said
    finally:
        leaving.end()
    assert not front.failed


@pytest.mark.slow
def test_a_worker_that_was_stopped_and_goes_on(processes, alone):
    """Its leases ran out meanwhile, so its requests may run elsewhere: no token is told twice or lost."""
    front = processes.front
    names = ("router", "prefill-0", "decode-0", "decode-1")
    for name in names:
        processes(name)
    front.meet(dict.fromkeys(names, 1), processes.sound)
    for round in range(4):
        for name in REQUESTS:
            front.ask(f"{name}/{round}", name)
    until(lambda: sum(map(len, front.tokens.values())) > 5)
    stopped = processes.workers["decode-0"].process
    stopped.send_signal(signal.SIGSTOP)
    heard = front.heard.hello("decode-1").steps
    until(lambda: front.heard.hello("decode-1").steps > heard or len(front.ends) == len(front.tokens))
    threading.Event().wait(8.0)  # longer than all leases
    stopped.send_signal(signal.SIGCONT)
    front.finish(processes.sound)
    compare(front, alone)
    until(lambda: all(front.heard.hello(name).held == 0 for name in names))
    assert not front.failed


def test_more_than_may_wait_is_refused(processes, config):
    front = processes.front
    tight = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, max_waiting=2))
    for name in ("router", "prefill-0", "decode-0"):
        processes(name, config=tight)
    front.meet(dict.fromkeys(processes.workers, 1), processes.sound)
    for number in range(60):
        front.ask(f"short/{number}", "short")
    front.ask("large", prompt=[7] * 5000)
    front.finish(processes.sound)
    statuses = {name: end.status for name, end in front.ends.items()}
    assert statuses.pop("large") == 400
    assert set(statuses.values()) == {200, 429}
    assert all(end.retry_after >= 1 for end in front.ends.values() if end.status == 429)
