"""Inputs of ranks on a GPU, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ep_comm import Shape, reference


class Problem:
    """What all ranks dispatch, from one seed, on the host and on the device."""

    def __init__(self, shape: Shape, tokens: Sequence[int], seed: int, device="cuda", kind="random",
                 dtype=torch.float32) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        self.shape, self.tokens = shape, list(tokens)
        self.x = [(3 * torch.randn(t, shape.hidden, generator=g)).to(dtype) for t in tokens]
        sizes = [(t, shape.top_k) for t in tokens]
        self.ids = [torch.randint(-1, shape.physical_experts, s, generator=g, dtype=torch.int32) for s in sizes]
        for i in self.ids:
            if kind == "none":
                i.fill_(-1)
            elif kind == "one":
                i[:, 1:] = -1
                i[:, 0] = shape.physical_experts - 1
        self.weights = [torch.rand(*s, generator=g) for s in sizes]
        self.on_device = [[t.to(device) for t in ts] for ts in (self.x, self.ids, self.weights)]
        self._generator = g

    def results(self, dispatched, slots: bool, dtype=torch.float32) -> list[torch.Tensor]:
        """Random results, NaN where nobody may read."""
        made = []
        for d in dispatched:
            rows = d.ids.shape[0]
            lead = (rows, self.shape.top_k) if slots else (rows,)
            y = torch.randn(*lead, self.shape.hidden, generator=self._generator).to(dtype)
            y[d.ids.cpu() < 0 if slots else d.sources.cpu() < 0] = float("nan")
            made.append(y)
        return made

    def expected(self, fixed: bool):
        return reference.dispatch(self.shape, self.x, self.ids, self.weights, fixed=fixed)

    def check_rows(self, rank: int, d, e) -> None:
        assert torch.equal(d.counts.cpu(), e.counts), rank
        assert torch.equal(d.sources.cpu(), e.sources), rank
        assert torch.equal(d.ids.cpu(), e.ids), rank
        used = e.sources >= 0
        assert torch.equal(d.x.cpu().view(torch.uint8)[used], e.x.view(torch.uint8)[used]), rank
        assert torch.equal(d.weights.cpu()[e.ids >= 0], e.weights[e.ids >= 0]), rank
        if e.scales is not None:
            assert torch.equal(d.scales.cpu()[used], e.scales[used]), rank

    def check_sums(self, ys, expected_rows, outs) -> None:
        for out, e in zip(outs, reference.combine(self.shape, ys, expected_rows, self.ids), strict=True):
            assert torch.equal(out.cpu(), e)


@pytest.fixture
def problem():
    return Problem
