"""The entrypoint: owns requests from their arrival to their one outcome, their epochs and the log of their tokens."""

from __future__ import annotations

from orchestrator.roles.core import Core
from orchestrator.roles.messages import (
    Accepted,
    ClientCancel,
    ClientRequest,
    Deliver,
    DeliverEnd,
    DeliverReady,
    Key,
    Landed,
    Lost,
    Outcome,
    Refused,
    Release,
    Released,
    Resume,
    Submit,
    Tokens,
    TokensAck,
    Unknown,
    Wanted,
    WorkFailed,
)
from orchestrator.roles.owned import Ended, Owned
from orchestrator.roles.rules import Rules
from orchestrator.roles.settings import Settings


class Entry(Core):
    """See docs/request_states.md, Entry.

    Attributes:
        live: requests without an outcome. received: all that came; those of `live` and `outcomes` together.
        outcomes: how many ended how. dropped: tokens and messages that were refused, by reason.
    """

    def __init__(self, name: str, settings: Settings | None = None, rules: Rules | None = None) -> None:
        super().__init__(name, settings, rules)
        self.live: dict[str, Owned] = {}
        self.received = 0
        self.outcomes: dict[Outcome, int] = {"finished": 0, "failed": 0, "cancelled": 0, "rejected": 0}
        self.dropped: dict[str, int] = {}
        self._ended: dict[str, Ended] = {}
        self._on = {
            ClientRequest: self._request,
            ClientCancel: self._cancel,
            Accepted: self._accepted,
            Refused: self._refused,
            Lost: self._lost,
            Unknown: self._unknown,
            Released: self._released,
            WorkFailed: self._work_failed,
            Tokens: self._tokens,
            Landed: self._landed,
        }

    @property
    def held(self) -> frozenset[Key]:
        return frozenset((r.request, r.epoch) for r in self.live.values())

    def _watching(self) -> bool:
        return bool(self.live or self._ended)

    # The client

    def _request(self, event: ClientRequest, now: float) -> None:
        if self.rules.know_retries and (event.request in self.live or event.request in self._ended):
            return
        self.received += 1
        owned = Owned(event.request, event.spec, began=now, progress=now)
        self.live[event.request] = owned
        self._submit(owned, now)

    def _cancel(self, event: ClientCancel, now: float) -> None:
        owned = self.live.get(event.request)
        if owned is not None:
            self._end(owned, "cancelled", "cancelled by the client", now, status=499)

    # The router

    def _submit(self, owned: Owned, now: float) -> None:
        owned.state, owned.sent = "submitted", now
        output = tuple(owned.log)
        if not self.rules.replay_whole_log:
            output = output[1:]
        self.send(
            self.settings.router,
            Submit(owned.request, owned.epoch, self.name, owned.spec, output, owned.accepted_by),
        )

    def _present(self, message: Accepted | Refused | Lost | Unknown, now: float) -> Owned | None:
        """The request that a word of the router is about, if the word is about its present epoch."""
        owned = self.live.get(message.request)
        if owned is None:
            self._tell_ended(self.settings.router, message.request, message.epoch, now)
            return None
        if message.epoch != owned.epoch or owned.state == "waiting":
            self._drop("of an earlier epoch")
            return None
        return owned

    def _accepted(self, message: Accepted, now: float) -> None:
        owned = self._present(message, now)
        if owned is not None:
            owned.accepted_by, owned.was_accepted = message.router_incarnation, True
            if owned.state == "submitted":
                owned.state = "accepted"

    def _refused(self, message: Refused, now: float) -> None:
        owned = self._present(message, now)
        if owned is None or owned.was_accepted:  # a repeated word of a router that has restarted
            return
        if not self.rules.tell_refusal:
            del self.live[owned.request]
            return
        self._end(owned, "rejected", message.why, now, status=message.status, retry_after=message.retry_after)

    def _lost(self, message: Lost, now: float) -> None:
        owned = self._present(message, now)
        if owned is None:
            return
        heard = owned.state == "streaming" and now - owned.heard <= 2 * self.settings.beat
        if heard and not message.certain:
            owned.doubted = True  # perhaps it is only the router that does not hear its worker
        else:
            self._next_epoch(owned, message.why, now)

    def _unknown(self, message: Unknown, now: float) -> None:
        owned = self._present(message, now)
        if owned is not None and owned.state != "streaming":
            self._submit(owned, now)

    def _released(self, message: Released, now: float) -> None:
        ended = self._ended.get(message.request)
        if ended is not None and message.epoch >= ended.epoch:
            ended.told = True

    # Workers

    def _work_failed(self, message: WorkFailed, now: float) -> None:
        owned = self.live.get(message.request)
        if owned is None:
            self._tell_ended(message.worker, message.request, message.epoch, now)
            return
        self.send(message.worker, Release(message.request, message.epoch, ended=False))
        if message.epoch != owned.epoch or owned.state == "waiting":
            return
        if owned.state == "streaming" and (owned.worker, owned.incarnation) != (message.worker, message.incarnation):
            return  # the source of a transfer that went well after all
        if message.retry:
            self._next_epoch(owned, message.why, now)
        else:
            self._end(owned, "failed", message.why, now, status=500)

    def _tokens(self, message: Tokens, now: float) -> None:
        owned = self.live.get(message.request)
        if owned is None:
            self._tell_ended(message.worker, message.request, message.epoch, now)
            return
        if self.rules.check_epoch and not self._is_bound(owned, message):
            return
        if not owned.worker:
            owned.worker, owned.incarnation, owned.state = message.worker, message.incarnation, "streaming"
        owned.heard, owned.doubted = now, False
        have, start = len(owned.log), 0
        if self.rules.dedup_by_index:
            if message.index > have:
                self._drop("ahead of the log")
                self._acknowledge(owned, now)
                return
            if message.index < have:
                start = have - message.index
                self._drop("delivered before", min(start, len(message.tokens)))
        self._deliver(owned, message, slice(start, start + owned.spec.max_tokens - have), now)
        if message.reason or len(owned.log) >= owned.spec.max_tokens:
            self._end(owned, "finished", message.reason or "length", now)
        elif now - owned.acked >= self.settings.beat / 2 or start >= len(message.tokens):
            self._acknowledge(owned, now)

    def _is_bound(self, owned: Owned, message: Tokens) -> bool:
        """Whether a word is of the present epoch and from its worker; if not, that one is told to free the request."""
        if message.epoch == owned.epoch and owned.state != "waiting":
            if not owned.worker or (owned.worker, owned.incarnation) == (message.worker, message.incarnation):
                return True
            self._drop("of a second worker")
        else:
            self._drop("of an earlier epoch")
        self.send(message.worker, Release(message.request, message.epoch, ended=False))
        return False

    def _deliver(self, owned: Owned, message: Tokens, new: slice, now: float) -> None:
        """Give the client those tokens of a message that it has not had."""
        tokens = message.tokens[new]
        if not owned.ready and (tokens or message.reason):
            owned.ready = True
            self.do(DeliverReady(owned.request, len(owned.spec.prompt), message.cached))
        if tokens:
            self.do(Deliver(owned.request, message.epoch, len(owned.log), tokens, message.notes[new]))
            owned.log.extend(tokens)
            owned.fails, owned.progress = 0, now

    def _acknowledge(self, owned: Owned, now: float) -> None:
        owned.acked = now
        self.send(owned.worker, TokensAck(owned.request, owned.epoch, len(owned.log)))

    def _landed(self, message: Landed, now: float) -> None:
        owned = self.live.get(message.request)
        if owned is None:
            self._tell_ended(message.worker, message.request, message.epoch, now)
            return
        here = (message.worker, message.incarnation)
        if owned.epoch != message.epoch or owned.state == "waiting":
            if owned.moved_from == message.epoch and (owned.worker, owned.incarnation) == here:
                self._resume(owned, message.incarnation)
            else:
                self.send(message.worker, Release(message.request, message.epoch, ended=False))
            return
        if tuple(owned.log) != message.output[: len(owned.log)]:
            # The source has gone on since: the copy is behind and of no use.
            self.send(message.worker, Release(message.request, message.epoch, ended=False))
            return
        if owned.worker:
            self.send(owned.worker, Release(owned.request, owned.epoch, ended=False))
        owned.moved_from, owned.epoch = owned.epoch, owned.epoch + 1
        owned.worker, owned.incarnation = here
        owned.state, owned.heard, owned.accepted_by = "streaming", now, 0
        self._resume(owned, message.incarnation)

    def _resume(self, owned: Owned, incarnation: int) -> None:
        self.send(owned.worker, Resume(owned.request, owned.moved_from, owned.epoch, incarnation, len(owned.log)))

    # Epochs and outcomes

    def _next_epoch(self, owned: Owned, why: str, now: float) -> None:
        """Nobody's word counts any more; go on under a higher epoch, after a pause if that failed before."""
        self.send(self.settings.router, Release(owned.request, owned.epoch, ended=False))
        if owned.worker:
            self.send(owned.worker, Release(owned.request, owned.epoch, ended=False))
        owned.epoch += 1
        owned.worker, owned.incarnation, owned.moved_from, owned.accepted_by = "", 0, 0, 0
        owned.doubted = False
        owned.fails += 1
        if owned.fails >= self.settings.attempts:
            self._end(owned, "failed", f"{owned.fails} attempts failed, the last one: {why}", now, status=500)
            return
        times = self.settings
        pause = 0.0 if owned.fails == 1 else min(times.backoff * 2 ** (owned.fails - 2), times.silence)
        owned.retry_at = now + pause
        if pause == 0.0:
            self._submit(owned, now)
        else:
            owned.state = "waiting"

    def _end(
        self, owned: Owned, outcome: Outcome, reason: str, now: float, *, status: int = 200, retry_after: int = 0
    ) -> None:
        del self.live[owned.request]
        self.outcomes[outcome] += 1
        self.do(DeliverEnd(owned.request, outcome, reason, len(owned.log), status, retry_after))
        silent = outcome == "cancelled" and not self.rules.forward_cancel
        self._ended[owned.request] = Ended(owned.epoch, len(owned.log), self.age, now, told=silent, silent=silent)
        if silent:
            return
        if owned.worker:
            self.send(owned.worker, Release(owned.request, owned.epoch, ended=True))
        self._release(owned.request, self._ended[owned.request])

    def _release(self, request: str, ended: Ended) -> None:
        self.send(self.settings.router, Release(request, ended.epoch, ended=True, output=ended.output, entry=self.name))

    def _tell_ended(self, to: str, request: str, epoch: int, now: float) -> None:
        """Answer a late word about a request that has ended, or that this entry never had."""
        self._drop("of an ended request")
        ended = self._ended.get(request)
        if ended is None or not ended.silent:
            self.send(to, Release(request, max(epoch, ended.epoch if ended else 0), ended=True))

    def _drop(self, why: str, count: int = 1) -> None:
        self.dropped[why] = self.dropped.get(why, 0) + count

    def _beat(self, now: float) -> None:
        times = self.settings
        for owned in list(self.live.values()):
            if now - owned.began > times.request:
                self._end(owned, "failed", f"not done within {times.request:g} s", now, status=504)
            elif owned.state == "streaming":
                if now - owned.heard > (2 * times.beat if owned.doubted else times.silence):
                    self._next_epoch(owned, f"{owned.worker} is silent", now)
            elif now - owned.progress > times.first_token:
                self._end(owned, "failed", f"no token within {times.first_token:g} s", now, status=503)
            elif owned.state == "submitted":
                if not owned.was_accepted and now - owned.began > times.admit:
                    self._end(owned, "failed", "the router does not answer", now, status=503, retry_after=5)
                elif now - owned.sent >= times.resend:
                    self._submit(owned, now)
            elif owned.state == "accepted":
                if now - owned.sent >= times.submit_lease / 4:
                    owned.sent = now
                    self.send(times.router, Wanted(owned.request, owned.epoch, self.name))
            elif now >= owned.retry_at:
                self._submit(owned, now)
        for request, ended in list(self._ended.items()):
            if self.age - ended.at > times.tombstone:
                del self._ended[request]
            elif not ended.told and now - ended.sent >= times.resend:
                ended.sent = now
                self._release(request, ended)
