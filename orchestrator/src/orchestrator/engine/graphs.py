"""Decode steps from CUDA graphs: recorded once for each shape, then replayed on static buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from orchestrator.engine.decode_batch import Shape, decode_shape, empty_batch, padded_batch, same_layout
from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.transfer import packed, tensors_of, views_of
from orchestrator.model.transformer import Transformer

WARM_UPS = 2  # the first run of a library call may allocate, which a recording must not
_log = logging.getLogger(__name__)


class Graph(Protocol):
    """A recorded run of a function on fixed memory."""

    def capture(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record `function`; the tensor that it returns is what `replay` fills."""

    def replay(self) -> None: ...


class CudaGraph:
    """A graph of the current GPU. Graphs of one `pool` share memory, so only one of them may be in flight."""

    def __init__(self, pool: Any, warm_ups: int = WARM_UPS) -> None:
        self._graph, self._pool, self._warm_ups = torch.cuda.CUDAGraph(), pool, warm_ups

    def capture(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self._warm_ups):
                function()
        torch.cuda.current_stream().wait_stream(side)
        # Other threads may go on using the GPU while this one records.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        self._graph.replay()


@dataclass(frozen=True)
class _Recorded:
    graph: Graph
    layout: list[torch.Tensor]  # tensors of the batch that it was recorded with
    buffer: torch.Tensor  # where the recorded run reads its batch
    logits: torch.Tensor


class DecodeGraphs:
    """Graphs of one engine, made when a shape first comes up.

    Attributes:
        failed: a recording has failed; that was logged, and all steps run eagerly from then on.
        warm_ups: runs before a recording.
    """

    def __init__(
        self,
        model: Transformer,
        cache: CachePools,
        *,
        largest: int,
        context: int,
        new_graph: Callable[[], Graph] | None = None,
        forward: Callable[[StepBatch], torch.Tensor] | None = None,
    ) -> None:
        """`largest` requests at most and `context` tokens at most; `new_graph` makes an empty graph.

        `forward` is what is recorded; None takes the model's own over `cache`.
        """
        self.model, self.cache, self.largest, self.context = model, cache, largest, context
        self.warm_ups = WARM_UPS
        if new_graph is None:
            pool = torch.cuda.graph_pool_handle()
            new_graph = lambda: CudaGraph(pool, self.warm_ups)  # noqa: E731
        self._new_graph = new_graph
        self._forward = forward or (lambda batch: model.forward(batch, cache))
        self._recorded: dict[Shape, _Recorded] = {}
        self.failed = False
        model.reserve_positions(context)  # tables must not move once a graph reads them

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Logits float32 [len(chunks), vocab], valid until the next call; None if the step has to run eagerly."""
        shape = None if self.failed else decode_shape(chunks, self.largest, self.context)
        if shape is None:
            return None
        recorded = self._recorded.get(shape) or self._record(shape)
        if recorded is None:
            return None
        tensors = tensors_of(padded_batch(chunks, shape, self.model.ratios))
        if not same_layout(tensors, recorded.layout):
            raise RuntimeError(f"a decode step of shape {tuple(shape)} is laid out unlike the one that was recorded")
        recorded.buffer.copy_(packed(tensors, self.model.device), non_blocking=True)
        recorded.graph.replay()
        return recorded.logits[: len(chunks)]

    def forget(self, warm_ups: int) -> None:
        """Drop all recordings: what they read has moved."""
        self._recorded.clear()
        self.warm_ups = warm_ups

    def _record(self, shape: Shape) -> _Recorded | None:
        batch = empty_batch(shape, self.model.ratios)
        tensors = tensors_of(batch)
        buffer = packed(tensors, self.model.device).to(self.model.device)
        static = views_of(batch, buffer)
        graph = self._new_graph()
        try:
            logits = graph.capture(lambda: self._forward(static))
        except Exception as error:
            self.failed = True
            _log.warning(
                "recording a decode step of %d rows as a CUDA graph failed, so steps run without graphs: %s: %s",
                shape.size, type(error).__name__, error,
            )  # fmt: skip
            return None
        self._recorded[shape] = _Recorded(graph, tensors, buffer, logits)
        return self._recorded[shape]
