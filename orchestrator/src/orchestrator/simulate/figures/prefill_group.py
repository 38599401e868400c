"""A prefill engine: ranks that step together, each with prompts of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_core.check import require
from orchestrator.balance.prefill import Chunk, PrefillCost, Quota, Waiting, plan
from orchestrator.simulate.figures.jobs import Job


@dataclass
class PrefillGroup:
    """Steps are planned by `balance.prefill.plan`.

    Attributes:
        late: a prompt is bound to a rank by its first chunk, since hosts share what they fetched; else when it comes.
        ahead: seconds of work a rank that it asks for beyond the step in flight.
        end: of the step in flight; -inf where there is none.
        want: seconds of work, over all ranks, that it asks for; above 0 it has an open request at the router.
    """

    number: int
    ranks: int
    cost: PrefillCost
    quota: Quota
    ahead: float
    late: bool = True
    end: float = float("-inf")
    want: float = 0.0
    running: bool = False
    _bound: list[list[Job]] = field(default_factory=list)
    _loose: list[Job] = field(default_factory=list)
    _step: list[tuple[Job, Chunk]] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(self.ranks > 0, "ranks", self.ranks, "1 or more")
        require(self.ahead > 0, "ahead", self.ahead, "above 0, seconds")
        self._bound = [[] for _ in range(self.ranks)]
        self._ask()

    def take(self, job: Job) -> None:
        """A prompt that the router gives it; `job.rank` is -1 for any rank."""
        if job.rank < 0 and not self.late:
            job.rank = min(range(self.ranks), key=lambda r: sum(j.cost for j in self._bound[r]))
        if job.rank < 0:
            self._loose.append(job)
            self.want -= min(job.cost, self.ahead)
        else:
            self._bound[job.rank].append(job)
            self._ask()

    def begin(self, now: float) -> tuple[float, float] | None:
        """Start a step: its seconds, and the ranks' own work in it in sum; None if nothing is ready."""
        queues = [[job for job in bound if job.ready <= now] for bound in self._bound]
        loads = [sum(job.cost for job in queue) for queue in queues]
        later: list[Job] = []
        for job in sorted(self._loose, key=lambda j: j.order):
            rank = min(range(self.ranks), key=loads.__getitem__)
            if job.ready > now or loads[rank] >= self.quota.most:
                later.append(job)
                continue
            queues[rank].append(job)
            loads[rank] += job.cost
        if not any(queues):
            return None
        jobs = {str(job.number): job for queue in queues for job in queue}
        waiting = [[Waiting(str(j.number), j.computed, j.remaining) for j in queue] for queue in queues]
        _, steps = plan(self.cost, waiting, self.quota)
        self._step = [(jobs[name], chunk) for step in steps for name, chunk in step]
        for rank, step in enumerate(steps):
            for name, _ in step:
                if jobs[name].rank < 0:
                    jobs[name].rank = rank
                    self._bound[rank].append(jobs[name])
        self._loose = later + [job for job in jobs.values() if job.rank < 0]
        work = [sum(self.cost.chunk(chunk) for _, chunk in step) for step in steps]
        seconds = self.cost.launch + max(work)
        self.running, self.end = True, now + seconds
        self._ask()
        return seconds, sum(work)

    @property
    def chunks(self) -> list[tuple[Job, Chunk]]:
        """Of the step in flight."""
        return self._step

    def finish(self) -> list[Job]:
        """End the step; prompts that are through."""
        through = []
        for job, chunk in self._step:
            job.advance(chunk, self.cost)
            if not job.remaining:
                self._bound[job.rank].remove(job)
                through.append(job)
        self._step, self.running, self.end = [], False, float("-inf")
        self._ask()
        return through

    def longer(self, seconds: float) -> int:
        """Prompts of `seconds` and more that are left of them."""
        return sum(job.cost >= seconds for queue in (*self._bound, self._loose) for job in queue)

    def next_ready(self) -> float:
        """When the first of its prompts can start; infinity without prompts."""
        return min((j.ready for queue in (*self._bound, self._loose) for j in queue), default=float("inf"))

    def _ask(self) -> None:
        flying = {job.number: self.cost.chunk(chunk) for job, chunk in self._step}
        left = [sum(j.cost - flying.get(j.number, 0.0) for j in bound) for bound in self._bound]
        loose = sum(min(j.cost, self.ahead) for j in self._loose)  # a long one keeps one rank busy, not all
        self.want = sum(max(0.0, self.ahead - x) for x in left) - loose
