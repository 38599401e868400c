"""Counts of steps that run on a GPU: read back behind each step, waited for when it is filed."""

from __future__ import annotations

import numpy as np
import torch

from kernel_core.check import require
from orchestrator.cluster.counts import KINDS, Statistics, StepCount, StepCounts


class _OnItsWay:
    """A step whose counts are on the way to the host; asking for one waits."""

    def __init__(self, routed: torch.Tensor, received: torch.Tensor, reads: bool, top_k: int) -> None:
        self._tensors, self._reads, self._top_k = (routed, received), reads, top_k
        self._copied = torch.cuda.Event() if routed.is_pinned() else None
        if self._copied is not None:
            self._copied.record()
        self._whole: StepCount | None = None

    def _step(self) -> StepCount:
        if self._whole is None:
            if self._copied is not None:
                self._copied.synchronize()
            routed, received = (t.numpy().astype(np.int64) for t in self._tensors)
            odd = np.flatnonzero(routed.sum(1) % self._top_k)[:4].tolist()
            require(not odd, "routed", f"layers {odd} that sum to {routed[odd].sum(1).tolist()}", "rows x top_k")
            kinds = np.zeros((len(KINDS), *routed.shape), np.int64)
            kinds[KINDS.index("prefill" if self._reads else "decode")] = routed
            self._whole = StepCount(kinds, received)
        return self._whole

    @property
    def routed(self) -> np.ndarray:
        return self._step().routed

    @property
    def received(self) -> np.ndarray:
        return self._step().received

    @property
    def kinds(self) -> int:
        return self._step().kinds


class GpuStepCounts(StepCounts):
    """`StepCounts` whose layers count on the device (`orchestrator.model.expert_parallel.gpu_layer.DeviceCounts`).

    A step counts as one of prompts only if every request of this rank reads one: rows are not told apart.
    """

    def __init__(
        self,
        layers: int,
        num_experts: int,
        top_k: int,
        window: int,
        statistics: Statistics = "all",
        *,
        device: torch.device,
    ) -> None:
        super().__init__(layers, num_experts, top_k, window, statistics)
        self.on_device = _OnDevice(layers, num_experts, device)

    def ended(self) -> None:
        """Behind a step on its stream: have its counts copied, and begin anew."""
        counts, pinned = self.on_device, self.on_device.routed.is_cuda
        routed, received = (
            torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned).copy_(t, non_blocking=True)
            for t in (counts.routed, counts.received)
        )
        counts.routed.zero_()
        counts.received.zero_()
        reads = len(self._prompts) > 0 and bool(self._prompts.all())
        self._waiting.append(_OnItsWay(routed, received, reads, self._top_k))
        self._ended += 1


class _OnDevice:
    def __init__(self, layers: int, num_experts: int, device: torch.device) -> None:
        self.routed = torch.zeros(layers, num_experts, dtype=torch.int32, device=device)
        self.received = torch.zeros(layers, dtype=torch.int64, device=device)
