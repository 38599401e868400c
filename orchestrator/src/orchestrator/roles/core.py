"""What all cores have in common: dispatch by the event's type, actions in order, one tick at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.roles.messages import Key, Send, Start, Tick, Wake
from orchestrator.roles.rules import Rules
from orchestrator.roles.settings import Settings

Action = Any  # `messages` and `engine_port` say which
Handler = Callable[[Any, float], None]


class Core:
    """Subclasses register handlers in `_on`, call `do` and `send`, and look for what is late in `_beat`.

    A core that has something to watch is woken once a beat; `_watching` says whether it has.
    """

    def __init__(self, name: str, settings: Settings | None = None, rules: Rules | None = None) -> None:
        self.name = name
        self.settings, self.rules = settings or Settings(), rules or Rules()
        self._on: dict[type, Handler] = {}
        self._actions: list[Action] = []
        self._wake_at: float | None = None
        self._stepped_at: float | None = None
        self.age = 0.0
        """Seconds that this party has seen pass: of a pause, or a jump of its clock, two beats and no more. What has to
        outlive messages under way is kept by it; they may lie before its door when it goes on."""

    @property
    def held(self) -> frozenset[Key]:
        """Requests and epochs that this party holds something of."""
        raise NotImplementedError

    def step(self, event: Any, now: float) -> list[Action]:
        """Take an event, and return what is to be done, in order.

        Raises:
            TypeError: this party has no use for such an event.
        """
        kind = type(event)
        if self._stepped_at is not None:
            self.age += min(max(0.0, now - self._stepped_at), 2 * self.settings.beat)
        self._stepped_at = now
        if kind is Tick:
            if self._wake_at is not None and now >= self._wake_at:
                self._wake_at = None
                self._beat(now)
        elif kind is not Start:
            handler = self._on.get(kind)
            if handler is None:
                raise TypeError(f"{self.name}: {kind.__name__} is for another party")
            handler(event, now)
        else:
            self._started(now)
        self._after(now)
        if self._wake_at is None and self._watching():
            self._wake_at = now + self.settings.beat
            self._actions.append(Wake(self._wake_at))
        actions, self._actions = self._actions, []
        return actions

    def do(self, action: Action) -> None:
        """Have an action performed when the event has been handled."""
        self._actions.append(action)

    def send(self, to: str, message: Any) -> None:
        """Have a message delivered to the party of that name."""
        self._actions.append(Send(to, message))

    def _started(self, now: float) -> None:
        """`Start` came."""

    def _beat(self, now: float) -> None:
        """A beat has passed since something to watch appeared, or since the last beat."""

    def _after(self, now: float) -> None:
        """An event has been handled; last chance to add actions."""

    def _watching(self) -> bool:
        return False
