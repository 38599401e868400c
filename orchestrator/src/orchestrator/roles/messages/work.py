"""Between workers and the router: what a worker holds and takes, and what it is given."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from orchestrator.roles.messages.base import Image, Life, RequestSpec, Role, Wire


class Holding(Struct, frozen=True, gc=False):
    """A request that a worker holds something of. `tokens`: of cache that it takes or has reserved."""

    request: str
    epoch: int
    entry: str
    tokens: int
    decoding: bool = False


class Report(Wire, frozen=True):
    """Worker to router, at a fixed interval and when its load changes; it is a pull: `room` says how much it takes.

    Attributes:
        number: rises by report; an older one says nothing any more.
        life: a worker that is not active gets no new work.
        holding: everything that it holds something of, so a router that has restarted learns it.
        room: seconds of prefill work, tokens of cache (decode), patches (encoder) that it takes beyond `holding`.
        capacity: the same when it holds nothing.
        rows: requests that a decode worker holds at most, 0 for no limit.
        node: whose network card reads for it. reading: tokens that wait at that card.
        group: of ranks that step together. ranks: that live. step, plan: of its engine.
    """

    worker: str
    role: Role
    incarnation: int
    number: int
    life: Life
    holding: tuple[Holding, ...]
    room: float
    capacity: float
    rows: int = 0
    node: str = ""
    reading: int = 0
    group: str = ""
    ranks: int = 1
    step: int = 0
    plan: int = 0


class ReportAck(Wire, frozen=True):
    """Router to worker: its lease is renewed."""

    worker: str
    incarnation: int
    number: int
    router_incarnation: int


class AssignImage(Wire, frozen=True):
    """Router to encoder, repeated until `ImageReady`."""

    request: str
    epoch: int
    incarnation: int
    entry: str
    image: Image


class ImageReady(Wire, frozen=True):
    """Encoder to router: the embedding can be fetched there."""

    request: str
    epoch: int
    digest: str
    worker: str
    incarnation: int


class Embedding(Struct, frozen=True, gc=False):
    """Where an image's embedding is."""

    digest: str
    worker: str
    incarnation: int


class AssignPrefill(Wire, frozen=True):
    """Router to prefill worker; repeated until a report holds it. `side` reads the stored prefix."""

    request: str
    epoch: int
    incarnation: int
    entry: str
    spec: RequestSpec
    output: tuple[int, ...]
    target: str
    target_incarnation: int
    side: Literal["prefill", "decode"] = "prefill"
    embeddings: tuple[Embedding, ...] = ()


class Reserve(Wire, frozen=True):
    """Router to decode worker: hold `need` tokens of cache for what `source` will offer; repeated as above."""

    request: str
    epoch: int
    incarnation: int
    entry: str
    spec: RequestSpec
    output: tuple[int, ...]
    source: str
    source_incarnation: int
    need: int
    moving: bool = False


class WantEmbedding(Wire, frozen=True):
    request: str
    epoch: int
    digest: str
    worker: str
    incarnation: int  # of the encoder that is asked


class EmbeddingPiece(Wire, frozen=True):
    """`payload` is empty where the encoder does not have it any more."""

    request: str
    epoch: int
    digest: str
    checksum: int
    payload: bytes
