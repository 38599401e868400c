"""The TileLang programs on tensors of an NVIDIA GPU, compiled once for each set of sizes. Needs tilelang and nvcc."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from dspark_kernels.ops import uniform
from dspark_kernels.reference_verify import ACCEPT, RESIDUAL, TARGET
from dspark_kernels.results import Proposals, Schedule, new_schedule
from dspark_kernels.tile.lower import cuda_target
from kernel_core.check import require


@cache
def compiled(program: str, *sizes: int) -> Any:
    import tilelang

    from dspark_kernels.tile import cut, filtered
    from dspark_kernels.tile import schedule as schedules
    from dspark_kernels.tile import verify as verifications

    programs: dict[str, Callable[..., Any]] = {
        "schedule_program": schedules.schedule_program,
        "stats_program": verifications.stats_program,
        "decide_program": verifications.decide_program,
        "token_program": verifications.token_program,
        "cut_program": cut.cut_program,
        "decide_filtered": filtered.decide_program,
        "token_filtered": filtered.token_program,
    }
    made = programs[program](*sizes)
    major = torch.cuda.get_device_capability()[0]
    target = cuda_target("sm90" if major == 9 else "sm100")
    with target:
        return tilelang.compile(made, target=target)


def schedule(
    confidence: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    limits: torch.Tensor,
    budget: torch.Tensor,
    capacity: int,
    *,
    slots: torch.Tensor,
    fixed: torch.Tensor,
    out: Schedule | None = None,
) -> Schedule:
    """`dspark_kernels.schedule` with a device budget, slots and fixed lengths (-1 for none).

    The host's list is written on the device and copied, which a kernel of ours does in one go.
    """
    (S, G), R = confidence.shape, limits.shape[0]
    result = new_schedule(R, G, capacity, confidence.device) if out is None else out
    there = torch.empty_like(result.host, device=confidence.device, pin_memory=False)
    threads = 1024 if R * G > 1024 else 256
    kernel = compiled("schedule_program", R, G, capacity, S, threads)
    kernel(confidence, tokens, starts, limits, slots, fixed, budget, *result[:-1], there)
    result.host.copy_(there, non_blocking=True)
    return result


def verify(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    proposals: Proposals,
    cu_rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    owner: torch.Tensor,
    *,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [R, 1 + G] and accepted int32 [R] as `dspark_kernels.verify` gives them, for requests without
    filters and with a temperature above 1e-5.

    owner int32 [N] as in `Schedule`. draft_logits is contiguous. Draws are rounded to float32: a token may differ where
    one lies within 6e-8 of a boundary.
    """
    (N, V), R = logits.shape, cu_rows.shape[0] - 1
    S, G = proposals.tokens.shape
    require(draft_logits.is_contiguous() and draft_logits.shape == (S, G, V), "draft_logits", list(draft_logits.shape),
            f"contiguous [{S}, {G}, {V}]")  # fmt: skip
    require(N * V < 2**31, "logits", f"{N} rows of {V}", "fewer than 2^31 numbers: indices have 32 bits")
    from dspark_kernels.tile.verify import pieces

    rows = owner.long().clamp(min=0)
    factor, row_seeds, at = 1.0 / temperature[rows], seeds[rows], positions + 1
    u = {case: uniform(row_seeds, at, case).float() for case in (TARGET, ACCEPT, RESIDUAL)}
    top, plain, warm = (torch.empty(N, pieces(V), device=logits.device) for _ in range(3))
    row_top, row_mass = (torch.empty(N, device=logits.device) for _ in range(2))
    accepted = torch.empty(R, dtype=torch.int32, device=logits.device)
    last = torch.empty(R, dtype=torch.int64, device=logits.device)
    compiled("stats_program", N, V)(logits, factor, top, plain, warm)
    compiled("decide_program", R, G, N, V, S)(
        logits, factor, top, warm, cu_rows, slots, proposals.tokens, proposals.logprobs, u[ACCEPT], row_top, row_mass,
        accepted,
    )  # fmt: skip
    pair = torch.stack([u[TARGET], u[RESIDUAL]], dim=1)
    compiled("token_program", R, G, N, V, S)(
        logits, draft_logits, factor, row_top, row_mass, proposals.top, proposals.factor, proposals.mass.float(),
        cu_rows, slots, accepted, pair, last,
    )  # fmt: skip
    places = torch.arange(1 + G, device=logits.device)
    drafts = torch.cat([proposals.tokens[slots.long().clamp(min=0)], last.unsqueeze(1)], dim=1)
    count = accepted.unsqueeze(1)
    tokens = torch.where(places < count, drafts, torch.where(places == count, last.unsqueeze(1), -1))
    return tokens, accepted
