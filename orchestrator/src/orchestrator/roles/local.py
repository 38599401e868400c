"""The roles in one process over one engine: what `fathom serve` on one machine runs through.

`RoleEngine` is used like the `Engine` that it stands before. A request goes through an entry, a router, a prefill and a
decode core; messages are calls, the state passes by reference (`shared_engine`), and time stands still between steps,
so that no lease runs out while a long step is computed.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import count
from typing import Any, cast

from orchestrator.balance.admission import Limits
from orchestrator.engine.async_engine import AsyncEngine
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import EngineFull, Event, Finished, Ready, SamplingParams
from orchestrator.roles.core import Core
from orchestrator.roles.decode import Decode, DecodeOptions
from orchestrator.roles.engine_port import is_command
from orchestrator.roles.entry import Entry
from orchestrator.roles.messages import (
    ClientCancel,
    ClientRequest,
    Deliver,
    DeliverEnd,
    DeliverReady,
    RequestSpec,
    Send,
    Start,
    Tick,
    Wake,
)
from orchestrator.roles.prefill import Prefill, PrefillOptions
from orchestrator.roles.router import Router, RouterPolicy
from orchestrator.roles.settings import Settings
from orchestrator.roles.shared_engine import LAYOUT, Reference, SharedEngine

_NEVER = 1e12  # seconds; in one process nobody is late
_SETTINGS = Settings(
    attempts=1, answer=_NEVER, first_token=_NEVER, request=_NEVER, admit=_NEVER, submit_lease=_NEVER, unreported=_NEVER
)


class _Counted:
    """A scheduler as it is seen from outside of the roles: `waiting` is good for its length alone."""

    def __init__(self, engine: Engine, before: int) -> None:
        self._inner = engine.scheduler
        self.waiting = range(len(self._inner.waiting) + before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RoleEngine:
    """An engine behind the roles. Not thread-safe, but for `check`, `compile`, `encode` and `release`, as the engine.

    What is not here is the engine's own: `config`, `stats`, `tokenizer`, ...

    Attributes:
        engine: that computes. cores: by name.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._shared = SharedEngine(engine, self._announce)
        config = engine.config
        rows = config.max_num_seqs + min(config.max_num_seqs, config.max_waiting)  # some wait where their blocks come
        limits = Limits(context=engine.context, pool=engine.context, target=_NEVER, most_waiting=config.max_waiting + 1)
        self.cores: dict[str, Core] = {
            "entry": Entry("entry", _SETTINGS),
            "router": Router(1, RouterPolicy(limits=limits, load=0.0), _SETTINGS),
            "prefill": Prefill("prefill", 1, PrefillOptions(most=2 * rows), _SETTINGS),
            "decode": Decode("decode", DecodeOptions(rows * engine.context, rows, LAYOUT), 1, _SETTINGS),
        }
        self._queue: deque[tuple[str, Any]] = deque()
        self._wakes: dict[str, float] = {}
        self._ends: deque[DeliverEnd] = deque()
        self._events: list[Event] = []
        self._announced: set[str] = set()
        self._names: dict[str, str] = {}  # of the roles, by the client's
        self._count = count()
        self._waiting = 0
        self._now, self._last = 0.0, time.monotonic()
        for name in self.cores:
            self._queue.append((name, Start()))
        self._pump()
        self._now = _SETTINGS.settle  # nobody else can hold anything of an engine that has just begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def has_work(self) -> bool:
        shared = self._shared
        return bool(self._events or self._queue or shared.run or shared.late) or self.engine.has_work

    @property
    def scheduler(self) -> _Counted:
        """The engine's, with those that wait before it among the waiting."""
        return _Counted(self.engine, self._waiting)

    def add(self, request_id: str, prompt: list[int], params: SamplingParams, **options: Any) -> None:
        """As `Engine.add`; a request for which the engine has no room yet waits in the router's queue.

        Raises:
            ValueError: it can never run, or its id is in use.
            EngineFull: too many are waiting.
        """
        self.engine.check(prompt, params, options.get("images", ()))
        if request_id in self._names:
            raise ValueError(f"request_id: got {request_id!r}, which is running; ids have to be unique")
        if len(self.scheduler.waiting) >= self.engine.config.max_waiting:
            raise EngineFull(f"{self.engine.config.max_waiting} requests are waiting already; try again later")
        if options.get("matcher") is None:
            options["matcher"] = self.compile(params)
        name = self._names[request_id] = f"{next(self._count)} {request_id}"
        reference = self._shared.references[name] = Reference(request_id, list(prompt), params, options)
        spec = RequestSpec(
            tuple(prompt),
            min(params.max_tokens, max(1, self.engine.context - len(prompt))),
            seed=params.seed or 0,
            tenant=params.cache_salt,
        )
        self._advance()
        self._queue.append(("entry", ClientRequest(name, spec)))
        self._pump(adding=name)
        if reference.error is not None:
            raise reference.error

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown and ended ids are no error."""
        if request_id in self._names:
            self._queue.append(("entry", ClientCancel(self._names[request_id])))
            self._pump()

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def step(self) -> list[Event]:
        """Run one step of the engine, and return what came out for clients, each request's events in order."""
        self._advance()
        for answer in self._shared.begin_late():
            self._queue.append(("prefill", answer))
        for answer in self._shared.step():
            self._queue.append(("decode", answer))
        self._pump()
        return self.take_events()

    # Cores

    def _advance(self) -> None:
        """Let the time pass that has passed, but no more than half a beat, and wake who wants to be woken."""
        last, self._last = self._last, time.monotonic()
        self._now += min(self._last - last, _SETTINGS.beat / 2)
        for name, at in list(self._wakes.items()):
            if self._now >= at:
                del self._wakes[name]
                self._queue.append((name, Tick()))
        self._pump()

    def _pump(self, adding: str = "") -> None:
        """Carry out what there is to do until nothing is left; then end what has ended."""
        while self._queue:
            name, event = self._queue.popleft()
            for action in self.cores[name].step(event, self._now):
                self._perform(name, action)
        while self._ends:
            self._end(self._ends.popleft(), adding)
        self._waiting = len(cast(Router, self.cores["router"]).waiting) + len(self._shared.late)

    def _perform(self, name: str, action: Any) -> None:
        if isinstance(action, Send):
            if action.to in self.cores:
                self._queue.append((action.to, action.message))
        elif isinstance(action, Wake):
            self._wakes[name] = action.at
        elif is_command(action):
            do = self._shared.prefill if name == "prefill" else self._shared.decode
            self._queue.extend((name, answer) for answer in do(action))
        elif isinstance(action, Deliver):
            tokens = self._shared.references[action.request].tokens
            self._events.extend(tokens.popleft() for _ in action.tokens)
        elif isinstance(action, DeliverEnd):
            self._ends.append(action)
        elif isinstance(action, DeliverReady):
            reference = self._shared.references[action.request]
            self._announce(reference.ready or Ready(reference.name, action.prompt_tokens, action.cached_tokens))

    # Clients

    def _announce(self, event: Ready) -> None:
        """Pass `Ready` on as soon as the engine knows the hit, before the first token is there."""
        if event.request_id not in self._announced:
            self._announced.add(event.request_id)
            self._events.append(event)

    def _end(self, end: DeliverEnd, adding: str) -> None:
        reference = self._shared.references.pop(end.request)
        self._announced.discard(reference.name)
        del self._names[reference.name]
        options = reference.options
        if not reference.entered and options.get("encoded") and end.request != adding:
            self.engine.release(options["encoded"], reference.params)
        if end.outcome == "rejected":
            full = end.status == 429
            reference.error = EngineFull(end.reason, float(end.retry_after)) if full else ValueError(end.reason)
        if reference.error is not None and end.request == adding:
            return  # `add` raises it
        self._events.append(self._finished(end, reference))

    def _finished(self, end: DeliverEnd, reference: Reference) -> Finished:
        made = reference.finished
        reason = {"finished": end.reason, "cancelled": "abort"}.get(end.outcome, "error")
        if made is not None and made.reason == reason:
            return made
        return Finished(
            reference.name,
            cast(Any, reason),
            error=end.reason if reason == "error" else None,
            prompt_tokens=len(reference.prompt),
            cached_tokens=0 if reference.ready is None else reference.ready.cached_tokens,
            completion_tokens=end.tokens,
        )


def through_roles(engine: Engine) -> AsyncEngine:
    """An engine behind an event loop, with the roles between. Used and closed like any `AsyncEngine`."""
    return AsyncEngine(cast(Engine, RoleEngine(engine)))
