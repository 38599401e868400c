"""The roles over engines whose states travel beside the messages, by tickets: what a client gets is the same."""

import time
from functools import partial

import pytest
from roles_kit import Answer, Service, unreliable

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams, TokenOutput
from orchestrator.roles import Decode, DecodeOptions
from orchestrator.roles.handoff_port import encode_params
from orchestrator.roles.messages import ClientRequest, Drain, RequestSpec
from orchestrator.service.config import TransferSettings
from orchestrator.service.ports.streaming import StreamingPort
from orchestrator.transfer import Times

TIMES = Times(beat=0.2, silence=1.0, lease=3.0)
REQUESTS = {
    "short": ([5, 6, 7], SamplingParams(max_tokens=20, seed=1, ignore_eos=True)),
    "long": (list(range(3, 303)), SamplingParams(max_tokens=24, seed=2, ignore_eos=True)),
    "greedy": (list(range(9, 29)), SamplingParams(temperature=0.0, max_tokens=20, seed=3)),
    "one": ([1], SamplingParams(max_tokens=1, seed=7)),
}


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    import torch

    from orchestrator.model.load import load_model
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    torch.set_num_threads(1)
    return load_model(make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20))


class StreamingEngine:
    """A port in the place of the kit's toy; the kit's clock stands still while a load waits."""

    def __init__(self, port, toy):
        self.port, self._toy, self.hangs = port, toy, False

    @property
    def states(self):
        return self.port._names

    def do(self, command):
        if self.hangs:
            return
        self.port.do(command)
        until = time.monotonic() + 60
        while True:
            for answer in self.port.answers():
                self._toy.answer(0.01, answer)
            if not self.port.arrivals.loads:
                return
            assert time.monotonic() < until
            time.sleep(0.002)


class StreamingService(Service):
    """The kit's service over engines with a model."""

    def __init__(self, model, *, overlap=True, **options):
        self._make = partial(Engine, model, None, EngineConfig(num_blocks=40, max_num_seqs=6, speculation="off"))
        self._settings, self.ports = TransferSettings("shared", overlap), []
        super().__init__(**options)

    def start(self, name):
        core = super().start(name)
        party = self.parties[name]
        if party.engine is None:
            return core
        port = StreamingPort(
            self._make(), host="127.0.0.1", node="n", settings=self._settings, room=4000, times=TIMES, patience=30.0
        )
        self.ports.append(port)
        party.engine = StreamingEngine(port, party.engine)
        if isinstance(core, Decode):
            core.options = DecodeOptions(4000, 6, port.layout)
            core.capacity, core.most_rows = 4000, 6
        return core

    def crash(self, name):
        engine = self.parties[name].engine
        super().crash(name)
        if engine is not None:
            engine.port.close()

    def ask(self, name, prompt, params):
        spec = RequestSpec(
            tuple(prompt), params.max_tokens, params.seed, expected_output=32, params=encode_params(params)
        )
        self.answers[name] = Answer()
        self._step("entry", ClientRequest(name, spec))


@pytest.fixture
def service_of(nano):
    made = []

    def make(**options):
        made.append(StreamingService(nano, **options))
        return made[-1]

    yield make
    for service in made:
        for port in service.ports:
            port.close()


def compare(service, model, requests):
    engine = Engine(model, None, EngineConfig(num_blocks=64, max_num_seqs=6, speculation="off"))
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params)
    tokens = {name: [] for name in requests}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens[event.request_id].append(event.token_id)
    for name, answer in service.answers.items():
        assert answer.end.outcome == "finished" and answer.tokens == tokens[name], (name, answer.end)
    service.run(8)
    for name, party in service.parties.items():
        if party.engine is not None and party.core is not None:
            port = party.engine.port
            assert port.engine.scheduler.blocks.used == port.engine.scheduler.slots.used == 0, name
            assert not (port.departures.ships or port.arrivals.fetches or port.arrivals.loads), name
            until = time.monotonic() + 30
            while port.doors.sender.held:
                assert time.monotonic() < until
                time.sleep(0.05)


@pytest.mark.parametrize("overlap", [True, False])
def test_clients_get_what_one_engine_gives(nano, service_of, overlap):
    service = service_of(decode=2, overlap=overlap)
    for name, (prompt, params) in REQUESTS.items():
        service.ask(name, prompt, params)
    service.finish(60)
    compare(service, nano, REQUESTS)
    ahead = sum(port.departures.counts["bytes out ahead"] for port in service.ports)
    assert (ahead > 0) is overlap
    assert sum(port.arrivals.counts["handoffs in"] for port in service.ports) == len(REQUESTS) - 1  # one ended at once


def test_a_drained_decode_worker_moves_requests(nano, service_of):
    service = service_of(decode=2)
    requests = {
        f"r{i}": (list(range(3 + i, 150 + 40 * i)), SamplingParams(max_tokens=200, seed=i, ignore_eos=True))
        for i in range(2)
    }
    for name, (prompt, params) in requests.items():
        service.ask(name, prompt, params)
    assert service.run(20, lambda: all(len(a.tokens) >= 5 for a in service.answers.values()))
    worker = service.core("entry").live["r0"].worker
    core = service.core(worker)
    service.give(worker, Drain(worker, core.incarnation, 0.01))
    service.finish(60)
    assert core.gone
    compare(service, nano, requests)


@pytest.mark.parametrize("seed", range(2))
def test_a_bad_network_and_deaths_change_nothing(nano, service_of, seed):
    service = service_of(prefill=2, decode=2, fate=unreliable(seed, 0.08, 0.2, 0.1))
    for name, (prompt, params) in REQUESTS.items():
        service.ask(name, prompt, params)
    service.run(0.15 + 0.1 * seed)
    for who in ("prefill-0", "decode-0"):
        service.crash(who)
        service.run(1.0)
        service.start(who)
    service.run(5)
    service.fate = lambda source, to, message: [0.001]
    service.finish(120)
    service.run(8)
    compare(service, nano, REQUESTS)
