"""What the parties of the service tell each other, what they are told from outside, and what they ask to be done.

How a core is driven
--------------------
A core is a state machine without I/O, clock or randomness. `core.step(event, now)` takes one event and returns a list
of actions, to be performed in order. `now` is seconds of a clock of its own that never goes back; clocks of different
parties are never compared. An event is any message of this file that was sent to the core, what a client does
(`ClientRequest`, `ClientCancel`), what an engine answers (`engine_port.EngineEvent`), or `Tick`.

A new core is given `Start()` first. A shell performs

* `Send(to, message)`: deliver `message` to the core of that name. Delivery may fail, repeat, overtake and be late.
* `Wake(at)`: call `step(Tick(), ...)` at `at` or later. A later `Wake` of the same core takes the place of an earlier
  one. A tick too early, or one too many, does no harm.
* `Deliver`, `DeliverReady`, `DeliverEnd`: to the client of a request, in the order in which they come.
* commands of `engine_port.Command` (encoder, prefill and decode): have the engine do it and give its answer back
  as an event. An engine does what it is told in order, and answers each command that has an answer exactly once.
* `StartWorker`, `CancelStart`, `Exit`: of the scaler and of a drained worker.

A party that restarts begins with a new core, and a router or worker with a larger `start` (1, 2, ...), from which the
core makes its `incarnation`; nothing else survives. A core that has said `Exit` takes no more events. Names of parties:
the router's is in `Settings.router`, all others' are free.

Identity: `request` is unique for ever. `epoch` counts attempts at it and moves: only its entry raises it, and whoever
knows a higher epoch refuses a lower one. `incarnation` tells lives of a worker apart; `step` and `plan` are the
number of a step of an engine and the version of its expert placement.
"""

from __future__ import annotations

from msgspec import Struct

from orchestrator.roles.messages.base import Image, Key, Life, Outcome, RequestSpec, Role, Wire
from orchestrator.roles.messages.client import ClientCancel, ClientRequest, Deliver, DeliverEnd, DeliverReady
from orchestrator.roles.messages.moving import Drain, Gone, Landed, MoveTo, MoveWanted, Resume
from orchestrator.roles.messages.requests import (
    Accepted,
    Lost,
    Refused,
    Release,
    Released,
    Submit,
    Unknown,
    Wanted,
    WorkFailed,
)
from orchestrator.roles.messages.scaling import CancelStart, Exit, LoadReport, RoleLoad, StartWorker, WorkerUp
from orchestrator.roles.messages.tokens import Tokens, TokensAck
from orchestrator.roles.messages.transfer import Offer, Piece, SourceAlive, SourceGone, Taken, TargetAlive, Want
from orchestrator.roles.messages.work import (
    AssignImage,
    AssignPrefill,
    Embedding,
    EmbeddingPiece,
    Holding,
    ImageReady,
    Report,
    ReportAck,
    Reserve,
    WantEmbedding,
)

Message = (
    Accepted
    | AssignImage
    | AssignPrefill
    | Drain
    | EmbeddingPiece
    | Gone
    | ImageReady
    | Landed
    | LoadReport
    | Lost
    | MoveTo
    | MoveWanted
    | Offer
    | Piece
    | Refused
    | Release
    | Released
    | Report
    | ReportAck
    | Reserve
    | Resume
    | SourceAlive
    | SourceGone
    | Submit
    | Taken
    | TargetAlive
    | Tokens
    | TokensAck
    | Unknown
    | Want
    | Wanted
    | WantEmbedding
    | WorkFailed
)


class Send(Struct, frozen=True, gc=False):
    to: str
    message: Message


class Wake(Struct, frozen=True, gc=False):
    at: float


class Start(Struct, frozen=True, gc=False):
    """Event: the party has begun to run."""


class Tick(Struct, frozen=True, gc=False):
    """Event: it is time, see `Wake`."""


__all__ = [
    "Accepted",
    "AssignImage",
    "AssignPrefill",
    "CancelStart",
    "ClientCancel",
    "ClientRequest",
    "Deliver",
    "DeliverEnd",
    "DeliverReady",
    "Drain",
    "Embedding",
    "EmbeddingPiece",
    "Exit",
    "Gone",
    "Holding",
    "Image",
    "ImageReady",
    "Key",
    "Landed",
    "Life",
    "LoadReport",
    "Lost",
    "Message",
    "MoveTo",
    "MoveWanted",
    "Offer",
    "Outcome",
    "Piece",
    "Refused",
    "Release",
    "Released",
    "Report",
    "ReportAck",
    "RequestSpec",
    "Reserve",
    "Resume",
    "Role",
    "RoleLoad",
    "Send",
    "SourceAlive",
    "SourceGone",
    "Start",
    "StartWorker",
    "Submit",
    "Taken",
    "TargetAlive",
    "Tick",
    "Tokens",
    "TokensAck",
    "Unknown",
    "Wake",
    "Want",
    "WantEmbedding",
    "Wanted",
    "Wire",
    "WorkFailed",
    "WorkerUp",
]
