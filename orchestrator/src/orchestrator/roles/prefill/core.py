"""The prefill role: takes prompts by its room, computes them in steps, hands their state over.

States and what ends them: docs/request_states.md, Prefill.
"""

from __future__ import annotations

from orchestrator.balance.prefill.quota import Waiting, plan
from orchestrator.roles.engine_port import (
    Began,
    Begin,
    Drop,
    Dropped,
    Export,
    Exported,
    PrefillChunk,
    PrefillDone,
    RunPrefill,
    Withdraw,
)
from orchestrator.roles.messages import (
    AssignPrefill,
    EmbeddingPiece,
    Holding,
    Key,
    SourceAlive,
    Taken,
    TargetAlive,
    Want,
    WantEmbedding,
)
from orchestrator.roles.outgoing import Outgoing
from orchestrator.roles.prefill.job import Job, PrefillOptions
from orchestrator.roles.rules import Rules
from orchestrator.roles.settings import Settings
from orchestrator.roles.state_parts import checksum_of
from orchestrator.roles.worker import Worker

_IN_ENGINE = ("beginning", "computing", "exporting")


class Prefill(Worker):
    """Attributes:
    jobs: by request and epoch, in the order of arrival. seconds: of steps so far.
    """

    role = "prefill"

    def __init__(
        self,
        name: str,
        start: int = 1,
        options: PrefillOptions | None = None,
        settings: Settings | None = None,
        rules: Rules | None = None,
        *,
        node: str = "",
    ) -> None:
        self.options = options or PrefillOptions()
        super().__init__(name, start, settings, rules, node=node, ranks=self.options.ranks)
        self.jobs: dict[Key, Job] = {}
        self.seconds = 0.0
        self._dropping: set[Key] = set()  # that the engine still has to free
        self._running: RunPrefill | None = None
        self._on |= {
            AssignPrefill: self._assign,
            EmbeddingPiece: self._embedding,
            Began: self._began,
            PrefillDone: self._step_done,
            Exported: self._exported,
            Dropped: self._dropped,
            TargetAlive: self._target_alive,
            Want: self._want,
            Taken: self._taken,
        }

    @property
    def held(self) -> frozenset[Key]:
        return frozenset(self.jobs) | frozenset(self._failures)

    def holdings(self) -> list[Holding]:
        return [Holding(*key, job.order.entry, job.total) for key, job in self.jobs.items()]

    def room(self) -> tuple[float, float]:
        work = self.options.work
        if len(self.jobs) >= self.options.most or any(job.state == "short" for job in self.jobs.values()):
            return 0.0, work
        queued = sum(job.rest for job in self.jobs.values())
        return work - queued, work

    def _asked_since(self) -> float | None:
        asked = [job.since for job in self.jobs.values() if job.state in ("beginning", "exporting")]
        return min(asked if self._step_since is None else [self._step_since, *asked], default=None)

    # Work comes

    def _assign(self, order: AssignPrefill, now: float) -> None:
        key = (order.request, order.epoch)
        if self.other_life(order.incarnation) or key in self.jobs or self.buried(*key):
            return
        if self.life != "active":
            self.tell_failure(*key, order.entry, f"{self.name} takes nothing new", now)
            return
        self.supersede(order.request, order.epoch)
        job = self.jobs[key] = Job(order, now, self.options.cost)
        if order.embeddings:
            self._ask(job, now)
        else:
            self._begin(job, now)
        self._alive(job, now)

    def _ask(self, job: Job, now: float) -> None:
        job.sent = now
        for embedding in job.order.embeddings:
            if embedding.digest not in job.embeddings:
                self.send(
                    embedding.worker,
                    WantEmbedding(*job.key, embedding.digest, self.name, embedding.incarnation),
                )

    def _embedding(self, message: EmbeddingPiece, now: float) -> None:
        job = self.jobs.get((message.request, message.epoch))
        if job is None or job.state != "fetching":
            return
        if not message.payload:
            self._give_up(job, f"no embedding of image {message.digest}", now)
        elif not self.rules.check_parts or checksum_of(message.payload) == message.checksum:
            job.embeddings[message.digest] = message.payload
            if all(e.digest in job.embeddings for e in job.order.embeddings):
                self._begin(job, now)

    def _begin(self, job: Job, now: float) -> None:
        order = job.order
        job.state, job.since = "beginning", now
        job.rank = self._lightest_rank()
        self.do(Begin(*job.key, order.spec, order.output, order.side, tuple(sorted(job.embeddings.items()))))

    def _engine_is_used(self) -> bool:
        """Whether memory will come free that the engine has not now."""
        return bool(self._dropping) or any(job.state in ("computing", "exporting") for job in self.jobs.values())

    def _begin_short(self, now: float) -> None:
        """Memory may have come free: for the one that has waited longest first."""
        for job in self.jobs.values():
            if job.state == "short":
                self._begin(job, now)
                return

    def _lightest_rank(self) -> int:
        load = [0] * max(1, self.ranks)
        for job in self.jobs.values():
            if job.state in _IN_ENGINE and job.rank < len(load):
                load[job.rank] += job.total - job.computed
        return load.index(min(load))

    # Steps

    def _began(self, message: Began, now: float) -> None:
        job = self.jobs.get((message.request, message.epoch))
        if job is None or job.state != "beginning":
            return
        if message.why or not 0 <= message.computed < job.total:
            why = message.why or f"the engine found {message.computed} of {job.total} tokens"
            if message.why and message.retry and self._engine_is_used():
                job.state = "short"
                self.changed = True  # no room
            else:
                self._give_up(job, why, now, retry=message.retry)
            return
        job.state, job.computed, job.embeddings = "computing", message.computed, {}
        if message.ticket:
            job.ticket = message.ticket
            self._alive(job, now)
        self.changed = True
        self._begin_short(now)
        self._pump(now)

    def _pump(self, now: float) -> None:
        """Start a step if there is none."""
        if self._running is not None or self.life == "reforming":
            return
        queues: list[list[Waiting]] = [[] for _ in range(max(1, self.ranks))]
        jobs: dict[str, Job] = {}
        for job in self.jobs.values():
            if job.state == "computing":
                jobs[job.name] = job
                rank = job.rank if job.rank < len(queues) else 0
                queues[rank].append(Waiting(job.name, job.computed, job.total - job.computed))
        if not jobs:
            return
        _, steps = plan(self.options.cost, queues, self.options.quota)
        chunks = tuple(
            PrefillChunk(*jobs[name].key, rank, chunk.computed, chunk.tokens, chunk.final)
            for rank, step in enumerate(steps)
            for name, chunk in step
        )
        self._step += 1
        self._step_since = now
        self._running = RunPrefill(self._step, chunks)
        self.do(self._running)

    def _step_done(self, message: PrefillDone, now: float) -> None:
        run = self._running
        if run is None or message.step != run.step:
            return  # of a group that has ended
        self._running, self._step_since, self.plan = None, None, message.plan
        self.seconds += message.seconds
        failed = {(request, epoch): why for request, epoch, why in message.failed}
        ahead = {(request, epoch): tokens for request, epoch, tokens in message.ahead}
        for chunk in run.chunks:
            job = self.jobs.get((chunk.request, chunk.epoch))
            if job is None or job.state != "computing":
                continue
            if job.key in failed:
                self._give_up(job, failed[job.key], now)
                continue
            job.computed = chunk.start + chunk.count
            if not chunk.final:  # one token at least is left to ask for
                job.computed = max(job.computed, min(ahead.get(job.key, 0), job.total - 1))
            if chunk.final:
                job.state, job.since = "exporting", now
                self.do(Export(*job.key))
        self.changed = True  # room
        self._pump(now)

    # Hand-over

    def _exported(self, message: Exported, now: float) -> None:
        job = self.jobs.get((message.request, message.epoch))
        if job is None or job.state != "exporting":
            return
        if message.manifest is None:
            self._give_up(job, message.why or "the state could not be copied out", now)
            return
        order = job.order
        self._drop(job)
        job.state = "offering"
        job.outgoing = Outgoing(
            *job.key,
            self.name,
            self.incarnation,
            order.target,
            order.target_incarnation,
            message.manifest,
            message.parts,
            heard=job.heard,
        )
        self.do(job.outgoing.offer(now))
        if not self.rules.hold_until_taken:
            job.outgoing.parts = ()
        self.changed = True

    def _alive(self, job: Job, now: float) -> None:
        self.send(job.order.target, SourceAlive(*job.key, self.name, self.incarnation, job.ticket))

    def _heard(self, message: TargetAlive | Want | Taken) -> Job | None:
        """The job that a target's word is about, if it is that target's."""
        job = self.jobs.get((message.request, message.epoch))
        target = (message.target, message.target_incarnation)
        return job if job is not None and target == (job.order.target, job.order.target_incarnation) else None

    def _target_alive(self, message: TargetAlive, now: float) -> None:
        job = self._heard(message)
        if job is not None and message.ready:
            job.heard = now

    def _want(self, message: Want, now: float) -> None:
        job = self._heard(message)
        if job is None or job.outgoing is None or self.other_life(message.source_incarnation):
            return
        job.heard = now
        for send in job.outgoing.answer(message, now):
            self.do(send)

    def _taken(self, message: Taken, now: float) -> None:
        job = self._heard(message)
        if job is not None:  # a target that will not have it tells the entry itself
            self._remove(job)

    def _dropped(self, message: Dropped, now: float) -> None:
        """The engine's memory is free."""
        self._dropping.discard((message.request, message.epoch))
        self._begin_short(now)

    def _drop(self, job: Job) -> None:
        self._dropping.add(job.key)
        self.do(Drop(*job.key))

    # Ends

    def _remove(self, job: Job) -> None:
        if job.state in _IN_ENGINE:
            self._drop(job)
        if job.state in ("exporting", "offering"):
            self.do(Withdraw(*job.key))
        del self.jobs[job.key]
        self.changed = True

    def _give_up(self, job: Job, why: str, now: float, *, retry: bool = True) -> None:
        self._remove(job)
        self.tell_failure(*job.key, job.order.entry, why, now, retry=retry)

    def free(self, request: str, epoch: int) -> None:
        for job in [j for j in self.jobs.values() if j.order.request == request and j.order.epoch <= epoch]:
            self._remove(job)

    def _end_all(self, why: str, now: float) -> None:
        self._running = self._step_since = None
        self._dropping.clear()
        for job in list(self.jobs.values()):
            del self.jobs[job.key]
            self.tell_failure(*job.key, job.order.entry, why, now)

    def _beat(self, now: float) -> None:
        times = self.settings
        super()._beat(now)
        late = self.draining and now >= self.grace_over
        for job in list(self.jobs.values()):
            if late:
                self._give_up(job, f"{self.name} leaves", now)
            elif now - job.heard > times.transfer_lease:
                self._give_up(job, f"{job.order.target} is silent", now)
            elif job.outgoing is not None:
                self.do(job.outgoing.word(now))
            else:
                self._alive(job, now)
                if job.state == "fetching" and now - job.sent >= times.resend:
                    job.tries += 1
                    if job.tries > times.piece_tries:
                        self._give_up(job, "embeddings did not come", now)
                    else:
                        self._ask(job, now)
