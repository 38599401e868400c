"""The service as a discrete-event simulation: prefill engines, network cards, a decode group.

Time passes in prefill steps and decode steps. Every decision is taken by the policies that serve, from `balance`: which
engine takes a prompt, what goes into a step, which side reads a prefix, which decode rank takes a request, who is
refused.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from kernel_core.check import require
from orchestrator.balance.admission import Limits, Overloaded, check_load
from orchestrator.balance.decode import two_dimensional
from orchestrator.balance.decode.placement import Choose
from orchestrator.balance.paths import PathSettings, choose_side
from orchestrator.balance.prefill import PrefillCost, Quota
from orchestrator.simulate.figures import published as p
from orchestrator.simulate.figures.decode_pool import DecodePool
from orchestrator.simulate.figures.jobs import At, Job, Record
from orchestrator.simulate.figures.links import Link
from orchestrator.simulate.figures.prefill_group import PrefillGroup
from orchestrator.simulate.figures.prefill_rules import PrefillRule
from orchestrator.simulate.figures.workload import Arrivals


@dataclass(frozen=True)
class Cluster:
    """Attributes:
    engines, ranks: prefill engines and the GPUs of each. decode: GPUs of the decode group.
    quota, ahead, late: of a prefill step; seconds of work a rank that an engine asks for beyond its step; whether
        prompts are bound to a rank by their first chunk.
    long: seconds of a prompt from which it goes to the engine that has most such ones, and others to engines that have
        none, where one queue is common to all.
    limits: of admission; None lets everybody in.
    round: seconds between two sizings of the bins.
    balanced: decode steps as if all ranks were alike.
    nic: bytes a second of a host's network card, one for the store and one between hosts.
    gain: tokens by which the decode side's queue has to be shorter before it reads a prefix.
    expected: output tokens that decode plans room for.
    """

    engines: int = 16
    ranks: int = 4
    decode: int = 64
    prefill: PrefillCost = p.PREFILL
    quota: Quota = field(default_factory=Quota)
    ahead: float = 0.3
    late: bool = True
    long: float = float("inf")
    step: p.DecodeCost = p.DECODE
    choose: Callable[[], Choose] = lambda: two_dimensional
    limits: Limits | None = None
    round: float = 2.0
    balanced: bool = False
    nic: float = p.NIC.value
    gain: int = 65_536
    expected: float = 440.0

    def __post_init__(self) -> None:
        for name in ("engines", "ranks", "decode"):
            require(getattr(self, name) > 0, name, getattr(self, name), "1 or more")

    @property
    def gpus(self) -> int:
        return self.engines * self.ranks


def serve(arrivals: Arrivals, cluster: Cluster, rule: PrefillRule) -> Record:
    """Run until every request that was let in is done."""
    return _Service(arrivals, cluster, rule).run()


class _Service:
    def __init__(self, arrivals: Arrivals, cluster: Cluster, rule: PrefillRule) -> None:
        self.arrivals, self.cluster, self.rule = arrivals, cluster, rule
        self.record = Record.empty(len(arrivals))
        self.groups = [
            PrefillGroup(i, cluster.ranks, cluster.prefill, cluster.quota, cluster.ahead, cluster.late)
            for i in range(cluster.engines)
        ]
        room = int(p.POOL.value / p.TOKEN_BYTES.value)
        self.decode = DecodePool(
            cluster.decode, cluster.step, cluster.choose(), room, cluster.expected, cluster.balanced
        )
        self._stepping = False  # of the decode group: a step is in flight
        hosts = max(1, cluster.gpus // int(p.NODE_GPUS.value))
        peers = max(1, cluster.decode // int(p.NODE_GPUS.value))
        self.store = [Link(cluster.nic) for _ in range(hosts)]
        self.out = [Link(cluster.nic) for _ in range(hosts)]
        self.peers = [Link(cluster.nic) for _ in range(peers)]
        slow = int(3 * cluster.nic / p.TOKEN_BYTES.value)
        self.paths = PathSettings(busy=1 << 62, slow=slow, gain=cluster.gain)
        self.backlog = 0.0  # seconds of prefill that were let in and not computed
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._tie = count()
        self._live = 0
        self._come = 0

    def run(self) -> Record:
        if not len(self.arrivals):
            return self.record
        self._at(float(self.arrivals.times[0]), self._arrive, 0)
        self._at(self.cluster.round, self._round)
        while self._events:
            now, _, call, args = heapq.heappop(self._events)
            call(now, *args)
        names = {"store": self.store, "between hosts": self.out, "decode side": self.peers}
        self.record.link_use = {name: max(link.busy for link in links) for name, links in names.items()}
        return self.record

    def _at(self, when: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (when, next(self._tie), call, args))

    def _arrive(self, now: float, number: int) -> None:
        self._come = number + 1
        if self._come < len(self.arrivals):
            self._at(float(self.arrivals.times[self._come]), self._arrive, self._come)
        self.record.times[number, At.ARRIVED] = now
        length, hit = int(self.arrivals.tokens[number]), int(self.arrivals.hits[number])
        job = Job.of(number, length, hit, self.cluster.prefill)
        limits = self.cluster.limits
        if limits is not None:
            try:
                fetch = p.STORE_LATENCY.value + hit * p.TOKEN_BYTES.value / self.cluster.nic
                check_load(self.backlog, self.cluster.gpus, fetch, job.cost, self.rule.waiting(), limits)
            except Overloaded:
                self.record.refused[number] = True
                return
        self._live += 1
        self.backlog += job.cost
        self._at(now + p.MATCH.value, self._queue, job)

    def _queue(self, now: float, job: Job) -> None:
        self.record.times[job.number, At.QUEUED] = now
        target = self.rule.put(job, now)
        if target is None:
            self._dispatch(now)
            return
        engine, job.rank = target
        job.order = now
        self._give(now, job, self.groups[engine])

    def _dispatch(self, now: float) -> None:
        """Answer open requests for work: engines that are through first, of the prompt's own kind first."""
        asking = sorted((g for g in self.groups if g.want > 0), key=lambda g: (g.end, -g.want))
        if self.cluster.long < float("inf"):
            self._pack(now, asking)
            return
        for own in (True, False):
            for group in asking:
                while group.want > 0 and (job := self.rule.pull(group.number, now, own)) is not None:
                    self._give(now, job, group)

    def _pack(self, now: float, asking: list[PrefillGroup]) -> None:
        """The same, with long prompts in few engines, so that the steps of the others stay short."""
        long = {g.number: g.longer(self.cluster.long) for g in asking}
        while asking and (job := self.rule.pull(asking[0].number, now, False)) is not None:
            if job.cost >= self.cluster.long:
                group = max(asking, key=lambda g: (long[g.number] if long[g.number] < g.ranks else -1, -g.end))
                long[group.number] += 1
            else:
                group = min(asking, key=lambda g: (long[g.number] > 0, g.end, -g.want))
            self._give(now, job, group)
            asking = [g for g in asking if g.want > 0]

    def _give(self, now: float, job: Job, group: PrefillGroup) -> None:
        """The prefix is read, by the side whose card has less to do, and handed to the device as layers need it."""
        times = self.record.times[job.number]
        times[At.PULLED] = times[At.FETCHED] = times[At.READY] = job.ready = now
        if job.hit:
            host = group.number * self.cluster.ranks // int(p.NODE_GPUS.value) % len(self.store)
            peer = job.number % len(self.peers)
            size = job.hit * p.TOKEN_BYTES.value
            own, other = self.store[host], self.peers[peer]
            side = choose_side(own.waiting(now), other.waiting(now), self.paths)
            fetched = p.STORE_LATENCY.value + (own if side == "prefill" else other).send(now, size, job.hit)
            if side == "decode":  # from its host's memory to the prefill device, between hosts
                self.record.reads_by_decode += 1
                fetched += size / self.cluster.nic
            times[At.FETCHED] = fetched
            times[At.READY] = job.ready = fetched + size / 4 / p.SWAP.value  # one of four sources
        group.take(job)
        if not group.running:
            self._at(job.ready, self._begin, group)

    def _begin(self, now: float, group: PrefillGroup) -> None:
        if group.running:
            return
        step = group.begin(now)
        if step is None:
            self._dispatch(now)
            return
        seconds, work = step
        self.record.steps.append((now, seconds, work, group.ranks))
        for job, _ in group.chunks:
            if not job.started:
                job.started = True
                self.record.times[job.number, At.STARTED] = now
        self._at(now + seconds, self._end, group)
        self._dispatch(now)

    def _end(self, now: float, group: PrefillGroup) -> None:
        for _, chunk in group.chunks:
            self.backlog -= self.cluster.prefill.chunk(chunk)
            self.record.computed += chunk.tokens
        host = group.number * self.cluster.ranks // int(p.NODE_GPUS.value) % len(self.out)
        for job in group.finish():
            self.rule.done(job, group.number)
            self.record.times[job.number, At.PREFILLED] = now
            size = job.length * p.TOKEN_BYTES.value + p.WINDOW_BYTES.value
            self._at(self.out[host].send(now, size), self._moved, job)
        self._begin(now, group)
        if not group.running and (ready := group.next_ready()) < float("inf"):
            self._at(max(now, ready), self._begin, group)

    def _moved(self, now: float, job: Job) -> None:
        self.record.times[job.number, At.MOVED] = now
        self.decode.put(job.number, job.length, int(self.arrivals.outputs[job.number]))
        if not self._stepping:
            self._turn(now)

    def _turn(self, now: float) -> None:
        started = self.decode.begin()
        self._stepping = started is not None
        if started is None:
            return
        seconds, alike, fresh = started
        self.record.turns.append((now, seconds, alike, int(self.decode.sequences.sum())))
        self._at(now + seconds, self._turned, fresh)

    def _turned(self, now: float, fresh: list[int]) -> None:
        self.record.times[fresh, At.FIRST] = now
        for number, output in self.decode.finish():
            self.record.times[number, At.DONE] = now
            self.record.outputs[number] = output
            self._live -= 1
        self._turn(now)

    def _round(self, now: float) -> None:
        self.rule.round(now, self.cluster.round)
        self._dispatch(now)
        if self._live or self._come < len(self.arrivals):
            self._at(now + self.cluster.round, self._round)
