"""The confidence head: a dot product, calibrated, and its product along the block."""

from __future__ import annotations

import pytest
import torch

import kernel_core
from dspark_kernels import confidence_head, survival
from kernel_core.testing import assert_bitwise, assert_close, assert_row_invariant, each_isa


def make(B=6, G=5, H=96, M=17, seed=0):
    g = torch.Generator().manual_seed(seed)
    block = torch.randn(B, G + 2, H, generator=g)
    return block[:, :G], torch.randn(B, G, M, generator=g), torch.randn(H + M, generator=g) / 8, torch.rand(G) + 0.5


@each_isa()
def test_formula(isa):
    with kernel_core.limit_isa(isa):
        for B, G, H, M in ((0, 5, 8, 4), (1, 1, 1, 1), (6, 5, 96, 17), (3, 8, 5120, 256)):
            hidden, markov, weight, temperatures = make(B, G, H, M)
            for given in (temperatures, None):
                logits, confidence, alive = confidence_head(hidden, markov, weight, given)
                exact = torch.cat([hidden, markov], 2).double() @ weight.double()
                assert_close(logits, exact.float(), atol=1e-4, rtol=1e-4)
                scaled = logits / (1.0 if given is None else given)
                assert_close(confidence, scaled.sigmoid(), atol=1e-6, rtol=1e-6)
                assert_bitwise(alive, survival(confidence))
                assert_close(alive, confidence.cumprod(1), atol=1e-6, rtol=1e-6)


def test_backends_agree():
    arguments = make()
    native = confidence_head(*arguments)
    for backend in ("reference", "library"):
        with kernel_core.using(backend):
            other = confidence_head(*arguments)
        for a, b in zip(native, other, strict=True):
            assert_close(a, b, atol=1e-5, rtol=1e-5)
    for a, b in zip(native, torch.ops.dspark_kernels.confidence_head(*arguments), strict=True):
        assert_bitwise(a, b)


def test_a_row_alone():
    hidden, markov, weight, temperatures = make(B=9)
    assert_row_invariant(lambda h, m: confidence_head(h, m, weight, temperatures), hidden.contiguous(), markov)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_extremes(backend):
    """Clamped far out, so that both ends stay inside (0, 1]; a NaN row has no chance and spoils no other."""
    hidden = torch.tensor([[[1e30], [-1e30]], [[torch.nan], [0.0]]])
    with kernel_core.using(backend):
        logits, confidence, alive = confidence_head(hidden, torch.zeros(2, 2, 1), torch.ones(2))
    assert confidence[0, 0] == 1 and 0 < confidence[0, 1] < 1e-25
    assert confidence[1].tolist() == [0.0, 0.5] and alive[1].tolist() == [0.0, 0.0]
    assert bool(logits[1, 0].isnan())


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("hidden", 0, torch.zeros(6, 9, 96)),
        ("hidden", 0, torch.zeros(6, 96, 5).transpose(1, 2)),
        ("markov", 1, torch.zeros(6, 4, 17)),
        ("weight", 2, torch.zeros(112)),
        ("temperatures", 3, torch.ones(4)),
        ("temperatures", 3, torch.zeros(5)),
        ("temperatures", 3, torch.full((5,), torch.nan)),
    ],
)
def test_bad_arguments(name, at, value):
    arguments = list(make())
    arguments[at] = value
    with pytest.raises(ValueError, match=f"{name}: got .* allowed"):
        confidence_head(*arguments)
