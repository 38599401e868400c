"""Keeps the workers of a service alive: starts them, hears them, ends and replaces those that are not well.

`Supervisor` does no waiting: messages come by `receive`, time by `tick`. `supervisor_thread` runs it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from orchestrator.roles.messages import Gone, LoadReport
from orchestrator.service.config import ServiceConfig
from orchestrator.service.messages import Book, Hello, Leave, ProcessRole, WorkerSpec
from orchestrator.service.supervise.launch.base import Launcher
from orchestrator.service.supervise.members import Member, Recovery, names_of

log = logging.getLogger("orchestrator.service")

FRONT = ("supervisor", "scaler", "entry")  # parties of the front's process
_AGAIN = 2.0  # seconds after which `Leave` is said again
_DYING = 5.0  # seconds that an end by us may take before the next life starts regardless
_LAST = 90.0  # seconds beyond its grace that a worker has for moving what is left and for leaving
_TRIES = 3  # lives of a worker that never came up, after which the service's start has failed
_CANNOT_START = "exit 2"  # the config does not fit: another try changes nothing
_SHOWN = 100  # ended workers and recoveries that are remembered

Start = Callable[[str, ProcessRole, int], WorkerSpec]


class Supervisor:
    """Not thread-safe.

    Args:
        launcher: starts the processes. spec: of a worker by name, role and life.
        send: gives a message to a party. know: takes the address book, for the front's own post.
        address: of the front's post. wall: unix time.

    Attributes:
        members: by name. gone: those that have left for good. recoveries: newest last. book: version and addresses.
        counts: messages that meant nothing, by reason. load: the router's last report.
        forced: processes that had to be ended while the service ended.
    """

    def __init__(
        self,
        config: ServiceConfig,
        launcher: Launcher,
        spec: Start,
        *,
        send: Callable[[str, Any], Any],
        know: Callable[[Mapping[str, str]], None],
        address: str,
        now: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.config, self._cluster = config, config.cluster
        self._launcher, self._spec, self._send, self._know, self._wall = launcher, spec, send, know, wall
        self._front = {name: address for name in FRONT}
        self.members = {name: Member(name, role, now, now) for name, role in names_of(config.roles)}
        self._numbers = {role: getattr(config.roles, role) for role in ("encoder", "prefill", "decode")}
        self.gone: deque[Member] = deque(maxlen=_SHOWN)
        self.recoveries: deque[Recovery] = deque(maxlen=_SHOWN)
        self.counts: Counter[str] = Counter()
        self.load: LoadReport | None = None
        self.book = Book(1, dict(self._front))
        self.ending = False
        self.forced = 0
        self._ticked = now
        self._grace = self._cluster.grace
        self._know(self.book.addresses)

    # What holds now

    @property
    def ready(self) -> bool:
        """Whether every role has a worker that is up."""
        up = {member.role for member in self.members.values() if member.state == "up"}
        return up >= {member.role for member in self.members.values()}

    @property
    def ended(self) -> bool:
        """Whether the service was ended and no process is left."""
        return self.ending and not self.members

    @property
    def broken_start(self) -> Member | None:
        """A worker that never came up and will not, by all signs."""
        for member in self.members.values():
            tried = member.restarts >= _TRIES or member.last_exit == _CANNOT_START
            if not member.ever and (tried or member.state == "failed"):
                return member
        return None

    @property
    def trouble(self) -> str | None:
        """Why the service cannot work and will not by itself: all workers of a role have failed."""
        for role in dict.fromkeys(member.role for member in self.members.values()):
            members = [member for member in self.members.values() if member.role == role]
            if all(member.state == "failed" for member in members):
                last = members[-1]
                return f"{role}: {last.name} ended {last.restarts + 1} times, the last time by {last.last_exit}"
        return None

    def status(self, now: float) -> dict[str, Any]:
        """As JSON can hold it. `router`: what the router reports of the roles' load."""
        load = self.load
        roles = [] if load is None else [_plain(role) for role in load.roles]
        return {
            "version": 1,
            "ready": self.ready,
            "ending": self.ending,
            "trouble": self.trouble,
            "router": {"number": 0 if load is None else load.number, "roles": roles},
            "workers": [member.show(now) for member in (*self.members.values(), *self.gone)],
            "recoveries": [asdict(recovery) for recovery in self.recoveries],
            "counts": dict(self.counts),
        }

    # Messages

    def receive(self, message: Any, now: float) -> None:
        if isinstance(message, Hello):
            self._hello(message, now)
        elif isinstance(message, Gone):
            self._gone(message, now)
        elif isinstance(message, LoadReport):
            self.load = message
        else:
            self.counts[f"unexpected {type(message).__name__}"] += 1

    def _hello(self, hello: Hello, now: float) -> None:
        member = self.members.get(hello.name)
        if member is None or member.life != hello.life or member.handle is None or member.killed is not None:
            self.counts["hello of another life"] += 1
            return
        member.hello, member.heard, member.address = hello, now, hello.address
        if member.state == "starting":
            member.become("up", now)
            member.came_up, member.ever = now, True
            self._recovered(member)
            log.info("%s is up (life %d, pid %d)", member.name, member.life, hello.pid)
        self._update_book()
        if hello.book != self.book.version:
            self._send(hello.name, self.book)
        if hello.waiting > self._cluster.stalled:
            self._kill(member, f"stalled: no progress for {hello.waiting:.0f} s", now)

    def _gone(self, gone: Gone, now: float) -> None:
        """It holds nothing any more and exits. Its incarnation tells the life only roughly, so its exit decides."""
        member = self.members.get(gone.worker)
        if member is not None and member.state == "up":
            member.become("draining", now)  # by a signal that was not ours

    # Drain

    def drain(self, name: str, now: float) -> str:
        """Have a worker leave when its requests are done or moved; the name of who takes over.

        Raises KeyError for a name that no worker has, and ValueError where it is not up.
        """
        member = self.members[name]
        if member.state != "up" or self.ending:
            state = "about to end with the service" if self.ending else member.state
            raise ValueError(f"worker: {name} is {state}, allowed is one that is up")
        if member.role == "router":  # holds nothing; its next life learns all from the workers
            self._kill(member, "drained", now)
            return name
        successor = f"{member.role}-{self._numbers[member.role]}"
        self._numbers[member.role] += 1
        self.members[successor] = Member(successor, member.role, now, now)
        self._tell_to_leave(member, now)
        return successor

    def end(self, now: float, grace: float | None = None) -> None:
        """Have all workers leave, with so many seconds for what they hold; below 0: at once."""
        self.ending = True
        self._grace = self._cluster.grace if grace is None else grace
        for member in list(self.members.values()):
            if member.handle is None:
                self._leaves(member, now)
            elif self._grace < 0:
                self._kill(member, "ended", now)
            elif member.state == "starting":
                self._kill(member, "ended while starting", now)
            else:
                member.told = None
                self._tell_to_leave(member, now)

    def _tell_to_leave(self, member: Member, now: float) -> None:
        if member.told is None:
            member.told = now
            member.become("draining", now)
        member.asked = now
        self._send(member.name, Leave(member.name, member.life, self._grace))

    # Time

    def tick(self, now: float) -> None:
        """To be called some times a second."""
        missed, self._ticked = now - self._ticked, now
        if missed > self._cluster.silent / 4:  # it was us who did not run: nobody is late for that
            for member in self.members.values():
                member.heard += missed
                member.begun += missed
        for member in list(self.members.values()):
            if member.handle is not None:
                self._look(member, now)
            elif member.due is not None and now >= member.due and not self.ending:
                self._start(member, now)

    def _start(self, member: Member, now: float) -> None:
        member.life += 1
        member.due, member.killed, member.why = None, None, ""
        member.begun = member.heard = now
        member.hello, member.came_up, member.told = None, None, None
        member.become("starting", now)
        try:
            member.handle = self._launcher.start(self._spec(member.name, member.role, member.life))
        except Exception as error:  # whatever it is, it must not end the others
            log.exception("%s cannot be started", member.name)
            self._ended(member, f"start failed: {error}", now)

    def _look(self, member: Member, now: float) -> None:
        assert member.handle is not None
        how = member.handle.poll()
        if how is not None:
            self._tell_router(member)
            self._ended(member, f"{member.why}; {how}" if member.why else how, now)
            return
        limits = self._cluster
        if member.killed is not None:
            if now - member.killed >= _DYING:
                self._ended(member, f"{member.why}; its end is not confirmed", now)
        elif member.state == "starting":
            if now - member.begun > limits.loading:
                self._kill(member, f"not up after {limits.loading:g} s", now)
        elif now - member.heard > limits.silent:
            self._kill(member, f"silent for {now - member.heard:.0f} s", now)
        elif member.told is not None:
            if now - member.told > self._grace + _LAST:
                self._kill(member, f"not gone {_LAST:g} s after its grace", now)
            elif now - member.asked >= _AGAIN:
                self._tell_to_leave(member, now)

    def _kill(self, member: Member, why: str, now: float) -> None:
        if member.killed is not None or member.handle is None:
            return
        log.warning("%s is ended: %s", member.name, why)
        member.killed, member.why = now, why
        self.forced += self.ending and member.state != "starting"
        member.handle.kill()

    def _ended(self, member: Member, how: str, now: float) -> None:
        """A process is over: another life, or none."""
        handle, member.handle = member.handle, None
        member.last_exit, member.address = how, ""
        if handle is not None:
            member.last_words = handle.tail() or member.last_words
        if member.told is not None or self.ending:
            self._leaves(member, now)
            return
        member.ends.append(now)
        if member.ended_within_hour(now) > self._cluster.restarts:
            member.become("failed", now)
            log.error("%s has failed: %d ends within an hour, the last by %s", member.name, len(member.ends), how)
        else:
            member.restarts += 1
            pause = member.pause(now)
            member.due = now + pause
            member.become("starting", now)
            self.recoveries.append(Recovery(member.name, member.role, member.life + 1, self._wall(), how))
            log.warning("%s (life %d) ended: %s; the next one starts in %g s", member.name, member.life, how, pause)
        self._update_book()

    def _tell_router(self, member: Member) -> None:
        """A process has ended: what it held goes on elsewhere now, not when its lease is over."""
        if member.role != "router" and member.hello is not None:
            self._send("router", Gone(member.name, member.role, member.hello.incarnation))

    def _leaves(self, member: Member, now: float) -> None:
        member.become("gone", now)
        del self.members[member.name]
        self.gone.append(member)
        log.info("%s is gone (%s)", member.name, member.last_exit or "never started")
        self._update_book()

    def _recovered(self, member: Member) -> None:
        for recovery in self.recoveries:
            if (recovery.name, recovery.life) == (member.name, member.life) and not recovery.up:
                recovery.up = self._wall()

    def _update_book(self) -> None:
        """Tell everybody where the others are, when that has changed."""
        addresses = {name: member.address for name, member in self.members.items() if member.address}
        addresses |= self._front
        if addresses == self.book.addresses:
            return
        self.book = Book(self.book.version + 1, addresses)
        self._know(addresses)
        for name in addresses:
            if name not in self._front:
                self._send(name, self.book)


def _plain(load: Any) -> dict[str, Any]:
    return {name: getattr(load, name) for name in load.__struct_fields__}
