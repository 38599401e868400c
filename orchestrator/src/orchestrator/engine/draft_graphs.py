"""The end of an overlapped step: the next drafts of its requests, from CUDA graphs where there are some."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

import dspark_kernels
from orchestrator.engine.graphs import CudaGraph, Graph
from orchestrator.engine.readback import pack, unpack
from orchestrator.engine.sampler import Settings
from orchestrator.engine.slot_table import SlotTable
from orchestrator.engine.step_inputs import sizes
from orchestrator.model.cache import CachePools
from orchestrator.model.drafter import Drafter, Proposed

_log = logging.getLogger(__name__)


class Drafting:
    """Drafts for the requests of some slots, read from and put into a slot table.

    A confidence behind an end token, or behind a draft that is none, becomes 0: no such draft is worth a row.
    """

    def __init__(
        self, drafter: Drafter, table: SlotTable, cache: CachePools, depth: int, eos: torch.Tensor, highest: int
    ) -> None:  # fmt: skip
        """`eos` int64 [E] on the device; no request stands above position `highest`."""
        self.drafter, self.table, self.cache = drafter, table, cache
        self.depth, self.eos, self.highest = depth, eos, highest

    def __call__(self, slots: torch.Tensor, settings: Settings) -> Proposed:
        """`slots` int64 [R], `settings` a row each."""
        table = self.table
        anchors, starts = table.tokens.index_select(0, slots)[:, 0].contiguous(), table.starts.index_select(0, slots)
        block = self.drafter.block(anchors, starts, slots.int(), self.cache, self.highest)
        temperature, top_p, top_k, seeds, coupled = settings
        proposed = self.drafter.propose(block, temperature, top_p, top_k, seeds, coupled=coupled, length=self.depth)
        tokens = proposed.records.tokens
        ends = (tokens.unsqueeze(2) == self.eos).any(2) | (tokens < 0)
        confidence = proposed.confidence.masked_fill(ends.cumsum(1) > ends.int(), 0.0)
        table.put(slots, tokens.clamp(min=0), confidence)
        return proposed._replace(confidence=confidence)


@dataclass(frozen=True)
class _Recorded:
    graph: Graph
    like: list[torch.Tensor]
    buffer: torch.Tensor
    proposed: Proposed


class DraftGraphs:
    """`Drafting` recorded once for each number of requests. Results stay valid until the next call.

    Attributes:
        failed: a recording has failed; that was logged, and drafts are made eagerly from then on.
    """

    def __init__(self, drafting: Drafting, largest: int, new_graph: Callable[[], Graph] | None = None) -> None:
        """`largest` requests at most; `new_graph` makes an empty graph."""
        self._drafting, self._sizes = drafting, sizes(largest)
        self._device = drafting.table.tokens.device
        if new_graph is None:
            pool = torch.cuda.graph_pool_handle()
            new_graph = lambda: CudaGraph(pool)  # noqa: E731
        self._new_graph = new_graph
        self._recorded: dict[int, _Recorded] = {}
        self.failed = False

    @torch.inference_mode()
    def run(self, slots: torch.Tensor, settings: Settings) -> Proposed | None:
        """As `Drafting`, on tensors of the device, with rows of padding behind; None if it has to run eagerly."""
        size = None if self.failed else next((n for n in self._sizes if n >= len(slots)), None)
        recorded = None if size is None else self._recorded.get(size) or self._record(size)
        if size is None or recorded is None:
            return None
        recorded.buffer.copy_(pack(_padded(slots, settings, size)))
        recorded.graph.replay()
        return recorded.proposed

    def _record(self, size: int) -> _Recorded | None:
        drafting, device = self._drafting, self._device
        none = torch.zeros(0, dtype=torch.int64, device=device)
        nobody = Settings(none.float(), none.float(), none.int(), none, none.bool())
        like = _padded(none, nobody, size)
        buffer = pack(like)
        slots, *values = unpack(buffer, like)
        static = Settings(*values)
        config = drafting.drafter.config
        # Outside of the graphs' memory: the next step reads them after other graphs have run.
        kept = Proposed(
            dspark_kernels.new_proposals(size, drafting.depth, device),
            torch.zeros(size, config.dspark_block_size, config.vocab_size, device=device),
            torch.zeros(size, drafting.depth, device=device),
        )

        def run() -> torch.Tensor:
            proposed = drafting(slots, static)
            for to, value in zip(kept.records, proposed.records, strict=True):
                to.copy_(value)
            kept.logits.copy_(proposed.logits)
            return kept.confidence.copy_(proposed.confidence)

        graph = self._new_graph()
        try:
            graph.capture(run)
        except Exception as error:
            self.failed = True
            _log.warning(
                "recording the drafts of %d requests as a CUDA graph failed, so they are made without graphs: %s: %s",
                size, type(error).__name__, error,
            )  # fmt: skip
            return None
        self._recorded[size] = _Recorded(graph, like, buffer, kept)
        return self._recorded[size]


def _padded(slots: torch.Tensor, settings: Settings, size: int) -> list[torch.Tensor]:
    """Slots and settings of `size` requests; those that are none are greedy ones of slot 0."""
    more = size - len(slots)
    top_k = torch.zeros_like(slots, dtype=torch.int32) if settings.top_k is None else settings.top_k
    values = (slots, settings.temperature, settings.top_p, top_k, settings.seeds, settings.coupled)
    fillers = (0, 0.0, 1.0, 0, 0, False)
    return [pad(v, (0, more), value=f) for v, f in zip(values, fillers, strict=True)]
