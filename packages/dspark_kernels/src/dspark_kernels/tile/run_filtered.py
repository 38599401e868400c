"""The TileLang programs with filters on tensors of an NVIDIA GPU. Needs tilelang and nvcc."""

from __future__ import annotations

import torch

from dspark_kernels.ops import uniform
from dspark_kernels.reference import GREEDY_BELOW
from dspark_kernels.reference_verify import ACCEPT, DRAFT, RESIDUAL, TARGET, order_keys
from dspark_kernels.results import Proposals
from dspark_kernels.tile.run import compiled
from kernel_core.check import require

_LOW32 = 0xFFFFFFFF
_SIGN = 0x80000000
_ALL = 2**31 - 1


def row_settings(
    temperature: torch.Tensor, top_p: torch.Tensor | None, top_k: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """factor, top_p, top_k of rows as `cut_program` takes them: a greedy row has factor 1 and keeps one token."""
    greedy = temperature < GREEDY_BELOW
    factor = torch.where(greedy, 1.0, 1.0 / torch.where(greedy, 1.0, temperature))
    share = torch.ones_like(temperature) if top_p is None else torch.where(greedy, 1.0, top_p)
    most = torch.zeros_like(temperature, dtype=torch.int32) if top_k is None else top_k
    return factor, share, torch.where(greedy, 1, most).int()


def draws(seeds: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N] and [N, 2]: the tests of drafts, and the draws of tokens behind accepted and rejected ones."""
    u = {case: uniform(seeds, at, case).float() for case in (TARGET, ACCEPT, RESIDUAL)}
    return u[ACCEPT], torch.stack([u[TARGET], u[RESIDUAL]], dim=1)


def unpack_cut(cut: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """value float32 and last int32 of the `cut` of `Proposals`; -inf and 2^31 - 1 where all is kept."""
    high, low = cut >> 32 & _LOW32, cut & _LOW32
    bits = torch.where(high >= _SIGN, high ^ _SIGN, ~high & _LOW32)
    value = torch.where(bits >= _SIGN, bits - 2**32, bits).int().view(torch.float32)
    every = cut == 0
    return torch.where(every, -torch.inf, value), torch.where(every, _ALL, _LOW32 - low).int()


def pack_cut(value: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The `cut` of `Proposals` that keeps the same tokens: int64 of value float32 and last int32."""
    key = order_keys(value.unsqueeze(-1)).squeeze(-1)  # of token 0
    return torch.where(value == -torch.inf, 0, key - last.long())


def _cuts(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor | None, top_k: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """factor, row_top, row_mass, value, last of rows."""
    from dspark_kernels.tile.verify import pieces

    N, V = logits.shape
    require(N * V < 2**31, "logits", f"{N} rows of {V}", "fewer than 2^31 numbers: indices have 32 bits")
    factor, share, most = row_settings(temperature, top_p, top_k)
    top, plain, warm = (torch.empty(N, pieces(V), device=logits.device) for _ in range(3))
    value, row_top, row_mass = (torch.empty(N, device=logits.device) for _ in range(3))
    last = torch.empty(N, dtype=torch.int32, device=logits.device)
    compiled("stats_program", N, V)(logits, factor, top, plain, warm)
    compiled("cut_program", N, V)(logits, factor, share, most, top, warm, value, last, row_top, row_mass)
    return factor, row_top, row_mass, value, last


def verify(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    proposals: Proposals,
    cu_rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    owner: torch.Tensor,
    *,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [R, 1 + G] and accepted int32 [R] as `dspark_kernels.verify` gives them, with its filters and greedy
    requests; every row has a distribution, and none is coupled.

    owner int32 [N] as in `Schedule`. draft_logits is contiguous. Draws are rounded to float32: a token may differ where
    one lies within 6e-8 of a boundary.
    """
    (N, V), R = logits.shape, cu_rows.shape[0] - 1
    S, G = proposals.tokens.shape
    require(draft_logits.is_contiguous() and draft_logits.shape == (S, G, V), "draft_logits", list(draft_logits.shape),
            f"contiguous [{S}, {G}, {V}]")  # fmt: skip
    rows = owner.long().clamp(min=0)
    columns = _cuts(logits, temperature[rows], *(None if t is None else t[rows] for t in (top_p, top_k)))
    accept, pair = draws(seeds[rows], positions + 1)
    accepted = torch.empty(R, dtype=torch.int32, device=logits.device)
    end = torch.empty(R, dtype=torch.int64, device=logits.device)
    compiled("decide_filtered", R, G, N, V, S)(
        logits, *columns, cu_rows, slots, proposals.tokens, proposals.logprobs, accept, accepted
    )
    compiled("token_filtered", R, G, N, V, S)(
        logits, draft_logits, *columns, proposals.top, proposals.factor, proposals.mass.float(),
        *unpack_cut(proposals.cut), cu_rows, slots, accepted, pair, end,
    )  # fmt: skip
    places, count = torch.arange(1 + G, device=logits.device), accepted.unsqueeze(1)
    drafts = torch.cat([proposals.tokens[slots.long().clamp(min=0)], end.unsqueeze(1)], dim=1)
    return torch.where(places < count, drafts, torch.where(places == count, end.unsqueeze(1), -1)), accepted


def draft_step(
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: Proposals,
) -> torch.Tensor:
    """`dspark_kernels.draft_step` for rows that have a distribution, none coupled; PyTorch adds the bias and copies the
    rows of column k together."""
    B, _, V = logits.shape
    if bias is not None:
        logits[:, k] += bias
    rows = logits[:, k].contiguous()
    factor, top, mass, value, last = columns = _cuts(rows, temperature, top_p, top_k)
    u = uniform(seeds, positions + 1 + k, DRAFT).float().unsqueeze(1).expand(B, 2).contiguous()
    cu_rows = torch.arange(B + 1, dtype=torch.int32, device=logits.device)
    none = torch.zeros(B, dtype=torch.int32, device=logits.device)
    empty = torch.zeros(1, 1, device=logits.device)
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    # a row alone, behind no draft: a draw from its distribution
    compiled("token_filtered", B, 1, B, V, 1)(
        rows, rows[:1].unsqueeze(0), *columns, empty, empty, empty, empty, none[:1].unsqueeze(0), cu_rows, none, none,
        u, tokens,
    )  # fmt: skip
    chosen = rows.gather(1, tokens.unsqueeze(1)).squeeze(1)
    record = (tokens, (chosen - top) * factor - mass.log(), top, factor, mass, pack_cut(value, last))
    for column, number in zip(out, record, strict=True):
        column[:, k] = number.to(column.dtype)
    return tokens
