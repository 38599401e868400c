"""The semantics of every op in plain PyTorch, float32.

On any device, and without reading a value back, so that it is also what a GPU runs as long as there are no kernels.
"""

from __future__ import annotations

import torch

from kernel_core.formats import decode_ue8m0


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension; unchanged without a weight."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def hc_coefficients(
    X: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float = 1e-20,
    hc_eps: float = 1e-6,
    iters: int = 20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T, n, _ = X.shape
    u = X.flatten(1)
    m = (u @ fn.T) * torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(T, n, n).softmax(-1) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    return pre, post, comb


def hc_mix(X: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor | None, eps: float = 1e-20) -> torch.Tensor:
    return rms_norm((pre.unsqueeze(-1) * X).sum(1), norm_weight, eps)


def hc_update(X: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    X.copy_(post.unsqueeze(-1) * y.unsqueeze(1) + torch.einsum("tij,tid->tjd", comb, X))


def hc_step(
    X: torch.Tensor,
    y: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor | None,
    *,
    eps: float = 1e-20,
    norm_eps: float = 1e-20,
    hc_eps: float = 1e-6,
    iters: int = 20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if y is not None:
        assert post is not None and comb is not None
        hc_update(X, y, post, comb)
    coefficients = hc_coefficients(X, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters)
    return hc_mix(X, pre_mix, norm_weight, eps), *coefficients


def engram_rows(
    mapped: torch.Tensor,
    dead: torch.Tensor,
    history: torch.Tensor,
    cu_seqlens: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad_mapped: int,
) -> torch.Tensor:
    T = len(mapped)
    starts, row = cu_seqlens.long(), torch.arange(len(mapped), device=mapped.device)
    request = torch.searchsorted(starts[1:], row, right=True)
    local = row - starts[request]
    ids = torch.where(dead, -1, mapped)
    rolling = mapped * multipliers[0]
    blocked = torch.zeros(T, dtype=torch.bool, device=mapped.device)
    heads = len(primes) // (len(multipliers) - 1)
    columns = []
    for s in range(1, len(multipliers)):
        from_history = history[request, (s - 1 - local).clamp(min=0)]
        seen = torch.where(local < s, from_history, ids[(row - s).clamp(min=0)])
        blocked = blocked | (seen < 0)
        rolling = rolling ^ (torch.where(blocked, pad_mapped, seen) * multipliers[s])
        bucket = slice((s - 1) * heads, s * heads)
        columns.append(torch.remainder(rolling.unsqueeze(1), primes[bucket]) + offsets[bucket])
    return torch.where(dead.unsqueeze(1), -1, torch.cat(columns, 1))


def engram_gather(table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    T, C = rows.shape
    groups = scale.shape[1]
    kept = rows.clamp(min=0)
    values = table.view(torch.uint8)[kept].view(torch.float8_e4m3fn).float()
    out = values.reshape(T, C, groups, 32) * decode_ue8m0(scale[kept]).unsqueeze(-1)
    out = torch.where((rows < 0).reshape(T, C, 1, 1), 0.0, out)
    return out.reshape(T, C * groups * 32)


def engram_inject(
    X: torch.Tensor, kv: torch.Tensor, qk_weight: torch.Tensor, dead: torch.Tensor | None, eps: float = 1e-20
) -> None:
    T, n, d = X.shape
    parts = kv.reshape(T, n + 1, d)
    key, value = parts[:, :n], parts[:, n:]
    dot = (X * qk_weight * key).sum(-1)
    dot = dot * torch.rsqrt(X.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * d**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    out = X + gate.unsqueeze(-1) * value
    X.copy_(out if dead is None else torch.where(dead.reshape(T, 1, 1), X, out))
