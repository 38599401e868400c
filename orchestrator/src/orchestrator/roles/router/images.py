"""Images of waiting requests: which encoder takes each, and when all are ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.balance.vision import Encoders
from orchestrator.roles.messages import AssignImage, Embedding, ImageReady
from orchestrator.roles.router.records import Record

if TYPE_CHECKING:
    from orchestrator.roles.router.core import Router


class Images:
    """Attributes:
    encoding: requests that wait for embeddings.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._encoders = Encoders(router.policy.patches)
        self.encoding: set[str] = set()

    def see_encoder(self, name: str, *, active: bool) -> None:
        """One that is not active gets no new image; those that it has in work it finishes."""
        if active:
            self._encoders.add(name)
        else:
            self._encoders.remove(name)

    def missing(self, record: Record, now: float) -> bool:
        """Whether a request has to wait for embeddings; if so it is asked for them."""
        assert record.spec is not None
        for image in record.spec.images:
            record.embeddings.setdefault(image.digest, None)
        if all(record.embeddings.values()):
            return False
        record.state = "encoding"
        self.encoding.add(record.request)
        self._router.arrived_patches += sum(i.patches for i in record.spec.images)
        self._assign(record, now)
        return True

    def assign(self, now: float) -> None:
        """Have images encoded that found no encoder with room, and ask again for those that do not come."""
        for request in sorted(self.encoding):
            record = self._router.records[request]
            self._assign(record, now, again=now - record.sent >= self._router.settings.resend)

    def _assign(self, record: Record, now: float, *, again: bool = False) -> None:
        assert record.spec is not None
        asked: set[str] = set()
        for image in record.spec.images:
            if record.embeddings[image.digest] is not None or image.digest in asked:
                continue
            asked.add(image.digest)
            name = record.encoders.get(image.digest)
            if name is None:
                name = self._encoders.assign(image.patches)
            elif not again:
                continue
            view = None if name is None else self._router.fleet.views.get(name)
            if name is None or view is None:
                continue
            record.encoders[image.digest], record.sent = name, now
            self._router.send(
                name, AssignImage(record.request, record.epoch, view.report.incarnation, record.entry, image)
            )

    def ready(self, message: ImageReady, now: float) -> None:
        record = self._router.records.get(message.request)
        here = self._router.fleet.at((message.worker, message.incarnation))
        if record is None or here is None or record.epoch != message.epoch or record.state != "encoding":
            return
        if message.digest not in record.embeddings or record.encoders.get(message.digest) != message.worker:
            return
        self._done(record, message.digest)
        record.embeddings[message.digest] = Embedding(message.digest, message.worker, message.incarnation)
        if all(record.embeddings.values()):
            self.encoding.discard(record.request)
            self._router.waiting.push(record, now, front=record.epoch > 1)
            self._router.placing.dispatch(now)

    def _done(self, record: Record, digest: str) -> None:
        """An image is not in work any more."""
        assert record.spec is not None
        if record.embeddings.get(digest) is None and digest in record.encoders:
            patches = next(i.patches for i in record.spec.images if i.digest == digest)
            self._encoders.done(record.encoders[digest], patches)

    def forget(self, record: Record) -> None:
        """A request does not wait any more."""
        for digest in record.encoders:
            self._done(record, digest)
        record.encoders.clear()
        self.encoding.discard(record.request)

    def drop_encoder(self, name: str, now: float) -> None:
        """Its images go to others: those in work, and those that are ready there and still needed."""
        self._encoders.remove(name)
        for record in self._router.records.values():
            lost = [digest for digest, who in record.encoders.items() if who == name]
            if not lost or record.state not in ("encoding", "queued"):
                continue
            if record.state == "queued":
                self._router.waiting.remove(record)
            for digest in lost:
                del record.encoders[digest]
                record.embeddings[digest] = None
            self.missing(record, now)

    def backlog(self) -> int:
        """Patches that wait or are in work."""
        total = 0
        for request in self.encoding:
            record = self._router.records[request]
            assert record.spec is not None
            total += sum(i.patches for i in record.spec.images if record.embeddings.get(i.digest) is None)
        return total
