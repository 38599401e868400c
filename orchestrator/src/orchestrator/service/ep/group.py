"""The life of a group: ranks are started, form an epoch, serve, and after a death form the next one.

A dead rank is started anew at its place. The others keep their weights and give up all requests; what experts are
missing, they and the new rank get from peers or from the checkpoint, as an epoch after a death does. Where a rank
cannot be started, those that are left go on if they can hold all experts. No requests here, and no threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from orchestrator.balance.eplb.placement import smallest_slots
from orchestrator.cluster.links import Links
from orchestrator.cluster.messages import Broke, Did, Do, Failed, Form, Serving, Up
from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.workers import GONE
from orchestrator.roles.engine_port import Reform

_log = logging.getLogger(__name__)
_MARGIN = 1.0  # seconds beyond the ranks' own time-out

Phase = Literal["loading", "forming", "serving", "broken", "useless"]


class Processes(Protocol):
    """As `ranks.RankProcesses`."""

    pids: list[int]

    def start_at(self, place: int) -> int: ...

    def send(self, worker: int, message: Any) -> None: ...

    def kill(self, worker: int) -> None: ...

    def links(self, epoch: int, ranks: int) -> Links: ...


class Group:
    """Attributes:
    phase: "broken" waits for `reform`, "useless" has too few ranks. why: that is so.
    number: of the group, as `Do.group`. epoch: of the ranks, which counts attempts too.
    members: processes by rank in this epoch. layout: of their ports. said: last by each process.
    """

    def __init__(
        self,
        processes: Processes,
        options: EpOptions,
        experts: int,
        loading: float,
        died: Callable[[int], None],
        formed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        options: resolved. experts: of a layer. loading: seconds that a start, or forming, may take.
        died: called once a group, with the rank, -1 if it is not known.
        formed: called when phase has become serving or useless.
        """
        self.processes, self.options, self._experts, self._loading = processes, options, experts, loading
        self._died, self._formed, self._clock = died, formed, clock
        self.phase: Phase = "loading"
        self.number = self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.layout = self.why = ""
        self.said: dict[int, Did] = {}
        self._place: dict[int, int] = {}  # of all that live
        self._loaded: set[int] = set()
        self._apart: set[int] = set()  # loaded, and in no epoch
        self._serving: set[int] = set()
        self._tried: set[int] = set()  # places at which a process was started for this group
        self._asked = True  # to form
        self._deadline = self._load_deadline = 0.0

    def start(self) -> None:
        """Start all ranks."""
        self._load()

    def reform(self, number: int) -> None:
        """Give all requests up and form the group of this number. One that showed no failure is started anew."""
        again = self.phase in ("loading", "forming") and self._asked
        self.number = number
        if again:
            return  # nothing was asked of it yet: it answers by the new number
        self._asked = True
        if self.phase != "broken":
            for process in list(self._place):
                self._end(process)
            self._deadline = 0.0
        self._load()

    @property
    def ranks(self) -> int:
        return len(self.members) if self.phase == "serving" else 0

    def pids(self) -> list[int]:
        """By rank."""
        return [self.processes.pids[process] for process in self.members]

    # Messages

    def take(self, process: int, message: Any) -> Did | None:
        """Note what a process says; an answer to a command of this group is returned."""
        if message is GONE:
            self._gone(process)
        elif isinstance(message, Failed):
            self.why = message.reason
            _log.error("process %d of the group failed: %s", process, message.reason)
        elif process not in self._place:
            return None
        elif isinstance(message, Up):
            self.layout = message.layout
            self._loaded.add(process)
            self._apart.add(process)
        elif isinstance(message, Broke):
            if message.epoch == self.epoch and process in self.members:
                self._apart.add(process)
                self._fail(message.waiting_for[0] if message.waiting_for else -1, message.reason)
        elif isinstance(message, Serving):
            if message.epoch == self.epoch:
                self._serving.add(process)
        elif isinstance(message, Did):
            self.said[process] = message
            return message if message.group == self.number and self.phase == "serving" else None
        self.tick()
        return None

    def tick(self) -> None:
        """Look for what is due."""
        now = self._clock()
        if self.phase == "forming":
            if self._serving == set(self.members):
                self.phase, self._asked = "serving", False
                self._formed()
            elif now > self._deadline:
                for process in set(self.members) - self._serving:
                    self._end(process)
                self._fail(-1, f"ranks took more than {self._loading:g} s to form a group")
        elif self.phase in ("broken", "loading"):
            limits = {process: self._deadline for process in self._loaded - self._apart}  # they wait for the dead
            if self.phase == "loading":
                limits |= dict.fromkeys(set(self._place) - self._loaded, self._load_deadline)
            late = [process for process, limit in limits.items() if now > limit]
            for process in late:
                _log.warning("rank process %d does not answer and is ended", process)
                self._end(process)
            if self.phase == "loading":
                if late:
                    self._load()
                elif not limits:
                    self._form()

    def _gone(self, process: int) -> None:
        if process not in self._place:
            return
        rank = self.members.index(process) if process in self.members else -1
        self._forget(process)
        if self.phase in ("serving", "forming"):
            self._fail(rank, "a process ended")
        elif self.phase == "loading":
            self._load()
        self.tick()

    # Phases

    def _fail(self, rank: int, reason: str) -> None:
        if self.phase not in ("serving", "forming"):
            return
        _log.warning("group %d ends: rank %d: %s", self.number, rank, reason)
        self.phase, self._asked, self.why = "broken", False, reason
        self._deadline = self._clock() + self.options.timeout + _MARGIN
        self._tried.clear()
        self._died(rank)

    def _load(self) -> None:
        """Start a process at each place without one, once."""
        if self.phase != "loading":
            self.phase, self._load_deadline = "loading", self._clock() + self._loading
        elif not self._tried:
            self._load_deadline = self._clock() + self._loading
        for place in sorted(set(range(self.options.ranks)) - set(self._place.values()) - self._tried):
            self._tried.add(place)
            process = self.processes.start_at(place)
            self._place[process] = place

    def _form(self) -> None:
        members = tuple(sorted(self._apart, key=self._place.__getitem__))
        slots = self.options.slots
        assert slots is not None
        self._tried.clear()
        if not members or smallest_slots(self._experts, len(members)) > slots:
            self.members, self.phase, self._asked = members, "useless", False
            said = f": {self.why}" if self.why else ""
            self.why = f"{len(members)} ranks of {slots} slots cannot hold {self._experts} experts{said}"
            self._formed()
            return
        self.epoch += 1
        self.members, self.phase, self._serving = members, "forming", set()
        self._deadline = self._clock() + self._loading
        places = tuple(self._place[process] for process in members)
        links = self.processes.links(self.epoch, len(members))
        for process in members:
            self.processes.send(process, Do(self.number, Reform(self.number)))
            self.processes.send(process, Form(self.epoch, places, links))
        self._apart.clear()

    def _end(self, process: int) -> None:
        self.processes.kill(process)
        self._forget(process)

    def _forget(self, process: int) -> None:
        self._place.pop(process, None)
        self.said.pop(process, None)
        for held in (self._loaded, self._apart, self._serving):
            held.discard(process)
