"""Decode steps that overlap: the host plans step N + 1 and starts its forward pass while the device still runs step N.

    device: F(N) S(N)             F(N+1)                 S(N+1)
    host:        plan, F(N+1) | wait for S(N), take its tokens, S(N+1) | plan, F(N+2) ...

F reads its input from the slot table, which S before it wrote, so nobody waits for the host. S needs what the host
makes of the tokens before it (masks of grammars), and is started while F runs. Prompts, parking and anything else out
of the ordinary empty the pipeline first and run as steps of their own. Rules: `orchestrator.engine.rules`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

import dspark_kernels
from orchestrator.engine.decode_rows import decode_rows
from orchestrator.engine.draft_graphs import DraftGraphs, Drafting
from orchestrator.engine.flight import IN_FLIGHT, Flight
from orchestrator.engine.graphs import Graph
from orchestrator.engine.launch import Launcher, Span
from orchestrator.engine.masks import Masks
from orchestrator.engine.ranges import named
from orchestrator.engine.readback import HostRing
from orchestrator.engine.row_graphs import RowGraphs
from orchestrator.engine.rules import Rules
from orchestrator.engine.sampler import Drafted, Rows, Settings
from orchestrator.engine.sequence import Sequence, State
from orchestrator.engine.slot_table import SlotTable
from orchestrator.engine.speculator import Batch, take_drafts
from orchestrator.engine.step_clock import StepClock
from orchestrator.engine.step_inputs import Inputs
from orchestrator.model.drafter import Proposed

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine


class Pipeline:
    """Overlapped decode steps of one engine.

    Attributes:
        flight: the step that was started last and not read yet, or None. behind: the one that is being started.
        flips: changes of weights to make before the next step is started; `weights` counts them.
        written: called after each step with (sequence, its blocks, tokens that have their cache rows there).
        starting: called with the step in flight before the one behind it is launched.
    """

    def __init__(self, engine: Engine, launcher: Launcher, rules: Rules | None = None) -> None:
        self.engine, self.launcher, self.rules = engine, launcher, rules or Rules()
        self.speculator = engine.speculator
        depth = 1 if self.speculator is None else self.speculator.depth
        device = engine.model.device
        self.table = SlotTable(engine.config.max_num_seqs + 1, depth, device)
        self.graphs: RowGraphs | None = None
        if device.type == "cuda" and engine.config.cuda_graphs:
            self.graphs = self.new_graphs()
        self.ring = HostRing(IN_FLIGHT + 1, pinned=device.type == "cuda", guarded=self.rules.guarded_buffers)
        self.clock = StepClock(alarm=self.rules.host_alarm)
        self.flight: Flight | None = None
        self.behind: Flight | None = None
        self.flips: list[Callable[[], None]] = []
        self.weights = 0
        self.spare_rows = 0  # padding rows of every step, as a graph of a larger size has
        self.written: Callable[[Sequence, list[int], int], None] = lambda sequence, blocks, tokens: None
        self.starting: Callable[[Flight], None] = lambda flight: None
        self.drafting: Drafting | None = None
        self.draft_graphs: DraftGraphs | None = None
        if self.speculator is not None:
            eos = torch.tensor(engine.sampler.eos, dtype=torch.int64, device=device)
            self.drafting = Drafting(self.speculator.drafter, self.table, engine.cache, depth, eos, self._highest)
            if self.graphs is not None:
                self.draft_graphs = DraftGraphs(self.drafting, engine.config.max_num_seqs)
        engine.model.reserve_positions(engine.context + 2 * engine.model.config.backtracking)

    def new_graphs(self, new_graph: Callable[[], Graph] | None = None) -> RowGraphs:
        """Graphs of this pipeline's forward passes; `new_graph` makes an empty one."""
        engine = self.engine
        return RowGraphs(
            self.table, engine.runner.forward, engine.model.ratios,
            largest=engine.config.max_num_seqs, context=engine.context, new_graph=new_graph,
        )  # fmt: skip

    def turn(self) -> bool:
        """Advance by one step; False, with nothing done, if the next step cannot overlap."""
        began = time.perf_counter()
        with named("plan"):
            planned = self._plan()
        if planned is None:
            return False
        with named(f"launch F {planned.number}"):
            self.behind = planned
            self._launch_forward(planned)
        if self.launcher.inline:  # raises where nothing could follow
            planned.finished()
        if not self.rules.sample_late:
            self._launch_sample(planned)
        with named(f"read {planned.number - 1}"):
            waited = self._finish_flight()
        if self.rules.sample_late:
            with named(f"launch S {planned.number}"):
                self._launch_sample(planned)
        if self.launcher.inline:
            planned.finished()
        self.flight, self.behind = planned, None
        inline = planned.seconds if self.launcher.inline else 0.0
        self.clock.host(time.perf_counter() - began - waited - inline)
        return True

    def drain(self) -> None:
        """Read the step in flight, so that the host knows all that the device does, and weights are as flipped."""
        self._finish_flight()
        for span in self._launch_flips():
            span.wait()
        self.clock.pause()

    def settle(self) -> None:
        """After an error: take what the steps in flight brought before it, and forget the rest. Flips are dropped.

        Tokens that a step has appended count even if its drafts failed: the step behind it may have begun from there.
        """
        launched = [flight for flight in (self.flight, self.behind) if flight is not None]
        self.flight = self.behind = None
        good = True
        for flight in launched:
            whole = flight.ended_well()  # waits for each: nothing runs any more when the caches are touched
            good = good and flight.appended
            if good and not whole:
                flight.drafting = False
                self.ring.fill(flight.place, flight.results)
            if good:
                self._take(flight)
            else:
                self.ring.release(flight.place)
        self.flips.clear()
        fence = self.engine.fence
        fence.done = fence.launched
        self.engine.scheduler.reclaim()
        self.clock.pause()

    def flip(self, change: Callable[[], None]) -> None:
        """Have `change` alter weights between two steps (rule H12): no step sees some of them old and some new."""
        if self.rules.flips_between:
            self.flips.append(change)
        else:
            change()

    # Plan

    def _plan(self) -> Flight | None:
        """The next step, or None if it has to run by itself. Only block tables may grow by it."""
        scheduler, flight = self.engine.scheduler, self.flight
        running = sorted(scheduler.running, key=lambda s: s.order)
        if not running or scheduler.prompts_can_run or any(s.recorder is not None or s.ends_in_image for s in running):
            return None
        behind = {} if flight is None else dict(zip(flight.sequences, flight.limits, strict=True))
        sequences, limits = [], []
        for sequence in running:
            known = len(sequence.tokens)
            least, most = (1, 1 + behind[sequence]) if sequence in behind else (0, 0)
            if known + least >= sequence.max_total:
                continue  # ends with the step in flight
            if not self.rules.optimistic_lengths:
                most = 0
            limit = self._limit(sequence, most, sequence in behind)
            if not scheduler.reserve(sequence, min(known + most + limit, sequence.max_total)):
                limit = 0
                if not scheduler.reserve(sequence, min(known + most, sequence.max_total)):
                    return None
            sequences.append(sequence)
            limits.append(limit)
        if not sequences:
            return None
        total = 0
        if self.speculator is not None and any(limits):
            # Without a step in flight the newest confidences are those of the drafts that this step verifies.
            stale = [(s.stale or []) if flight is None else s.confidence for s in sequences]
            room = self.engine.config.max_step_tokens - len(sequences)
            total = min(room, self.speculator.total(len(sequences), stale, limits))
        source = flight if flight is not None else None if self.speculator is None else self.speculator.last
        drafting = self.speculator is not None and self.speculator.drafts_now()
        number = self.engine.fence.launched + 1
        return Flight(number, sequences, limits, total, drafts_of=source, drafting=drafting)

    def _limit(self, sequence: Sequence, ahead: int, in_flight: bool) -> int:
        """Drafts that the request may verify: those that the step in flight makes, else those that the host knows."""
        if self.speculator is None:
            return 0
        if self.flight is not None:
            drafted = self.flight.drafting and in_flight
        else:
            drafted = bool(sequence.drafts) and sequence in self.speculator.last.rows
        return self.speculator.limit(sequence, ahead) if drafted else 0

    # Launch

    def _launch_forward(self, flight: Flight) -> None:
        engine, there = self.engine, self.engine.sampler.there
        self._launch_flips()
        sequences = flight.sequences
        if self.flight is None:
            self.launcher.launch(lambda: self.table.load(sequences, there))
        else:
            self.starting(self.flight)
        width = max(len(s.blocks) for s in sequences)
        flight.host = Inputs(
            slots=torch.tensor([s.slot for s in sequences], dtype=torch.int32),
            limits=torch.tensor(flight.limits, dtype=torch.int32),
            budget=torch.tensor([flight.total], dtype=torch.int32),
            lower=torch.tensor([s.decoder_lower for s in sequences], dtype=torch.int64),
            blocks=torch.tensor([s.blocks + [0] * (width - len(s.blocks)) for s in sequences], dtype=torch.int32),
        )
        flight.slots = there(flight.host.slots)
        flight.last = there(torch.tensor([s.max_total - 1 for s in sequences], dtype=torch.int64))
        flight.weights = self.weights
        flight.forward = self.launcher.launch(lambda: self._forward(flight), f"F {flight.number}")
        engine.forwards += 1
        engine.fence.launched = flight.number
        flight.place = self.ring.claim(flight.number)
        if not self.rules.publish_late:
            for sequence in sequences:
                self.written(sequence, sequence.blocks, len(sequence.tokens))

    def _launch_flips(self) -> list[Span]:
        """Weights change here, behind all steps that were started and before the next one."""
        flips, self.flips = self.flips, []
        self.weights += len(flips)
        return [self.launcher.launch(flip) for flip in flips]

    def _forward(self, flight: Flight) -> None:
        """F: rows by current confidences, the forward pass, context rows of the draft stages. On the device."""
        engine, host, there = self.engine, flight.host, self.engine.sampler.there
        assert host is not None
        graphs = self.graphs
        replayed = None if graphs is None else engine.runner.watched(lambda: graphs.run(host, flight.total))
        if replayed is not None:
            flight.schedule, flight.logits = replayed
            return
        capacity = len(flight.sequences) + flight.total + self.spare_rows
        flight.schedule = dspark_kernels.schedule(
            self.table.confidence, self.table.tokens, self.table.starts, there(host.limits), flight.total, capacity,
            slots=flight.slots,
        )  # fmt: skip
        batch = decode_rows(
            self.table, flight.schedule, flight.slots.long(), there(host.lower), there(host.blocks),
            engine.model.ratios, longest=1 + max(flight.limits), highest=self._highest, apart=self.rules.padding_apart,
        )  # fmt: skip
        flight.logits = engine.runner.forward(batch)

    @property
    def _highest(self) -> int:
        return self.engine.context - 1

    def _launch_sample(self, flight: Flight) -> None:
        sampler = self.engine.sampler
        shown = [s.drafts if n else [] for s, n in zip(flight.sequences, flight.limits, strict=True)]
        masks = sampler.masks(flight.sequences, shown)
        settings = sampler.settings(flight.sequences)
        if not self.rules.position_keyed:
            settings = settings._replace(seeds=settings.seeds + flight.number)
        source, where = flight.drafts_of, None
        if self.speculator is not None and source is not None:
            rows = source.rows
            where = sampler.there(torch.tensor([rows.get(s, 0) for s in flight.sequences], dtype=torch.int32))
        work = lambda: self._sample(flight, settings, masks, where)  # noqa: E731
        flight.sample = self.launcher.launch(work, f"S {flight.number}")

    def _sample(self, flight: Flight, settings: Settings, masks: Masks | None, where: torch.Tensor | None) -> None:
        """S: accept, append, draft, and start the copy to the host. On the device."""
        sampler, schedule = self.engine.sampler, flight.schedule
        assert schedule is not None and flight.logits is not None
        proposed = None if flight.drafts_of is None else flight.drafts_of.proposed
        drafted = None if proposed is None or where is None else Drafted(proposed.records, proposed.logits, where)
        row_of = schedule.row_of if drafted is not None else schedule.row_of[:, :1].contiguous()
        rows = Rows(schedule.cu_rows, schedule.positions, row_of)
        verdict = sampler.verify(flight.logits, flight.sequences, rows, drafted, masks, settings)
        slots = flight.slots.long()
        self.table.commit(slots, verdict.result, flight.last)
        flight.verdict, flight.logits, flight.drafts_of = verdict, None, None
        flight.results = [*verdict.tensors, schedule.lengths]
        flight.appended = True
        if not flight.drafting:
            if self.speculator is not None:
                self.speculator.drafter.join()
        else:
            flight.proposed = self._draft(flight, settings, slots)
            count = len(flight.sequences)
            flight.results += [flight.proposed.records.tokens[:count], flight.proposed.confidence[:count]]
        self.ring.fill(flight.place, flight.results)

    def _draft(self, flight: Flight, settings: Settings, slots: torch.Tensor) -> Proposed:
        assert self.drafting is not None
        replayed = None if self.draft_graphs is None else self.draft_graphs.run(slots, settings)
        return self.drafting(slots, settings) if replayed is None else replayed

    # Read

    def _finish_flight(self) -> float:
        """Take what the step in flight decided; returns the seconds that the host waited for it."""
        flight = self.flight
        if flight is None:
            return 0.0
        began = time.perf_counter()
        with named("wait"):
            flight.finished()
        waited = time.perf_counter() - began
        self.flight = None
        self._take(flight)
        return waited

    def _take(self, flight: Flight) -> None:
        """Note what a step that has ended decided."""
        assert flight.verdict is not None and flight.forward is not None and flight.sample is not None
        engine = self.engine
        host = self.ring.read(flight.place, flight.results)
        count = len(flight.verdict.tensors)
        samples = flight.verdict.read(host[:count])
        lengths = host[count].tolist()
        drafts, confidence = [], []
        if flight.drafting:
            drafts, confidence = host[count + 1].tolist(), host[count + 2].tolist()
        for row, sequence in enumerate(flight.sequences):
            dropped = self.rules.drop_aborted if sequence.aborted else self.rules.discard_after_end
            if sequence.state is not State.RUNNING and dropped:
                continue  # it ended, or was aborted, while this step was on its way
            blocks = list(sequence.blocks)  # fenced, if it ends now
            engine.take(sequence, lengths[row], samples[row])
            sequence.drafts = []
            if flight.drafting:
                take_drafts(sequence, drafts[row], confidence[row], engine.sampler.eos)
            if self.rules.publish_late:
                self.written(sequence, blocks, sequence.computed)
        self.ring.release(flight.place)
        engine.fence.done = flight.number
        engine.scheduler.reclaim()
        engine.stats.steps += 1
        if self.speculator is not None:
            self.speculator.last = Batch(flight.rows, flight.proposed) if flight.drafting else Batch()
            rows = len(flight.sequences) + sum(lengths)
            self.speculator.budget.note(len(lengths), rows, flight.forward.seconds, flight.sample.seconds)
        self.clock.device(flight.seconds, flight.sample.after(flight.forward))
