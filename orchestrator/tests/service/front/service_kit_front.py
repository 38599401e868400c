"""A service in one process for tests of the front: real cores in a thread, scripted engines, an unreliable post."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import msgspec

from orchestrator.balance.admission import Limits
from orchestrator.model.presets import v41_mini
from orchestrator.roles import Decode, DecodeOptions, Encoder, Prefill, Router, RouterPolicy, Settings
from orchestrator.roles import engine_port as port
from orchestrator.roles.messages import RequestSpec, Send, Start, Tick, Wake
from orchestrator.roles.prefill import PrefillOptions
from orchestrator.roles.state_parts import KINDS, Manifest, part_of
from orchestrator.service import messages
from orchestrator.service.config import EngineSettings, Roles, ServiceConfig, StoreSettings
from orchestrator.service.front.engine import ClusterEngine

SETTINGS = Settings(
    beat=0.05,
    resend=0.1,
    lease=1.5,
    transfer_lease=1.5,
    owner_lease=2.0,
    silence=1.0,
    submit_lease=2.0,
    unreported=1.0,
    settle=0.2,
    admit=30.0,
    attempts=1000,
    tombstone=10.0,
    backoff=0.01,
)
PATIENT = replace(
    SETTINGS,
    beat=0.5,
    resend=5.0,
    lease=60.0,
    transfer_lease=60.0,
    owner_lease=60.0,
    silence=60.0,
    submit_lease=60.0,
    unreported=60.0,
    settle=1.01,
    tombstone=100.0,
)  # for many requests on a busy machine
POLICY = RouterPolicy(limits=Limits(context=4096, pool=1 << 20, target=1e6, most_waiting=10_000), load=0.0)
_LOOK = 0.002  # seconds between looks for messages of the front
Script = Callable[[RequestSpec], list[int]]
Fate = Callable[[str, str, Any], list[float]]


def prompt_delivery(source: str, to: str, message: Any) -> list[float]:
    return [0.0]


def unreliable(seed: int, loss: float = 0.1, repeat: float = 0.1, late: float = 0.1) -> Fate:
    """Loses, repeats and holds up messages, each with that chance."""
    rng = random.Random(seed)

    def fate(source: str, to: str, message: Any) -> list[float]:
        copies = [rng.random() for _ in range(1 + (rng.random() < repeat))]
        return [rng.random() * (0.3 if rng.random() < late else 0.005) for copy in copies if copy >= loss]

    return fate


class ScriptedPort:
    """Engine of one worker: the output of a request is what the script says, ended by "stop" or by its limit."""

    def __init__(self, cluster: Cluster, name: str, script: Script) -> None:
        self.cluster, self.name, self.script = cluster, name, script
        self.states: dict[tuple[str, int], list[int]] = {}
        self.specs: dict[tuple[str, int], RequestSpec] = {}
        self.wanted: set[str] = set()

    def do(self, command: Any) -> Any:
        """The answer to a command, None where there is none yet."""
        return getattr(self, f"_{type(command).__name__.lower()}", lambda c: None)(command)

    def pixels(self, message: messages.Pixels) -> Any:
        if message.digest not in self.wanted:
            return None
        self.wanted.discard(message.digest)
        self.cluster.pixels.append((message.digest, message.payload))
        if not message.payload:
            return port.EncodeDone(message.digest, b"", "the front does not have it any more")
        return port.EncodeDone(message.digest, f"rows of {message.digest}".encode())

    def _encode(self, c: port.Encode) -> None:
        self.wanted.add(c.image.digest)
        self._ask(c.image.digest)

    def _ask(self, digest: str) -> None:
        if digest in self.wanted:
            self.cluster.post(self.name, "entry", messages.WantPixels(digest, self.name))
            self.cluster.later(0.1, lambda: self._ask(digest))

    def _begin(self, c: port.Begin) -> port.Began:
        if self.cluster.refuses:
            return port.Began(c.request, c.epoch, 0, self.cluster.refuses, retry=False)
        assert dict(c.embeddings) == {i.digest: f"rows of {i.digest}".encode() for i in c.spec.images}
        self.specs[c.request, c.epoch], self.states[c.request, c.epoch] = c.spec, list(c.output)
        return port.Began(c.request, c.epoch, 0)

    def _runprefill(self, c: port.RunPrefill) -> port.PrefillDone:
        return port.PrefillDone(c.step, 0.001)

    def _export(self, c: port.Export) -> port.Exported:
        output = self.states.get((c.request, c.epoch))
        if output is None:
            return port.Exported(c.request, c.epoch, None, (), "not here")
        tokens = len(self.specs[c.request, c.epoch].prompt) + len(output)
        payload = json.dumps(output).encode()
        parts = tuple(part_of(kind, payload) for kind in KINDS)
        manifest = Manifest("scripted", tokens, tuple(output), False, parts, cached=1)
        return port.Exported(c.request, c.epoch, manifest, (payload,) * len(KINDS))

    def _load(self, c: port.Load) -> port.Loaded:
        assert all(json.loads(part) == list(c.manifest.output) for part in c.parts)
        self.specs[c.request, c.epoch], self.states[c.request, c.epoch] = c.spec, list(c.manifest.output)
        return port.Loaded(c.request, c.epoch)

    def _rundecode(self, c: port.RunDecode) -> port.DecodeDone:
        return port.DecodeDone(c.step, tuple(self._next(*key) for key in c.requests if key in self.states))

    def _next(self, request: str, epoch: int) -> port.DecodeOutput:
        spec, output = self.specs[request, epoch], self.states[request, epoch]
        script = self.script(spec)
        if len(output) >= len(script):
            return port.DecodeOutput(request, epoch, (), "stop")
        token = script[len(output)]
        output.append(token)
        notes = (note_of(len(output) - 1, token),) if self.cluster.notes else ()
        return port.DecodeOutput(
            request, epoch, (token,), "length" if len(output) >= spec.max_tokens else "", "", notes
        )

    def _rename(self, c: port.Rename) -> None:
        tables: tuple[dict[tuple[str, int], Any], ...] = (self.states, self.specs)
        for held in tables:
            held[c.request, c.new_epoch] = held.pop((c.request, c.epoch))

    def _drop(self, c: port.Drop) -> port.Dropped:
        self.states.pop((c.request, c.epoch), None)
        self.specs.pop((c.request, c.epoch), None)
        return port.Dropped(c.request, c.epoch)

    def _reform(self, c: port.Reform) -> port.Reformed:
        self.states.clear()
        return port.Reformed(c.number, 1, 1e6, 0)


def note_of(index: int, token: int) -> bytes:
    return msgspec.msgpack.encode((-0.25 * (index + 1), ((token, -0.5), (token + 1, -1.5))))


class Cluster:
    """All workers and the network, in one thread.

    Attributes to set:
        script: what a request brings. notes: whether tokens have log-probabilities. delay: seconds of a command.
        fate: of messages, by source, target and message. held: commands, by their type's name, that are not answered
        yet. refuses: why no prompt can run.

    Attributes to read:
        pixels: (digest, payload) of what the front gave. sent: messages to the entry, number by type's name.
    """

    def __init__(
        self, script: Script, *, settings: Settings = SETTINGS, prefill: int = 1, decode: int = 1, encoder: int = 0
    ) -> None:
        self.settings = settings
        self.script, self.notes, self.delay, self.fate = script, False, 0.0, prompt_delivery
        self.held: set[str] = set()
        self.refuses = ""
        self.pixels: list[tuple[str, bytes]] = []
        self.engine: ClusterEngine | None = None
        self.cores: dict[str, Any] = {}
        self.ports: dict[str, ScriptedPort] = {}
        self._lives: dict[str, int] = {}
        self._wakes: dict[str, float] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._answers: list[tuple[str, str, int, Callable[[], Any]]] = []  # that are held
        self._from_front: deque[tuple[str, Any]] = deque()
        self._count, self._stop = count(), False
        self._changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None
        self.names = [
            "router",
            *(f"encoder-{i}" for i in range(encoder)),
            *(f"prefill-{i}" for i in range(prefill)),
            *(f"decode-{i}" for i in range(decode)),
        ]
        for name in self.names:
            self.start(name)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # For tests

    def start(self, name: str) -> None:
        with self._changed:
            life = self._lives[name] = self._lives.get(name, 0) + 1
            role, core = name.split("-")[0], None
            if role == "router":
                core = Router(life, POLICY, self.settings)
            elif role == "encoder":
                core = Encoder(name, life, None, self.settings)
            elif role == "prefill":
                core = Prefill(name, life, PrefillOptions(most=5000), self.settings)
            else:
                core = Decode(name, DecodeOptions(1 << 20, layout="scripted"), life, self.settings)
            self.cores[name], self.ports[name] = core, ScriptedPort(self, name, lambda spec: self.script(spec))
            self.later(0.0, lambda: self._step(name, life, Start()))

    def crash(self, name: str) -> None:
        with self._changed:
            self._lives[name] += 1
            self.cores.pop(name)
            self.ports.pop(name)

    def release(self) -> None:
        """Answer what was held."""
        with self._changed:
            self.held.clear()
            for name, _, life, do in self._answers:
                self.later(0.0, partial(self._answer, name, life, do()))
            self._answers.clear()

    def waits_for(self, kind: str) -> bool:
        with self._changed:
            return any(each == kind for _, each, _, _ in self._answers)

    def holding(self) -> dict[str, Any]:
        """What anybody but the entry holds of requests."""
        with self._changed:
            found: dict[str, Any] = {n: sorted(c.held) for n, c in self.cores.items() if n != "router" and c.held}
            found |= {f"engine of {n}": sorted(p.states) for n, p in self.ports.items() if p.states}
            router = self.cores.get("router")
            if router is not None and (router.records or len(router.waiting)):
                found["router"] = sorted(router.records)
            return found

    def close(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify()
        self._thread.join(timeout=20)
        if self.error is not None:
            raise self.error

    # The network

    def send(self, to: str, message: Any) -> bool:
        """What the front's post does. It never waits, not for the lock of the busy thread either."""
        self._from_front.append((to, message))
        return True

    def post(self, source: str, to: str, message: Any) -> bool:
        data = messages.encode(message)
        with self._changed:
            for delay in self.fate(source, to, message):
                self.later(delay, lambda: self._receive(to, messages.decode(data)))
        return True

    def later(self, delay: float, call: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + delay, next(self._count), call))
            self._changed.notify()

    def _receive(self, to: str, message: Any) -> None:
        if to == "entry":
            if self.engine is not None:
                self.engine.loop.take(message)
        elif isinstance(message, messages.Pixels):
            if to in self.ports:
                self._answer(to, self._lives[to], self.ports[to].pixels(message))
        elif to in self.cores:
            self._step(to, self._lives[to], message)

    # Parties

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._stop:
                        return
                    while self._from_front:
                        self.post("entry", *self._from_front.popleft())
                    now = time.monotonic()
                    if not self._heap or self._heap[0][0] > now:
                        self._changed.wait(min(self._heap[0][0] - now if self._heap else _LOOK, _LOOK))
                        continue
                    heapq.heappop(self._heap)[2]()
        except BaseException as error:
            self.error = error

    def _step(self, name: str, life: int, event: Any) -> None:
        if self._lives[name] != life or name not in self.cores:
            return
        if isinstance(event, Tick):
            if time.monotonic() < self._wakes.get(name, 0.0):
                return
            self._wakes.pop(name, None)
        for action in self.cores[name].step(event, time.monotonic()):
            if isinstance(action, Send):
                self.post(name, action.to, action.message)
            elif isinstance(action, Wake):
                self._wakes[name] = action.at
                self.later(max(0.0, action.at - time.monotonic()), lambda: self._step(name, life, Tick()))
            elif port.is_command(action):
                self._command(name, life, action)

    def _command(self, name: str, life: int, command: Any) -> None:
        worker, kind = self.ports[name], type(command).__name__
        if kind in self.held or any(each == name for each, _, _, _ in self._answers):  # in order, as engines do
            self._answers.append((name, kind, life, lambda: worker.do(command)))
            return
        answer = worker.do(command)
        self.later(self.delay, lambda: self._answer(name, life, answer))

    def _answer(self, name: str, life: int, answer: Any) -> None:
        if answer is not None:
            self._step(name, life, answer)


def seeing() -> Any:
    """v41-mini with a tower whose images are small: at most 40 tokens."""
    config = v41_mini(vision=True)
    assert config.vision is not None
    return replace(config, vision=replace(config.vision, min_pixels=14 * 14 * 12, max_image_tokens=40))


class Rig:
    """A cluster and a front over it."""

    def __init__(
        self,
        tokenizer: Any,
        script: Script,
        *,
        vision: bool = False,
        most_waiting: int = 256,
        settings: Settings = SETTINGS,
        store: StoreSettings = StoreSettings(),  # noqa: B008
        **counts: int,
    ):
        self.model = seeing() if vision else v41_mini()
        self.cluster = Cluster(script, settings=settings, **counts)
        roles = Roles(encoder=counts.get("encoder", 0))
        self.config = ServiceConfig(
            roles=roles, engine=EngineSettings(max_waiting=most_waiting, num_blocks=8, max_model_len=512), store=store
        )
        grammars = None if tokenizer is None else tokenizer.grammars
        self.engine = ClusterEngine(self.cluster, self.model, tokenizer, self.config, settings, grammars=grammars)
        self.cluster.engine = self.engine
        self.engine.start()

    def free(self) -> bool:
        """Whether nobody holds anything of any request."""
        engine = self.engine
        return not (self.cluster.holding() or engine.entry.live or len(engine.shelf)) and engine.idle

    def close(self) -> None:
        self.engine.close()
        self.cluster.close()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0, what: Callable[[], Any] = lambda: "") -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited too long: {what()}"
        time.sleep(0.01)


async def until(condition: Callable[[], bool], task: asyncio.Task[Any] | None = None) -> None:
    """Wait for something that comes while `task` still runs."""
    async with asyncio.timeout(60):
        while not condition():
            if task is not None and task.done():
                raise AssertionError(f"ended early: {task.result()}")
            await asyncio.sleep(0.01)
