"""The feed-forward half: router and fused experts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

import mega_moe
from orchestrator.model.batch import Rows
from orchestrator.model.config import ModelConfig
from orchestrator.model.dense import DenseMode, dense
from orchestrator.model.record import StepRecorder
from orchestrator.model.weights import Experts, Layer

if TYPE_CHECKING:
    from orchestrator.model.expert_parallel.gpu_layer import GpuExperts
    from orchestrator.model.expert_parallel.layer import ParallelExperts


def _without_tensors(experts: Experts) -> Experts:
    """The same with no rows, so that the memory is free."""
    nothing = {f.name: getattr(experts, f.name).new_empty(0) for f in dataclasses.fields(experts)}
    return dataclasses.replace(experts, **nothing)


class Moe:
    """`top_k` routed experts and the shared one, of one layer.

    Attributes:
        parallel: the experts over several ranks, which then computes in place of this rank's own; else None.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Layer, mode: DenseMode, top_k: int) -> None:
        self.layer, self.top_k = layer, top_k
        self.limit, self.routed_scale = config.swiglu_limit, config.routed_scaling_factor
        self.gate = dense(weights.gate, mode)
        self.bias, self.bias_vl = weights.gate_bias, weights.gate_bias_vl
        if weights.packed is None:
            e = weights.experts
            mega_moe.advise_huge_pages(e.w13, e.w2)  # nothing for small models
            self.shared = mega_moe.SharedExpert(e.shared_w13, e.shared_s13, e.shared_w2, e.shared_s2)
            weights.packed = mega_moe.pack_for(e.w13.device, e.w13, e.s13, e.w2, e.s2, self.shared)
            if weights.packed is not None:  # a second copy would halve what fits; nobody else reads the stored one
                del self.shared
                weights.experts = _without_tensors(e)
        self.packed, self.experts = weights.packed, weights.experts
        self.parallel: ParallelExperts | GpuExperts | None = None

    def __call__(
        self, x: torch.Tensor, is_image: torch.Tensor | None, rows: Rows, recorder: StepRecorder | None
    ) -> torch.Tensor:
        """float32 [T, hidden] -> float32 [T, hidden]; `is_image` bool [T] picks the selection bias of image spans."""
        ids, weights = mega_moe.route(
            self.gate(x),
            self.bias,
            self.top_k,
            bias_vl=None if is_image is None else self.bias_vl,
            is_image=is_image,
            routed_scale=self.routed_scale,
        )
        if recorder is not None:
            recorder.add(f"experts/{self.layer}", ids, rows.positions, rows.owner)
        if self.parallel is not None:
            return self.parallel(x, ids, weights, rows.padding, rows.owner)
        if self.packed is not None:
            return mega_moe.packed_experts(x, ids, weights, self.packed, limit=self.limit)
        e = self.experts
        return mega_moe.fused_experts(x, ids, weights, e.w13, e.s13, e.w2, e.s2, limit=self.limit, shared=self.shared)
