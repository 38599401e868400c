"""Ports driven as cores drive them, of two processes or one engine: prompts in at one and tokens out of another."""

from __future__ import annotations

import random
import time

from msgspec.structs import replace

from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams, TokenOutput
from orchestrator.model.load import load_model
from orchestrator.roles.engine_port import (
    Began,
    Begin,
    DecodeDone,
    Drop,
    Dropped,
    Expect,
    Export,
    Exported,
    Load,
    Loaded,
    PrefillChunk,
    PrefillDone,
    RankDied,
    Reform,
    Reformed,
    RunDecode,
    RunPrefill,
    Withdraw,
)
from orchestrator.roles.handoff_port import encode_params
from orchestrator.roles.messages import RequestSpec
from orchestrator.service.config import ClusterSettings, EngineSettings, Model, ServiceConfig
from orchestrator.service.ep.port import EpPort
from orchestrator.service.messages import WorkerSpec
from orchestrator.service.ports.streaming import StreamingPort
from orchestrator.service.process.build import settings_of
from orchestrator.text.tokenizer import load_tokenizer

PATIENCE = 240.0  # seconds for an answer, on a machine that does much else
ENGINE = EngineSettings(num_blocks=48, max_num_seqs=4, max_step_tokens=64, chunk_tokens=64, prefix_cache="off")
CONFIG = ServiceConfig(engine=ENGINE, cluster=ClusterSettings(loading=PATIENCE))


def group(folder, tmp_path, *, role="decode", config=CONFIG, ranks=2, **options):
    return Driver(EpPort(spec_of(folder, tmp_path, role, config), ranks=ranks, **options))


def spec_of(folder, tmp_path, role="decode", config=CONFIG):
    config = replace(config, model=Model(str(folder)))
    return WorkerSpec(f"{role}-0", role, 1, config, "127.0.0.1", "", "", 1, str(tmp_path))


def single(folder, config=CONFIG):
    engine = Engine(load_model(folder), load_tokenizer(folder), settings_of(config.engine))
    return Driver(StreamingPort(engine, host="127.0.0.1", node="127.0.0.1", settings=config.transfer))


def requests(count, tokens=10, vocab=500):
    """By key: greedy and seeded ones, one of them with a prompt of several chunks, ending at different times."""
    rng, made = random.Random(7), {}
    for i in range(count):
        prompt = tuple(rng.randrange(vocab) for _ in range(150 if i == 1 else 5 + 3 * i))
        params = SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=tokens + 3 * i, ignore_eos=True)
        made[f"r{i}", 1] = RequestSpec(prompt, params.max_tokens, seed=i, params=encode_params(params))
    return made


def alone(folder, specs, config=CONFIG):
    """What one engine says: tokens by key."""
    from orchestrator.roles.handoff_port import decode_params

    engine = Engine(load_model(folder), load_tokenizer(folder), settings_of(config.engine))
    for key, spec in specs.items():
        engine.add(key[0], list(spec.prompt), decode_params(spec), seed=spec.seed)
    heard = {key: [] for key in specs}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenOutput):
                heard[event.request_id, 1].append(event.token_id)
    return heard


class Died(Exception):
    """A rank of the group has died."""


class Driver:
    """One command at a time, or many answers at once; every wait ends."""

    def __init__(self, port):
        self.port = port
        self.step = self.number = 0
        self._heard = []

    def close(self):
        if hasattr(self.port, "close"):
            self.port.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def do(self, *commands):
        for command in commands:
            self.port.do(command)

    def wait(self, kind, count=1, patience=PATIENCE):
        """So many answers of a kind; others are kept. Raises `Died` for a death."""
        limit, found = time.monotonic() + patience, []
        while True:
            self._heard += self.port.answers()
            for answer in list(self._heard):
                if isinstance(answer, kind) and len(found) < count:
                    self._heard.remove(answer)
                    found.append(answer)
            if len(found) == count:
                return found
            if any(isinstance(answer, RankDied) for answer in self._heard):
                (died,) = [a for a in self._heard if isinstance(a, RankDied)]
                self._heard = []
                raise Died(died.rank)
            assert time.monotonic() < limit, f"{kind.__name__}: {len(found)} of {count}, else {self._heard}"
            time.sleep(0.005)

    def sift(self, kind):
        """Forget answers of a kind."""
        self._heard = [answer for answer in self._heard if kind is None or not isinstance(answer, kind)]

    def quiet(self):
        """Whatever was not asked for."""
        return self._heard + self.port.answers()

    # As a prefill core

    def begin(self, specs, outputs=None, **more):
        self.do(*(Begin(*key, spec, tuple((outputs or {}).get(key, ())), **more) for key, spec in specs.items()))
        began = self.wait(Began, len(specs))
        assert not any(b.why for b in began), began
        return {(b.request, b.epoch): b.ticket for b in began}

    def run_prefill(self, specs, outputs=None, upto=None):
        """Chunks up to a token of each prompt; all of it by default."""
        self.step += 1
        chunks = []
        for key, spec in specs.items():
            total = len(spec.prompt) + len((outputs or {}).get(key, ()))
            count = total if upto is None else min(upto, total)
            chunks.append(PrefillChunk(*key, 0, 0, count, count == total))
        self.do(RunPrefill(self.step, tuple(chunks)))

    def prefill(self, specs, outputs=None, expecting=None, **more):
        """Prompts in, exported states out, by key. `expecting`: a driver that fetches them meanwhile."""
        tickets = self.begin(specs, outputs, **more)
        assert all(tickets.values())
        if expecting is not None:
            expecting.do(*(Expect(*key, ticket) for key, ticket in tickets.items()))
        self.run_prefill(specs, outputs)
        (done,) = self.wait(PrefillDone)
        assert done.step == self.step and not done.failed
        states = self.export(specs)
        self.drop(specs)  # what is offered stays until it is withdrawn
        return states

    # As a decode core

    def export(self, keys):
        self.do(*(Export(*key) for key in keys))
        states = {(e.request, e.epoch): e for e in self.wait(Exported, len(keys))}
        assert all(e.manifest is not None for e in states.values()), states
        return states

    def load(self, specs, states):
        self.do(*(Load(*key, specs[key], state.manifest, state.parts) for key, state in states.items()))
        loaded = self.wait(Loaded, len(states))
        assert not any(answer.why for answer in loaded), loaded

    def decode(self, keys, heard=None, steps=None):
        """Tokens by key until all have ended, or for some steps; reasons of those that ended."""
        heard = {key: [] for key in keys} if heard is None else heard
        reasons, left = {}, set(keys)
        while left and (steps is None or steps > 0):
            self.step += 1
            steps = None if steps is None else steps - 1
            self.do(RunDecode(self.step, tuple(sorted(left))))
            (done,) = self.wait(DecodeDone)
            assert done.step == self.step
            for output in done.outputs:
                key = (output.request, output.epoch)
                heard[key] += output.tokens
                if output.reason:
                    assert output.reason == "length", output
                    reasons[key] = output.reason
                    left.discard(key)
        return reasons

    def drop(self, keys):
        self.do(*(Drop(*key) for key in keys))
        self.wait(Dropped, len(keys))

    def reform(self):
        self.number += 1
        self.do(Reform(self.number))
        (formed,) = self.wait(Reformed)
        assert formed.number == self.number
        return formed


def through(prefill, decode, specs, outputs=None):
    """Tokens by key: those of the prompt's end, and those that follow elsewhere."""
    states = prefill.prefill(specs, outputs, expecting=decode)
    heard = {key: list(state.manifest.output) for key, state in states.items()}
    running = {key: state for key, state in states.items() if not state.manifest.reason}
    decode.load(specs, running)
    prefill.do(*(Withdraw(*key) for key in states))
    decode.decode(running, heard)
    decode.drop(running)
    return heard


def empty(*groups):
    """Nothing is held on any rank, once no step is in flight any more."""
    for driver in groups:
        limit = time.monotonic() + PATIENCE
        while True:
            numbers = driver.port.numbers()
            held = {name: value for name, value in numbers.items() if name.endswith(("_requests", "_blocks"))}
            if not any(held.values()):
                break
            assert time.monotonic() < limit, held
            time.sleep(0.005)
        assert numbers["ranks"] == driver.port.ranks and len(held) == 2 * driver.port.ranks
        assert len(driver.port._routes) == 0
