"""The public ops with tensors on an NVIDIA GPU: PyTorch's operators, the CPU's results, no waiting for the device."""

from __future__ import annotations

import pytest
import torch

import dspark_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_sampling():
    rows, vocab = 12, 4096
    logits = torch.randn(rows, vocab) * 3
    temperature, top_p = torch.tensor([0.0, 0.7, 1.3] * 4), torch.tensor([1.0, 0.9, 0.5, 1.0] * 3)
    top_k, seeds = torch.tensor([0, 40, 3] * 4, dtype=torch.int32), torch.arange(rows) * 7
    masks, some = torch.randint(-(2**31), 2**31, (3, vocab // 32)).int(), torch.tensor([2, 5, 11])
    device = [t.cuda() for t in (logits, temperature, top_p, top_k, seeds, masks, some)]
    dspark_kernels.apply_token_mask(logits, masks, some)
    tokens, logprobs = dspark_kernels.sample(logits, temperature, top_p, top_k, seeds, seeds)
    ids, best = dspark_kernels.top_logprobs(logits, 5)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = device[0]
        dspark_kernels.apply_token_mask(there, device[5], device[6])
        sampled = dspark_kernels.sample(there, *device[1:4], device[4], device[4])
        top = dspark_kernels.top_logprobs(there, 5)
        numbers = dspark_kernels.uniform(device[4], device[4], 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.cpu().equal(logits)
    assert sampled[0].cpu().equal(tokens) and top[0].cpu().equal(ids)
    assert torch.allclose(sampled[1].cpu(), logprobs, atol=1e-5) and torch.allclose(top[1].cpu(), best, atol=1e-5)
    assert numbers.cpu().equal(dspark_kernels.uniform(seeds, seeds, 3))
