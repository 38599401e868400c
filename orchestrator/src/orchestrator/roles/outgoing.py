"""The source's side of a transfer: an exported state that is offered and then sent by parts as the target asks."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.roles.messages import Offer, Piece, Send, SourceAlive, Want
from orchestrator.roles.state_parts import Manifest


@dataclass
class Outgoing:
    """Attributes:
    parts: what is held for the target. heard: last word from it. wanted: it has asked for parts.
    """

    request: str
    epoch: int
    source: str
    source_incarnation: int
    target: str
    target_incarnation: int
    manifest: Manifest
    parts: tuple[bytes, ...]
    heard: float
    sent: float = 0.0
    wanted: bool = False

    def offer(self, now: float) -> Send:
        self.sent = now
        return Send(
            self.target,
            Offer(
                self.request,
                self.epoch,
                self.source,
                self.source_incarnation,
                self.target_incarnation,
                self.manifest,
            ),
        )

    def alive(self, now: float) -> Send:
        self.sent = now
        return Send(self.target, SourceAlive(self.request, self.epoch, self.source, self.source_incarnation))

    def word(self, now: float) -> Send:
        """What a source says at intervals."""
        return self.alive(now) if self.wanted else self.offer(now)

    def answer(self, message: Want, now: float) -> list[Send]:
        """Parts that the target wants, of those that are held still."""
        self.heard, self.wanted = now, True
        return [
            Send(self.target, Piece(self.request, self.epoch, self.source_incarnation, number, self.parts[number]))
            for number in message.parts
            if 0 <= number < len(self.parts)
        ]
