"""Forward passes of overlapped steps from CUDA graphs: from slots and limits to logits, recorded once a shape.

All that differs between two steps of a shape is in one static buffer and in the slot table. Rows beyond those that the
step needs, and requests beyond those that it has, are padding (rule H11).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

import dspark_kernels
from orchestrator.engine.decode_rows import decode_rows
from orchestrator.engine.graphs import WARM_UPS, CudaGraph, Graph
from orchestrator.engine.readback import pack, unpack
from orchestrator.engine.slot_table import SlotTable
from orchestrator.engine.step_inputs import Inputs, sizes
from orchestrator.model.batch import StepBatch
from orchestrator.model.config import BLOCK_TOKENS

_NARROWEST, _WIDER = 4, 4  # blocks of the narrowest table; how many times wider the next one is
_PADDING = {"slots": -1, "limits": -1, "lower": 0, "blocks": 0}
_log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """Requests, rows and blocks in a row of the block table."""

    requests: int
    rows: int
    width: int


@dataclass(frozen=True)
class _Recorded:
    graph: Graph
    like: Inputs
    buffer: torch.Tensor
    schedule: dspark_kernels.Schedule
    logits: torch.Tensor


class RowGraphs:
    """Graphs of one pipeline.

    Attributes:
        rows: sizes that there are graphs for; a step takes the next larger one.
        failed: a recording has failed; that was logged, and all steps run eagerly from then on.
        warm_ups: runs before a recording.
    """

    def __init__(
        self,
        table: SlotTable,
        forward: Callable[[StepBatch], torch.Tensor],
        ratios: tuple[int, ...],
        *,
        largest: int,
        context: int,
        new_graph: Callable[[], Graph] | None = None,
    ) -> None:
        """`largest` requests at most and `context` tokens at most."""
        self._table, self._forward, self._ratios, self._context = table, forward, ratios, context
        self._depth = table.confidence.shape[1]
        self._device = table.tokens.device
        self.requests, self.rows = sizes(largest), sizes(largest * (1 + self._depth))
        self.warm_ups = WARM_UPS
        if new_graph is None:
            pool = torch.cuda.graph_pool_handle()
            new_graph = lambda: CudaGraph(pool, self.warm_ups)  # noqa: E731
        self._new_graph = new_graph
        self._recorded: dict[Shape, _Recorded] = {}
        self.failed = False

    @torch.inference_mode()
    def run(self, inputs: Inputs, total: int) -> tuple[dspark_kernels.Schedule, torch.Tensor] | None:
        """Schedule (of the step's own requests) and logits float32 [rows, vocab], valid until the next call.

        `inputs` on the host; None if the step has to run eagerly.
        """
        count = inputs.slots.shape[0]
        shape = None if self.failed else self._shape(count, count + total, inputs.blocks.shape[1])
        recorded = None if shape is None else self._recorded.get(shape) or self._record(shape)
        if shape is None or recorded is None:
            return None
        host = pack(padded(inputs, shape))
        if self._device.type == "cuda":
            host = host.pin_memory()
        recorded.buffer.copy_(host, non_blocking=True)
        recorded.graph.replay()
        schedule = recorded.schedule
        own = schedule._replace(
            lengths=schedule.lengths[:count], cu_rows=schedule.cu_rows[: count + 1], row_of=schedule.row_of[:count]
        )
        return own, recorded.logits

    def _shape(self, requests: int, rows: int, width: int) -> Shape | None:
        if requests > self.requests[-1] or rows > self.rows[-1]:
            return None
        wide = _NARROWEST
        while wide < width:
            wide *= _WIDER
        most = -(-self._context // BLOCK_TOKENS)
        return Shape(
            next(n for n in self.requests if n >= requests),
            next(n for n in self.rows if n >= rows),
            max(width, min(wide, most)),
        )

    def forget(self, warm_ups: int) -> None:
        """Drop all recordings: what they read has moved."""
        self._recorded.clear()
        self.warm_ups = warm_ups

    def _record(self, shape: Shape) -> _Recorded | None:
        none = torch.zeros(0, dtype=torch.int32)
        nobody = Inputs(none, none, torch.zeros(1, dtype=torch.int32), none.long(), none.view(0, 1))
        like = padded(nobody, shape)
        buffer = pack(like).to(self._device)
        static = Inputs(*unpack(buffer, like))
        schedule = dspark_kernels.new_schedule(shape.requests, self._depth, shape.rows, self._device)

        def run() -> torch.Tensor:
            dspark_kernels.schedule(
                self._table.confidence, self._table.tokens, self._table.starts, static.limits, static.budget,
                shape.rows, slots=static.slots, out=schedule,
            )  # fmt: skip
            batch = decode_rows(
                self._table, schedule, static.slots.clamp(min=0).long(), static.lower, static.blocks, self._ratios,
                longest=1 + self._depth, highest=self._context - 1, exact=False,
            )  # fmt: skip
            return self._forward(batch)

        graph = self._new_graph()
        try:
            logits = graph.capture(run)
        except Exception as error:
            self.failed = True
            _log.warning(
                "recording a step of %d rows as a CUDA graph failed, so steps run without graphs: %s: %s",
                shape.rows, type(error).__name__, error,
            )  # fmt: skip
            return None
        self._recorded[shape] = _Recorded(graph, like, buffer, schedule, logits)
        return self._recorded[shape]


def padded(inputs: Inputs, shape: Shape) -> Inputs:
    """The step in exactly that shape, with requests that are none behind its own."""
    missing = shape.requests - inputs.slots.shape[0]
    made = {
        name: pad(getattr(inputs, name), (0, missing), value=_PADDING[name]) for name in ("slots", "limits", "lower")
    }
    blocks = pad(inputs.blocks, (0, shape.width - inputs.blocks.shape[1], 0, missing))
    return Inputs(made["slots"], made["limits"], inputs.budget, made["lower"], blocks)
