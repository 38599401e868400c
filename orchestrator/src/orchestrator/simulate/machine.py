"""A machine that runs one party: it is up or not, quick or slow, and has a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from orchestrator.roles.messages import Send, Start, Tick, Wake
from orchestrator.simulate.network import Network
from orchestrator.simulate.queue import EventQueue


class Core(Protocol):
    """A party's state machine; `held` are requests and epochs that it holds something of."""

    @property
    def held(self) -> frozenset[tuple[str, int]]: ...

    def step(self, event: Any, now: float) -> list[Any]: ...


class Machine:
    """The shell of one party.

    Args:
        make: a new core for an incarnation. perform: what is neither `Send` nor `Wake`; called with this machine and
            the action.

    Attributes:
        incarnation: of the life that runs or ran last. core: None while it is down. wake: when the core wants to be
        woken, by its own clock.
        busy: seconds that handling a message takes. paused: whether nothing is handled now; what comes waits.
        steps: events handled by the core in all lives. since: true time since which it has run without a pause.
    """

    def __init__(
        self,
        name: str,
        queue: EventQueue,
        network: Network,
        make: Callable[[int], Core],
        perform: Callable[[Machine, Any], None],
        *,
        clock: float = 0.0,
    ) -> None:
        self.name, self.incarnation, self.steps = name, 0, 0
        self.core: Core | None = None
        self.busy, self.paused = 0.0, False
        self._queue, self._network, self._make, self._perform = queue, network, make, perform
        self._true, self._local, self._rate = 0.0, clock, 1.0
        self.wake: float | None = None  # by the local clock
        self.since = 0.0
        self._timers: set[float] = set()  # true times at which a look at it is planned
        self._waiting: list[Any] = []
        self.watch: Callable[[Machine, Any, list[Any]], None] | None = None

    @property
    def up(self) -> bool:
        return self.core is not None

    @property
    def now(self) -> float:
        """This machine's clock; it runs on over crashes, as a machine's does."""
        return self._local + (self._queue.now - self._true) * self._rate

    @property
    def true_now(self) -> float:
        """The time that no machine knows."""
        return self._queue.now

    def set_clock(self, *, rate: float | None = None, jump: float = 0.0) -> None:
        """Run at `rate` seconds a second from now on, after a jump forward of `jump` seconds."""
        if jump < 0 or (rate is not None and rate <= 0):
            raise ValueError(f"rate, jump: got {rate}, {jump}, allowed are a rate above 0 and a jump of 0 or more")
        self._local, self._true = self.now + jump, self._queue.now
        self._rate = self._rate if rate is None else rate
        if self.wake is not None:
            self._plan(self.wake)

    def start(self) -> None:
        """Begin a new life. One that runs already goes on."""
        if self.core is not None:
            return
        self.incarnation += 1
        self.since = self._queue.now
        self.core = self._make(self.incarnation)
        self.wake, self.paused = None, False
        self._waiting.clear()
        self.handle(Start())

    def crash(self) -> None:
        """Everything in memory is gone, and what comes is lost until the next `start`."""
        self.core, self.wake = None, None
        self._waiting.clear()

    def pause(self) -> None:
        """Nothing is handled until `go_on`: a collector, a debugger, a host that swaps."""
        self.paused = True

    def go_on(self) -> None:
        if self.paused:
            self.paused, self.since = False, self._queue.now
            waiting, self._waiting = self._waiting, []
            for event in waiting:
                self.handle(event)
            if self.wake is not None:
                self._plan(self.wake)

    def handle(self, event: Any) -> None:
        """Give the core an event and do what it asks for."""
        core = self.core
        if core is None:
            return
        if self.paused:
            self._waiting.append(event)
            return
        self.steps += 1
        actions = core.step(event, self.now)
        for action in actions:
            kind = type(action)
            if kind is Send:
                self._network.send(self.name, action.to, action.message)
            elif kind is Wake:
                self.wake = action.at
                self._plan(action.at)
            else:
                self._perform(self, action)
        if self.watch is not None:
            self.watch(self, event, actions)

    def receive(self, message: Any) -> None:
        """A message from the network."""
        if self.busy:
            self._queue.after(self.busy, self._late, self.incarnation, message)
        else:
            self.handle(message)

    def _late(self, incarnation: int, message: Any) -> None:
        if incarnation == self.incarnation:
            self.handle(message)

    def _plan(self, local: float) -> None:
        """Look at the clock when it shows `local`, unless a look is planned before."""
        true = self._queue.now + max(0.0, local - self.now) / self._rate
        if not self._timers or true < min(self._timers) - 1e-9:
            self._timers.add(true)
            self._queue.at(true, self._look, true)

    def _look(self, true: float) -> None:
        self._timers.discard(true)
        if self.core is None or self.wake is None or self.paused:
            return
        if self.now + 1e-9 >= self.wake:
            # Rounding may leave the clock a hair short; the core is never woken before its time.
            self._local, self._true = max(self.now, self.wake), self._queue.now
            self.wake = None
            self.handle(Tick())
        else:
            self._plan(self.wake)
