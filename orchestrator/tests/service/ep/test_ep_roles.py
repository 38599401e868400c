"""Roles over two groups, in real time: a client gets the tokens of one engine, whichever rank is killed meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections import deque

import pytest
from service_kit_ep import CONFIG, PATIENCE, alone, group, requests

from orchestrator.balance.admission import Limits
from orchestrator.roles import (
    Decode,
    DecodeOptions,
    Entry,
    Prefill,
    PrefillOptions,
    Router,
    RouterPolicy,
    Settings,
)
from orchestrator.roles.engine_port import is_command
from orchestrator.roles.messages import ClientRequest, Deliver, DeliverEnd, Send, Start, Tick, Wake

COUNT = 5
TIMES = Settings(settle=1.01, answer=PATIENCE, admit=PATIENCE, first_token=PATIENCE, backoff=1.0)


class Service:
    """Cores in one thread. No more than half a beat passes between two turns, however slow the machine is."""

    def __init__(self, prefill, decode):
        limits = Limits(context=2048, pool=2048, target=PATIENCE)
        self.ports = {"prefill-0": prefill.port, "decode-0": decode.port}
        self.cores = {
            "entry": Entry("entry", TIMES),
            "router": Router(1, RouterPolicy(limits=limits), TIMES),
            "prefill-0": Prefill("prefill-0", 1, PrefillOptions(ranks=2), TIMES),
            "decode-0": Decode(
                "decode-0", DecodeOptions(decode.port.room, decode.port.rows, decode.port.layout, 2), 1, TIMES
            ),
        }
        self.tokens, self.ends, self.wakes = {}, {}, {}
        self.now, self.last = 0.0, time.monotonic()
        self.queue = deque((name, Start()) for name in self.cores)

    def ask(self, specs):
        for (name, _), spec in specs.items():
            self.tokens[name] = []
            self.queue.append(("entry", ClientRequest(name, spec)))

    def run(self, until):
        limit = time.monotonic() + 2 * PATIENCE
        while not until():
            assert time.monotonic() < limit, (self.ends, self.tokens)
            last, self.last = self.last, time.monotonic()
            self.now += min(self.last - last, TIMES.beat / 2)
            for name in [name for name, at in self.wakes.items() if self.now >= at]:
                del self.wakes[name]
                self.queue.append((name, Tick()))
            for name, port in self.ports.items():
                self.queue.extend((name, answer) for answer in port.answers())
            if not self.queue:
                time.sleep(0.002)
            while self.queue:
                name, event = self.queue.popleft()
                for action in self.cores[name].step(event, self.now):
                    self._perform(name, action)

    def _perform(self, name, action):
        if isinstance(action, Send):
            if action.to in self.cores:
                self.queue.append((action.to, action.message))
        elif isinstance(action, Wake):
            self.wakes[name] = action.at
        elif isinstance(action, Deliver):
            assert action.index == len(self.tokens[action.request])
            self.tokens[action.request] += action.tokens
        elif isinstance(action, DeliverEnd):
            self.ends[action.request] = action
        elif is_command(action):
            self.ports[name].do(action)

    def finish(self, specs, expected):
        """Every one of them has ended as it does on one engine, and nothing of it is held anywhere."""
        self.run(lambda: len(self.ends) == len(self.tokens))
        for key in specs:
            end = self.ends[key[0]]
            assert (end.outcome, end.reason) == ("finished", "length"), end
            assert self.tokens[key[0]] == expected[key]
        self.run(lambda: not any(core.held for name, core in self.cores.items() if name in self.ports))
        self.run(lambda: not any(held(port) for port in self.ports.values()))
        self.tokens, self.ends = {}, {}


def held(port):
    numbers = port.numbers()
    return [name for name, value in numbers.items() if name.endswith(("_requests", "_blocks")) and value]


def kill(port, rank):
    os.kill(int(port.numbers()[f"rank{rank}_pid"]), signal.SIGKILL)


@pytest.mark.slow
def test_roles_over_groups(folder, tmp_path):
    specs = requests(COUNT)
    expected = alone(folder, specs, CONFIG)
    with group(folder, tmp_path, role="prefill") as prefill, group(folder, tmp_path, role="decode") as decode:
        service = Service(prefill, decode)
        service.run(lambda: service.now > TIMES.settle + 0.6)
        service.ask(specs)
        service.finish(specs, expected)
        assert service.cores["decode-0"].incarnation == service.cores["prefill-0"].incarnation == 1000

        again = {(f"again {name}", epoch): spec for (name, epoch), spec in specs.items()}
        service.ask(again)
        service.run(lambda: sum(map(len, service.tokens.values())) >= 8)
        kill(decode.port, 1)
        service.finish(again, {(f"again {n}", e): tokens for (n, e), tokens in expected.items()})
        assert service.cores["decode-0"].incarnation == 1001 and decode.port.numbers()["ranks"] == 2

        once = {(f"once {name}", epoch): spec for (name, epoch), spec in specs.items()}
        service.ask(once)
        service.run(lambda: service.cores["prefill-0"].jobs)
        kill(prefill.port, 0)
        service.finish(once, {(f"once {n}", e): tokens for (n, e), tokens in expected.items()})
        assert service.cores["prefill-0"].incarnation == 1001 and prefill.port.numbers()["ranks"] == 2
