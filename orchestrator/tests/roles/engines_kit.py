"""The kit's service with engines that have a model in the place of its toys, and what one engine alone gives."""

from __future__ import annotations

import time
from functools import partial

from roles_kit import Answer, Service

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams, TokenOutput
from orchestrator.roles import Decode, DecodeOptions
from orchestrator.roles.handoff_port import encode_params
from orchestrator.roles.messages import ClientRequest, Drain, RequestSpec

REQUESTS = {
    "short": ([5, 6, 7], SamplingParams(max_tokens=20, seed=1, ignore_eos=True)),
    "long": (list(range(3, 303)), SamplingParams(max_tokens=24, seed=2, ignore_eos=True)),
    "greedy": (list(range(9, 29)), SamplingParams(temperature=0.0, max_tokens=20, seed=3)),
    "stops": ([100, 101], SamplingParams(max_tokens=40, seed=4, stop_token_ids=tuple(range(7, 60)))),
    "one": ([1], SamplingParams(max_tokens=1, seed=7)),
}


class PortEngine:
    """A port in the place of a toy; the kit's clock stands still while `owes` says that an answer is to come."""

    def __init__(self, port, toy, owes):
        self.port, self._toy, self._owes, self.hangs = port, toy, owes, False

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
            if not self._owes(self.port):
                return
            assert time.monotonic() < until
            time.sleep(0.002)


class EngineService(Service):
    """`make_port(engine)` makes what stands between a core and its engine."""

    def __init__(self, model, make_port, tokenizer=None, *, owes=lambda port: False, **options):
        config = EngineConfig(num_blocks=40, max_num_seqs=6, speculation="off")
        self._make = partial(Engine, model, tokenizer, config)
        self._make_port, self._owes, self.ports = make_port, owes, []
        super().__init__(**options)

    def start(self, name):
        core = super().start(name)
        party = self.parties[name]
        if party.engine is None:
            return core
        port = self._make_port(self._make())
        self.ports.append(port)
        party.engine = PortEngine(port, party.engine, self._owes)
        if isinstance(core, Decode):
            core.options = DecodeOptions(4000, 6, port.layout)
            core.capacity, core.most_rows = 4000, 6
        return core

    def ask(self, name, prompt, params):
        grammar = "" if params.grammar is None else params.grammar.text
        spec = RequestSpec(
            tuple(prompt), params.max_tokens, params.seed, expected_output=32, grammar=grammar,
            params=encode_params(params),
        )  # fmt: skip
        self.answers[name] = Answer()
        self._step("entry", ClientRequest(name, spec))

    def ask_all(self, requests):
        for name, (prompt, params) in requests.items():
            self.ask(name, prompt, params)


def alone(model, requests, tokenizer=None):
    """Tokens and ends of one engine."""
    engine = Engine(model, tokenizer, EngineConfig(num_blocks=64, max_num_seqs=6, speculation="off"))
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params)
    tokens, ends = {name: [] for name in requests}, {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                tokens[event.request_id].append(event.token_id)
            elif hasattr(event, "reason"):
                ends[event.request_id] = event.reason
    return tokens, ends


def compare(service, model, requests, tokenizer=None, settle=2):
    """Clients got what one engine gives, and `settle` seconds later nobody holds anything."""
    tokens, ends = alone(model, requests, tokenizer)
    for name, answer in service.answers.items():
        assert answer.tokens == tokens[name], name
        assert (answer.end.outcome, answer.end.reason) == ("finished", ends[name]), answer.end
    service.run(settle)
    assert all(service.holders(name) == set() for name in service.answers)
    for name, party in service.parties.items():
        if party.engine is not None and party.core is not None:
            scheduler = party.engine.port.engine.scheduler
            assert scheduler.blocks.used == scheduler.slots.used == 0, name


def drain(service, requests):
    """Ask, wait until all have some tokens, and drain the worker of the first: it moves what it has, and leaves."""
    service.ask_all(requests)
    assert service.run(20, lambda: all(len(a.tokens) >= 5 for a in service.answers.values()))
    worker = service.core("entry").live[next(iter(requests))].worker
    core = service.core(worker)
    begun = assigned(service)
    service.give(worker, Drain(worker, core.incarnation, 0.01))
    service.finish(60)
    assert core.gone
    assert assigned(service) == begun, "moved, not computed again"


def assigned(service):
    return sum(type(message).__name__ == "AssignPrefill" for _, _, _, message in service.sent)


def crash_and_go_on(service, requests, seed):
    """A prefill and a decode worker die while the network is bad."""
    service.ask_all(requests)
    service.run(0.15 + 0.1 * seed)
    for who in ("prefill-0", "decode-0"):
        service.crash(who)
        service.run(1.0)
        service.start(who)
    service.run(5)
    service.fate = lambda source, to, message: [0.001]
    service.finish(120)
    service.run(8)
