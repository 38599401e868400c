"""What the toy engines of all roles share: time, commands, ranks, and the ways in which an engine goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from orchestrator.roles import engine_port as port
from orchestrator.simulate.queue import EventQueue
from orchestrator.simulate.store import SharedStore
from orchestrator.simulate.toy.cells import Cells

Handler = Callable[[Any], None]
Key = tuple[str, int]


class Checks(Protocol):
    """What an engine tells the checks of the run."""

    def block_read(self, engine: str, key: bytes, data: bytes, right: bytes) -> None:
        """A block came out of the store; `right` is what it has to be."""

    def wrong(self, invariant: int, what: str) -> None:
        """An invariant does not hold."""


@dataclass
class Site:
    """What an engine finds where it runs."""

    queue: EventQueue
    store: SharedStore
    checks: Checks
    random: Random


@dataclass(frozen=True)
class EngineShape:
    """Attributes:
    blocks: of memory. ranks: at the start. fewest: ranks that hold all experts. rows: requests of a decode step.
    launch, token, row: seconds of a step, of each token computed, of each request in a decode step.
    copy: seconds that it takes to copy a state in or out.
    drafts: tokens that a decode step may give beyond the first.
    stop_early: prefill ends behind the producer of the last global rows; decode replays the end of the prompt.
    chunk: most tokens of a prefill step.
    """

    blocks: int = 96
    ranks: int = 2
    fewest: int = 1
    rows: int = 8
    launch: float = 0.0244
    token: float = 10.74e-6
    row: float = 0.004
    copy: float = 0.002
    drafts: int = 3
    stop_early: bool = False
    chunk: int = 512


class ToyEngine:
    """Subclasses register handlers by command in `_on`.

    Args:
        emit: takes answers; they never come while `do` runs.

    Attributes:
        speed: a step takes so many times as long. hang: the next step never ends. nan: so many of the next rows that
        are sampled come out as not a number. ranks: that live. broken: one of them has died, and the others have not
        met again. running: the step under way, 0 for none.
    """

    def __init__(self, name: str, shape: EngineShape, site: Site, emit: Callable[[Any], None]) -> None:
        self.name, self.shape, self.site = name, shape, site
        self.speed, self.hang, self.nan = 1.0, False, 0
        self.ranks = set(range(shape.ranks))
        self.running = 0
        self.waiting = 0
        """Commands whose answers are to come."""
        self.dead = False
        self.cells: Cells | None = None
        self.launches = 0
        self.broken = False
        self._emit = emit
        self._on: dict[type, Handler] = {port.Drop: self._drop, port.Reform: self._reform}
        self._dropping: list[port.Drop] = []

    def do(self, command: Any) -> None:
        handler = self._on.get(type(command))
        if handler is None:
            self.site.checks.wrong(8, f"{self.name}: {type(command).__name__} is for another engine")
            return
        handler(command)

    def _nothing(self, command: Any) -> None:
        """States travel by value here: nothing is fetched ahead, or left behind for a target."""

    @property
    def owes(self) -> bool:
        """Whether an answer is to come, or a step is under way."""
        return self.waiting > 0 or self.running != 0

    def stop(self) -> None:
        """The process ends: nothing of it answers any more."""
        self.dead = True

    def kill_rank(self, rank: int) -> bool:
        """A rank dies, and with it the state of every request. False where it is dead already."""
        if rank not in self.ranks or self.dead:
            return False
        self.ranks.discard(rank)
        self.forget_all()
        self._stop_step()
        self.broken = True
        self.site.queue.after(0.001, self._say, port.RankDied(rank))
        return True

    def forget_all(self) -> None:
        """Free what is held of all requests."""
        raise NotImplementedError

    def free(self, key: Key) -> None:
        """Free what is held of one request; an unknown one is no error."""
        raise NotImplementedError

    def room(self) -> float:
        """What `Report` calls room, when it holds nothing."""
        raise NotImplementedError

    def _answer(self, delay: float, event: Any) -> None:
        """The answer to a command comes in `delay` seconds."""
        self._later(delay, self._say, event)

    def _later(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        """Go on with a command in `delay` seconds; it has an answer to come until then."""
        self.waiting += 1
        self.site.queue.after(delay * self.speed, self._go_on, call, arguments)

    def _go_on(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.waiting -= 1
        if not self.dead:
            call(*arguments)

    def _say(self, event: Any) -> None:
        if not self.dead:
            self._emit(event)

    def _run(self, step: int, seconds: float, end: Callable[[Any], None], command: Any) -> None:
        """A step takes `seconds`; `end` runs when it is over, unless a rank died under it."""
        if self.running:
            self.site.checks.wrong(8, f"{self.name}: step {step} was launched while {self.running} runs")
        self.running = step
        self.launches += 1
        if self.hang or self.broken:  # ranks wait for one that does not come
            self.hang = False
            return
        self._later(seconds, self._ended, self.launches, end, command)

    def _ended(self, launch: int, end: Callable[[Any], None], command: Any) -> None:
        if self.launches != launch or not self.running:
            return
        self.running = 0
        end(command)
        self._settle()

    def _stop_step(self) -> None:
        """A step under way gives nothing, and nothing it used is touched any more."""
        self.running = 0
        self.launches += 1
        if self.cells is not None:
            self.cells.quiet()
        self._settle()

    def _settle(self) -> None:
        dropping, self._dropping = self._dropping, []
        for drop in dropping:
            self._answer(0.0, port.Dropped(drop.request, drop.epoch))

    def _drop(self, command: port.Drop) -> None:
        self.free((command.request, command.epoch))
        if self.running:
            self._dropping.append(command)
        else:
            self._answer(0.0002, port.Dropped(command.request, command.epoch))

    def _reform(self, command: port.Reform) -> None:
        self.forget_all()
        self._stop_step()
        self.broken = False
        self._later(0.5 + self.site.random.random(), self._reformed, command)

    def _reformed(self, command: port.Reform) -> None:
        few = len(self.ranks) < self.shape.fewest
        why = f"{len(self.ranks)} ranks live, {self.shape.fewest} hold all experts" if few else ""
        rows = self.shape.rows * len(self.ranks) // self.shape.ranks
        self._say(port.Reformed(command.number, len(self.ranks), 0.0 if few else self.room(), max(1, rows), why))

    def _bad_row(self) -> bool:
        """Whether the row that is sampled now is not a number."""
        if self.nan:
            self.nan -= 1
            return True
        return False
