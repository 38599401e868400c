"""A small service in virtual time for tests of the roles: engines whose tokens depend on all that they hold."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.balance.admission import Limits
from orchestrator.roles import Decode, DecodeOptions, Encoder, Entry, Prefill, Router, RouterPolicy, Rules, Settings
from orchestrator.roles.engine_port import (
    Began,
    Begin,
    DecodeDone,
    DecodeOutput,
    Drop,
    Dropped,
    Encode,
    EncodeDone,
    Expect,
    Export,
    Exported,
    Load,
    Loaded,
    PrefillDone,
    Reform,
    Reformed,
    Rename,
    RunDecode,
    RunPrefill,
    Thaw,
    Withdraw,
    is_command,
)
from orchestrator.roles.messages import (
    ClientCancel,
    ClientRequest,
    Deliver,
    DeliverEnd,
    DeliverReady,
    Exit,
    Image,
    RequestSpec,
    Send,
    Start,
    Tick,
    Wake,
)
from orchestrator.roles.state_parts import KINDS, Manifest, part_of

END = 0  # the token that ends an output


def next_token(seed: int, tokens: list[int], state: str = "") -> int:
    """What follows all tokens so far; 0 ends the output, one in 64, but for seeds from 1000 on."""
    mixed = random.Random(f"{seed} {tokens} {state}").randrange(64 * 900)
    return END if mixed < 900 and seed < 1000 else 1 + mixed % 900


def expected(spec: RequestSpec) -> tuple[list[int], str]:
    """What a request has to bring, and why it ends."""
    tokens = list(spec.prompt)
    while len(tokens) - len(spec.prompt) < spec.max_tokens:
        token = next_token(spec.seed, tokens)
        if token == END:
            return tokens[len(spec.prompt) :], "stop"
        tokens.append(token)
    return tokens[len(spec.prompt) :], "length"


@dataclass
class State:
    """Of one request in an engine."""

    spec: RequestSpec
    tokens: list[int]
    broken: str = ""
    frozen: bool = False


class ToyEngine:
    """Answers each command `delay` seconds later. `refuse`: answers of `Began` and `Loaded` with that reason."""

    def __init__(
        self, answer: Callable[[float, Any], None], *, delay: float = 0.005, replay_tail: bool = False
    ) -> None:
        self.answer, self.delay, self.replay_tail = answer, delay, replay_tail
        self.states: dict[tuple[str, int], State] = {}
        self.refuse = ""
        self.hangs = False
        self.computed = 0
        self.told: list[Any] = []  # commands without answer that concern what is fetched
        self.ticket = b""

    def do(self, command: Any) -> None:
        if self.hangs:
            return
        if isinstance(command, Withdraw | Expect):
            self.told.append(command)
        elif isinstance(command, Thaw):
            self.states[command.request, command.epoch].frozen = False
        elif isinstance(command, Rename):
            state = self.states.pop((command.request, command.epoch))
            self.states[command.request, command.new_epoch] = state
        else:
            self.answer(self.delay, getattr(self, f"_{type(command).__name__.lower()}")(command))

    def _encode(self, c: Encode) -> EncodeDone:
        return EncodeDone(c.image.digest, f"pixels of {c.image.digest}".encode())

    def _begin(self, c: Begin) -> Began:
        if self.refuse:
            return Began(c.request, c.epoch, 0, self.refuse)
        wanted = {i.digest: f"pixels of {i.digest}".encode() for i in c.spec.images}
        broken = "" if dict(c.embeddings) == wanted else "embeddings"
        self.states[c.request, c.epoch] = State(c.spec, [*c.spec.prompt, *c.output], broken)
        return Began(c.request, c.epoch, min(c.spec.hit, len(c.spec.prompt) - 1), ticket=self.ticket)

    def _runprefill(self, c: RunPrefill) -> PrefillDone:
        self.computed += sum(chunk.count for chunk in c.chunks)
        return PrefillDone(c.step, self.delay)

    def _export(self, c: Export) -> Exported:
        state = self.states.get((c.request, c.epoch))
        if state is None:
            return Exported(c.request, c.epoch, None, (), "not here")
        state.frozen = True
        prompt = len(state.spec.prompt)
        parts = {kind: json.dumps([kind, state.tokens, state.broken]).encode() for kind in KINDS}
        if self.replay_tail:
            parts["drafter"] = b""
        manifest = Manifest(
            "toy",
            len(state.tokens),
            tuple(state.tokens[prompt:]),
            self.replay_tail,
            tuple(part_of(kind, parts[kind]) for kind in KINDS),
            cached=state.spec.hit,
        )
        return Exported(c.request, c.epoch, manifest, tuple(parts.values()))

    def _load(self, c: Load) -> Loaded:
        if self.refuse:
            return Loaded(c.request, c.epoch, self.refuse)
        found = []
        for part, payload in zip(c.manifest.parts, c.parts, strict=True):
            try:
                found.append(json.loads(payload) if payload else [part.kind, None, ""])
            except ValueError:
                found.append(["", [], "torn"])
        tokens = list(c.spec.prompt) + list(c.manifest.output)
        right = all(k == p.kind and t in (None, tokens) for (k, t, _), p in zip(found, c.manifest.parts, strict=True))
        broken = "".join(b for _, _, b in found) + ("" if right else "foreign")
        self.states[c.request, c.epoch] = State(c.spec, tokens, broken)
        return Loaded(c.request, c.epoch)

    def _rundecode(self, c: RunDecode) -> DecodeDone:
        outputs = []
        for key in c.requests:
            state = self.states.get(key)
            if state is None or state.frozen:
                continue
            token = next_token(state.spec.seed, state.tokens, state.broken)
            if token == END:
                outputs.append(DecodeOutput(*key, (), "stop"))
                continue
            state.tokens.append(token)
            done = len(state.tokens) - len(state.spec.prompt) >= state.spec.max_tokens
            outputs.append(DecodeOutput(*key, (token,), "length" if done else ""))
        return DecodeDone(c.step, tuple(outputs))

    def _drop(self, c: Drop) -> Dropped:
        self.states.pop((c.request, c.epoch), None)
        return Dropped(c.request, c.epoch)

    def _reform(self, c: Reform) -> Reformed:
        self.states.clear()
        return Reformed(c.number, 1, 10_000.0, 0)


@dataclass
class Answer:
    """What a client got."""

    tokens: list[int] = field(default_factory=list)
    notes: list[bytes] = field(default_factory=list)
    ready: int = 0
    end: DeliverEnd | None = None
    at: float = 0.0


@dataclass
class Party:
    core: Any
    engine: ToyEngine | None = None
    wake: float | None = None
    life: int = 0
    started: int = 1


Fate = Callable[[str, str, Any], list[float]]


def prompt_delivery(source: str, to: str, message: Any) -> list[float]:
    """Every message arrives once, after a millisecond."""
    return [0.001]


def unreliable(seed: int, loss: float, repeat: float, late: float) -> Fate:
    """A network that loses, repeats and holds up messages, each with that chance."""
    rng = random.Random(seed)

    def fate(source, to, message):
        copies = [rng.random() for _ in range(1 + (rng.random() < repeat))]
        return [0.001 + rng.random() * (1.5 if rng.random() < late else 0.01) for copy in copies if copy >= loss]

    return fate


class Service:
    """Parties, a network and virtual time. `fate(source, to, message)` gives the delays of a message's deliveries."""

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        encoder: int = 0,
        rules: Rules | None = None,
        settings: Settings | None = None,
        policy: RouterPolicy | None = None,
        fate: Fate = prompt_delivery,
        tokens: int = 10_000,
        settle: bool = True,
    ) -> None:
        self.rules, self.settings = rules or Rules(), settings or Settings(settle=1.01)
        self.policy = policy or RouterPolicy(limits=Limits(context=4096, pool=4096))
        self.fate, self.tokens, self.now = fate, tokens, 0.0
        self.parties: dict[str, Party] = {}
        self.answers: dict[str, Answer] = {}
        self.specs: dict[str, RequestSpec] = {}
        self.sent: list[tuple[float, str, str, Any]] = []
        self._heap: list[tuple[float, int, str, int, Any]] = []
        self._number = 0
        for name in [
            "entry",
            "router",
            *(f"encoder-{i}" for i in range(encoder)),
            *(f"prefill-{i}" for i in range(prefill)),
            *(f"decode-{i}" for i in range(decode)),
        ]:
            self.start(name)
        if settle:
            self.run(self.settings.settle + 0.6)

    # Parties

    def start(self, name: str) -> Any:
        """Start a party, or start it anew: its state is gone."""
        old = self.parties.get(name)
        started = 1 if old is None else old.started + 1
        rules, settings = self.rules, self.settings
        core: Any
        role = name.split("-")[0]
        if role == "entry":
            core = Entry(name, settings, rules)
        elif role == "router":
            core = Router(started, self.policy, settings, rules)
        elif role == "encoder":
            core = Encoder(name, started, None, settings, rules)
        elif role == "prefill":
            core = Prefill(name, started, None, settings, rules)
        else:
            core = Decode(name, DecodeOptions(self.tokens, layout="toy"), started, settings, rules)
        party = Party(core, life=0 if old is None else old.life + 1, started=started)
        if role not in ("entry", "router"):
            life = party.life
            party.engine = ToyEngine(lambda delay, event: self._push(self.now + delay, name, life, event))
        self.parties[name] = party
        self._step(name, Start())
        return core

    def crash(self, name: str) -> None:
        self.parties[name].core = None
        self.parties[name].life += 1

    def core(self, name: str) -> Any:
        return self.parties[name].core

    def engine(self, name: str) -> ToyEngine:
        engine = self.parties[name].engine
        assert engine is not None
        return engine

    # Clients

    def request(self, name: str = "r", *, prompt: int = 20, most: int = 12, seed: int = 1, **more: Any) -> RequestSpec:
        spec = RequestSpec(tuple(range(1, prompt + 1)), most, seed=seed, **more)
        self.specs[name], self.answers[name] = spec, Answer()
        self._step("entry", ClientRequest(name, spec))
        return spec

    def cancel(self, name: str = "r") -> None:
        self._step("entry", ClientCancel(name))

    # Time

    def give(self, name: str, event: Any) -> None:
        """An event from outside."""
        self._step(name, event)

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass, no longer than until something holds; whether it does."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            if until is not None and until():
                return True
            at, _, name, life, event = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            party = self.parties[name]
            if party.core is not None and (life < 0 or life == party.life):
                self._step(name, event)
        if until is not None:
            return until()
        self.now = end
        return True

    def finish(self, seconds: float = 60.0) -> None:
        """Run until every request has its outcome."""
        assert self.run(seconds, lambda: all(a.end is not None for a in self.answers.values())), self.unfinished()

    def unfinished(self) -> list[str]:
        return [name for name, answer in self.answers.items() if answer.end is None]

    def check(self) -> None:
        """Every finished request brought what it had to."""
        for name, answer in self.answers.items():
            assert answer.end is not None, f"{name} has no outcome"
            tokens, reason = expected(self.specs[name])
            if answer.end.outcome == "finished":
                assert answer.tokens == tokens and answer.end.reason == reason and answer.ready == 1
            else:
                assert answer.tokens == tokens[: len(answer.tokens)]
            assert answer.end.tokens == len(answer.tokens)

    def holders(self, name: str = "r") -> set[str]:
        """Parties that hold something of a request, cores and engines."""
        found = set()
        for party, state in self.parties.items():
            if state.core is not None and any(key[0] == name for key in state.core.held):
                found.add(party)
            if state.core is not None and state.engine and any(key[0] == name for key in state.engine.states):
                found.add(f"engine of {party}")
        return found

    def quiet(self) -> None:
        """Nothing is held and nothing is counted any more, wherever one looks."""
        assert all(self.holders(name) == set() for name in self.answers), {n: self.holders(n) for n in self.answers}
        router = self.core("router")
        assert not router.records and not len(router.waiting) and router.waiting.seconds == pytest.approx(0, abs=1e-9)
        assert router.waiting.missed == 0 and not router.images.encoding and router.images.backlog() == 0
        assert not any(router.images._encoders.work.values())
        for view in router.fleet.views.values():
            assert not view.given and view.owed == 0.0 and view.tokens == 0, view.report.worker
            if view.active:
                assert view.room == pytest.approx(view.report.capacity)

    def _push(self, at: float, name: str, life: int, event: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at, self._number, name, life, event))

    def _step(self, name: str, event: Any) -> None:
        party = self.parties[name]
        if party.core is None:
            return
        if isinstance(event, Tick):
            if party.wake is None or self.now < party.wake:
                return
            party.wake = None
        for action in party.core.step(event, self.now):
            if isinstance(action, Send):
                self.sent.append((self.now, name, action.to, action.message))
                for delay in self.fate(name, action.to, action.message):
                    if action.to in self.parties:
                        self._push(self.now + delay, action.to, -1, action.message)
            elif isinstance(action, Wake):
                party.wake = action.at
                self._push(action.at, name, party.life, Tick())
            elif isinstance(action, Deliver):
                answer = self.answers[action.request]
                assert answer.end is None and answer.ready == 1
                assert action.index == len(answer.tokens), f"index {action.index} after {len(answer.tokens)} tokens"
                answer.tokens += action.tokens
                answer.notes += action.notes
            elif isinstance(action, DeliverReady):
                self.answers[action.request].ready += 1
            elif isinstance(action, DeliverEnd):
                answer = self.answers[action.request]
                assert answer.end is None, "a second outcome"
                answer.end, answer.at = action, self.now
            elif isinstance(action, Exit):
                party.core = None
                return
            elif is_command(action):
                assert party.engine is not None
                party.engine.do(action)


def image(name: str, patches: int = 10) -> Image:
    return Image(name, patches)


def only(actions: list[Any], kind: type) -> list[Any]:
    """Messages of a kind among what a core wants done, or actions of that kind."""
    found = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]
    return found + [a for a in actions if isinstance(a, kind)]
