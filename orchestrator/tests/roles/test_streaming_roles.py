"""The roles over engines whose states travel beside the messages, by tickets: what a client gets is the same."""

import time
from functools import partial

import engines_kit
import pytest
from engines_kit import EngineService
from roles_kit import unreliable

from orchestrator.engine.request import SamplingParams
from orchestrator.service.config import TransferSettings
from orchestrator.service.ports.streaming import StreamingPort
from orchestrator.transfer import Times

TIMES = Times(beat=0.2, silence=1.0, lease=3.0)
REQUESTS = {name: request for name, request in engines_kit.REQUESTS.items() if name != "stops"}


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    import torch

    from orchestrator.model.load import load_model
    from orchestrator.model.make import make_model
    from orchestrator.model.presets import v41_nano

    torch.set_num_threads(1)
    return load_model(make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20))


class StreamingService(EngineService):
    """The kit's clock stands still while a load waits."""

    def __init__(self, model, *, overlap=True, **options):
        settings = TransferSettings("shared", overlap)
        given = {"host": "127.0.0.1", "node": "n", "settings": settings, "room": 4000, "times": TIMES, "patience": 30.0}
        super().__init__(model, partial(StreamingPort, **given), owes=lambda port: port.arrivals.loads, **options)

    def crash(self, name):
        engine = self.parties[name].engine
        super().crash(name)
        if engine is not None:
            engine.port.close()


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
    engines_kit.compare(service, model, requests, settle=8)
    for name, party in service.parties.items():
        if party.engine is not None and party.core is not None:
            port = party.engine.port
            assert not (port.departures.ships or port.arrivals.fetches or port.arrivals.loads), name
            until = time.monotonic() + 30
            while port.doors.sender.held:
                assert time.monotonic() < until
                time.sleep(0.05)


@pytest.mark.parametrize("overlap", [True, False])
def test_clients_get_what_one_engine_gives(nano, service_of, overlap):
    service = service_of(decode=2, overlap=overlap)
    service.ask_all(REQUESTS)
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
    engines_kit.drain(service, requests)
    compare(service, nano, requests)


@pytest.mark.parametrize("seed", range(2))
def test_a_bad_network_and_deaths_change_nothing(nano, service_of, seed):
    service = service_of(prefill=2, decode=2, fate=unreliable(seed, 0.08, 0.2, 0.1))
    engines_kit.crash_and_go_on(service, REQUESTS, seed)
    compare(service, nano, REQUESTS)
