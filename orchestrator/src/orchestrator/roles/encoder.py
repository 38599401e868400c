"""The encoder role: embeddings of images, kept by the digest of their pixels for whoever fetches them.

States and what ends them: docs/request_states.md, Encoder.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_core.check import require
from orchestrator.roles.engine_port import Encode, EncodeDone
from orchestrator.roles.messages import AssignImage, EmbeddingPiece, Holding, Image, ImageReady, Key, WantEmbedding
from orchestrator.roles.rules import Rules
from orchestrator.roles.settings import Settings
from orchestrator.roles.state_parts import checksum_of
from orchestrator.roles.worker import Worker


@dataclass(frozen=True)
class EncoderOptions:
    """Attributes:
    patches: in work at once, an idle encoder takes any image. kept: bytes of embeddings that are kept for others.
    """

    patches: int = 16_384
    kept: int = 1 << 30

    def __post_init__(self) -> None:
        require(self.patches > 0, "patches", self.patches, "1 or more")
        require(self.kept >= 0, "kept", self.kept, "0 or more")


@dataclass
class _Embedding:
    """Of one image: in work since `asked` until `payload` is there. `claims`: who wants it, their entry, since when."""

    image: Image
    asked: float
    payload: bytes = b""
    checksum: int = 0
    claims: dict[Key, tuple[str, float]] = field(default_factory=dict)


class Encoder(Worker):
    """Attributes:
    embeddings: by digest, least recently used first.
    """

    role = "encoder"

    def __init__(
        self,
        name: str,
        start: int = 1,
        options: EncoderOptions | None = None,
        settings: Settings | None = None,
        rules: Rules | None = None,
        *,
        node: str = "",
    ) -> None:
        super().__init__(name, start, settings, rules, node=node)
        self.options = options or EncoderOptions()
        self.embeddings: dict[str, _Embedding] = {}
        self._on |= {AssignImage: self._assign, EncodeDone: self._done, WantEmbedding: self._want}

    @property
    def held(self) -> frozenset[Key]:
        claims = [key for embedding in self.embeddings.values() for key in embedding.claims]
        return frozenset(claims) | frozenset(self._failures)

    def holdings(self) -> list[Holding]:
        entries = {key: entry for e in self.embeddings.values() for key, (entry, _) in e.claims.items()}
        return [Holding(*key, entry, 0) for key, entry in entries.items()]

    def room(self) -> tuple[float, float]:
        working = sum(e.image.patches for e in self.embeddings.values() if not e.payload)
        return self.options.patches - working, self.options.patches

    def _asked_since(self) -> float | None:
        return min((e.asked for e in self.embeddings.values() if not e.payload), default=None)

    def _assign(self, order: AssignImage, now: float) -> None:
        key, digest = (order.request, order.epoch), order.image.digest
        if self.other_life(order.incarnation) or self.buried(*key):
            return
        embedding = self.embeddings.pop(digest, None)
        if embedding is None and self.life != "active":
            self.tell_failure(*key, order.entry, f"{self.name} takes nothing new", now)
            return
        if embedding is None:
            embedding = _Embedding(order.image, now)
            self.do(Encode(order.image, order.entry))
        self.embeddings[digest] = embedding
        embedding.claims[key] = (order.entry, now)
        if embedding.payload:
            self._ready(key, digest)

    def _ready(self, key: Key, digest: str) -> None:
        self.send(self.settings.router, ImageReady(*key, digest, self.name, self.incarnation))

    def _done(self, message: EncodeDone, now: float) -> None:
        embedding = self.embeddings.get(message.digest)
        if embedding is None or embedding.payload:
            return
        self.changed = True
        if message.why or not message.payload:
            del self.embeddings[message.digest]
            for key, (entry, _) in embedding.claims.items():
                self.tell_failure(*key, entry, f"image {message.digest}: {message.why or 'no embedding'}", now)
            return
        embedding.payload, embedding.checksum = message.payload, checksum_of(message.payload)
        for key in embedding.claims:
            self._ready(key, message.digest)
        self._evict()

    def _want(self, message: WantEmbedding, now: float) -> None:
        if self.other_life(message.incarnation):
            return
        embedding = self.embeddings.get(message.digest)
        payload = b"" if embedding is None else embedding.payload
        checksum = 0 if embedding is None else embedding.checksum
        self.send(message.worker, EmbeddingPiece(message.request, message.epoch, message.digest, checksum, payload))

    def _evict(self) -> None:
        """Keep within the budget what nobody waits for; the least recently used go first."""
        idle = [(digest, e) for digest, e in self.embeddings.items() if e.payload and not e.claims]
        kept = sum(len(e.payload) for _, e in idle)
        for digest, embedding in idle:
            if kept <= self.options.kept:
                break
            kept -= len(embedding.payload)
            del self.embeddings[digest]

    def free(self, request: str, epoch: int) -> None:
        for embedding in self.embeddings.values():
            for key in [k for k in embedding.claims if k[0] == request and k[1] <= epoch]:
                del embedding.claims[key]
        self._evict()

    def _end_all(self, why: str, now: float) -> None:
        for embedding in self.embeddings.values():
            if not embedding.payload:
                for key, (entry, _) in embedding.claims.items():
                    self.tell_failure(*key, entry, why, now)
        self.embeddings.clear()  # who wants one that was ready is told so when it asks

    def _end_claims(self) -> None:
        """What is ready goes with the worker: most who claimed it have it, others ask in vain and go elsewhere."""
        for digest in [d for d, e in self.embeddings.items() if e.payload]:
            del self.embeddings[digest]

    def _beat(self, now: float) -> None:
        super()._beat(now)
        if self.draining and now >= self.grace_over:
            self._end_claims()
        for embedding in self.embeddings.values():
            for key, (_, since) in list(embedding.claims.items()):
                if now - since > self.settings.first_token:  # nobody has told that it ended: its entry is gone
                    del embedding.claims[key]
        self._evict()
