"""What processes of a service tell each other beside the roles' messages, and what a worker process is started with."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from orchestrator.roles.messages import Message
from orchestrator.roles.messages.base import Wire
from orchestrator.service.config import ServiceConfig

ProcessRole = Literal["router", "encoder", "prefill", "decode"]


class WorkerSpec(Struct, frozen=True):
    """The first line that a worker process reads from its standard input, as JSON. Its end ends the process.

    Attributes:
        name: of its party, such as "prefill-0". life: 1 for the first process of that name, then 2, ...
        host: at which it listens. supervisor: address of the front's post. secret: of all posts of this service, hex.
        threads: of torch, above 0. folder: of this service on this machine, for sockets and logs.
    """

    name: str
    role: ProcessRole
    life: int
    config: ServiceConfig
    host: str
    supervisor: str
    secret: str
    threads: int
    folder: str
    node: str = ""


class Hello(Wire, frozen=True):
    """Worker process to "supervisor", each beat and at once when it can work.

    Attributes:
        address: of its post. book: version that it has. pid: of the process. held: requests that it holds something of.
        steps: of its engine (router: events) since it began. waiting: seconds since its engine was last asked for
            something that it has not done; 0 while it owes nothing. memory: bytes resident.
        incarnation: under which the router knows it; 0 for a router. numbers: whatever else is worth showing, by name.
    """

    name: str
    role: ProcessRole
    life: int
    address: str
    pid: int
    book: int
    held: int = 0
    steps: int = 0
    waiting: float = 0.0
    memory: int = 0
    incarnation: int = 0
    numbers: dict[str, float] = field(default_factory=dict)


class Book(Wire, frozen=True):
    """Supervisor to all: addresses of the parties by name, as answer to a `Hello` with another version too."""

    version: int
    addresses: dict[str, str]


class Leave(Wire, frozen=True):
    """Supervisor to a worker process: drain, with this grace in seconds, and exit; below 0: exit now."""

    name: str
    life: int
    grace: float


class WantPixels(Wire, frozen=True):
    """Encoder process to the front whose image it is, repeated until `Pixels`."""

    digest: str
    encoder: str


class Pixels(Wire, frozen=True):
    """Front to encoder: a prepared image, encoded; empty where the front has it no more."""

    digest: str
    payload: bytes


ServiceMessage = Message | Hello | Book | Leave | WantPixels | Pixels

_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(ServiceMessage)


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Any:
    """Raises ValueError for bytes that are no message."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"message: {error}") from None
