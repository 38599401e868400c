"""Times and limits that the roles share. Every wait of the protocol is one of these."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kernel_core.check import require


@dataclass(frozen=True)
class Settings:
    """Seconds, if not said otherwise.

    Attributes:
        router, scaler: names of those parties.
        beat: interval of reports, of keep-alives, and at which every party looks for what is late.
        resend: after which an unanswered message is repeated.
        lease: without a word from a worker after which the router takes it for dead.
        transfer_lease: without a word from the other side after which either end of a transfer frees what it holds.
        owner_lease: without an acknowledgement from the entry after which a decode worker frees a request.
        silence: without a word from the decode worker after which an entry goes on under a higher epoch.
        submit_lease: without `Submit` from an entry after which the router frees a request that does not decode.
        unreported: without any worker's report of an assigned request after which the router calls it lost.
        settle: for which a router that has begun to run only listens.
        admit: for an answer to the first `Submit`. first_token: from there to the first token, waiting included.
        request: for a whole request.
        answer: of an engine to any command, a step too, after which its group counts as dead.
        reform: of a group, after which the worker leaves, to be started anew.
        tombstone: for which ended requests are remembered.
        grace: of a drain before what is left moves. move: from there after which it is given up for replay elsewhere.
        piece_tries: how often parts that came broken or not at all are asked for.
        attempts: epochs in which a request may fail one after the other without a new token. Each death of a process
            that it waits for ends one, whoever is to blame.
        backoff: before the second such attempt; doubled by each, up to `silence`.
    """

    router: str = "router"
    scaler: str = "scaler"
    beat: float = 0.5
    resend: float = 0.5
    lease: float = 3.0
    transfer_lease: float = 5.0
    owner_lease: float = 6.0
    silence: float = 4.0
    submit_lease: float = 6.0
    unreported: float = 4.0
    settle: float = 2.0
    admit: float = 15.0
    first_token: float = 120.0
    request: float = 3600.0
    answer: float = 20.0
    reform: float = 600.0
    tombstone: float = 60.0
    grace: float = 60.0
    move: float = 60.0
    piece_tries: int = 8
    attempts: int = 16
    backoff: float = 0.1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str):
                require(value > 0 or (field.name == "grace" and value == 0), field.name, value, "above 0")
        for name in ("lease", "transfer_lease", "owner_lease", "silence", "submit_lease", "unreported", "settle"):
            require(
                getattr(self, name) > 2 * self.beat, name, getattr(self, name), f"above two beats ({2 * self.beat})"
            )
        require(self.tombstone > self.owner_lease, "tombstone", self.tombstone, f"above {self.owner_lease}")
