"""Stream mixing: the plain version against that of mhc_engram, the Triton kernel against the plain one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from mhc_engram import reference
from orchestrator.train import sinkhorn
from orchestrator.train.sinkhorn import _plain
from orchestrator.train.streams import Hyper, Streams

HAS_TRITON = importlib.util.find_spec("triton") is not None
EPS = 1e-6


def logits(rows: int, n: int = 4, spread: float = 1.5) -> torch.Tensor:
    return spread * torch.randn(rows, n, n, generator=torch.Generator().manual_seed(rows))


def by_reference(one: torch.Tensor, iterations: int) -> torch.Tensor:
    """[n, n]: without projection the logits are the base."""
    n = one.shape[0]
    base = torch.cat((torch.zeros(2 * n), one.flatten()))
    x, fn = torch.ones(1, n, 8), torch.zeros((2 + n) * n, n * 8)
    return reference.hc_coefficients(x, fn, base, torch.ones(3), hc_eps=EPS, iters=iterations)[2][0]


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_plain_is_the_reference(iterations):
    x = logits(16)
    expected = torch.stack([by_reference(one, iterations) for one in x])
    assert (sinkhorn.sinkhorn(x, iterations, EPS) - expected).abs().max() < 1e-6
    assert torch.equal(sinkhorn.sinkhorn(x, iterations, EPS), _plain(x, iterations, EPS))


def test_rows_and_columns_sum_to_one():
    c = _plain(logits(200, spread=0.7), 20, EPS)
    assert (c > 0).all()
    assert (c.sum(-1) - 1).abs().max() < 1e-3 and (c.sum(-2) - 1).abs().max() < 1e-5
    assert (_plain(logits(200, spread=0.7), 1, EPS).sum(-1) - 1).abs().max() > 0.1


def test_halves_in_turn_are_those_of_the_reference():
    """Three half-layers through `Streams` and mhc_engram's step; a gradient reaches every coefficient."""
    n, d, tokens = 4, 16, 10
    generator = torch.Generator().manual_seed(1)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).requires_grad_()

    coefficients = (2 + n) * n
    halves = [
        (Hyper(draw(coefficients, n * d, scale=0.1), draw(coefficients), draw(3)), draw(d), draw(d, d, scale=0.2))
        for _ in range(3)
    ]
    embedded = torch.randn(tokens, d, generator=generator)
    streams = Streams(embedded, n, 1e-20, EPS, 20)
    x, pre = embedded[:, None].repeat(1, n, 1), torch.eye(n)[0].repeat(tokens, 1)
    y = post = comb = None
    for hyper, norm, weight in halves:
        entered = streams.enter(hyper, norm, torch.float32)
        with torch.no_grad():
            mixed, pre, post, comb = reference.hc_step(
                x, y, post, comb, hyper.fn, hyper.base, hyper.scale, pre, norm, hc_eps=EPS
            )
            y = mixed @ weight
        assert (entered - mixed).abs().max() < 2e-5
        streams.leave(entered @ weight)
    with torch.no_grad():
        reference.hc_update(x, y, post, comb)
    assert (streams.collapse() - (pre[..., None] * x).sum(1)).abs().max() < 2e-5
    streams.collapse().square().sum().backward()
    for hyper, norm, weight in halves:
        for value in (hyper.fn, hyper.base, hyper.scale, norm, weight):
            assert value.grad.isfinite().all() and value.grad.any()


def interpreted() -> dict[str, float]:
    """Largest errors of the kernel's result and gradient; needs TRITON_INTERPRET=1 from before the import of Triton."""
    errors = {}
    for rows, n, iterations in ((70, 4, 20), (64, 4, 1), (3, 2, 5)):  # 70: more than one program, the last not full
        x = logits(rows, n).requires_grad_()
        expected = _plain(x, iterations, EPS)
        upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
        (wanted,) = torch.autograd.grad(expected, x, upstream)
        result, sums = sinkhorn.run_forward(x.detach(), iterations, EPS)
        got = sinkhorn.run_backward(result, sums, upstream, iterations, EPS)
        errors[f"result of {rows} x {n}, {iterations}"] = float((result - expected).abs().max())
        errors[f"gradient of {rows} x {n}, {iterations}"] = float((got - wanted).abs().max())
    return errors


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed, so its kernels cannot be interpreted")
def test_kernels_interpreted():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    errors = json.loads(run.stdout)
    assert len(errors) == 6
    assert {name: e for name, e in errors.items() if not e < 1e-5} == {}


if __name__ == "__main__":
    print(json.dumps(interpreted()))
