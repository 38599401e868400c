"""How many drafts of each request are verified: confidences, prefix selection under a budget, row layout."""

from __future__ import annotations

import torch

from dspark_kernels import reference_schedule as reference
from dspark_kernels.cuda import confidence as confidence_cuda
from dspark_kernels.cuda import has_code
from dspark_kernels.cuda import schedule as cuda
from dspark_kernels.native import native
from dspark_kernels.results import F32, I32, I64, MOST_DRAFTS, Schedule, check_room, new_schedule, schedule_room
from kernel_core import elsewhere, register_op, use_reference
from kernel_core.check import require
from kernel_core.check import tensor as check_tensor
from kernel_core.cuda import pointer


def confidence_head(
    hidden: torch.Tensor, markov: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chances that drafts are accepted: a linear head on the draft's hidden row and the token before it.

    hidden float32 [B, G, H], rows contiguous, other strides free; markov float32 [B, G, M], the Markov embedding of
    the token before each draft; weight float32 [H + M]; temperatures float32 [G] above 0, None = 1 (calibration, one
    for each place).

    Returns, each float32 [B, G]: the head's logits; the confidence sigmoid(logit / temperature), clamped at +-60, 0
    where the logit is NaN; the survival, the product of the confidences from the left. A row does not depend on others.
    """
    check_tensor("hidden", hidden, dtype=F32, shape=(None, None, None), contiguous=False)
    B, G, H = hidden.shape
    require(1 <= G <= MOST_DRAFTS, "hidden", f"{G} drafts", f"1 to {MOST_DRAFTS}")
    require(hidden.stride(2) == 1 or H == 1, "hidden", f"strides {hidden.stride()}", "contiguous rows")
    check_tensor("markov", markov, dtype=F32, shape=(B, G, None))
    M = markov.shape[2]
    check_tensor("weight", weight, dtype=F32, shape=(H + M,))
    if temperatures is not None:
        check_tensor("temperatures", temperatures, dtype=F32, shape=(G,))
    where = elsewhere("dspark_kernels.confidence_head", hidden, kernels=has_code(hidden.device))
    if where == "cuda":
        return confidence_cuda.confidence_head(hidden, markov, weight, temperatures)
    if where:
        return reference.confidence_head(hidden, markov, weight, temperatures)
    if temperatures is not None:
        allowed = "above 0 and finite"
        require(bool(((temperatures > 0) & temperatures.isfinite()).all()), "temperatures", temperatures, allowed)
    if use_reference():
        return reference.confidence_head(hidden, markov, weight, temperatures)
    logits, confidence, survived = (torch.empty(B, G) for _ in range(3))
    # fmt: off
    native.confidence_head(B, G, H, M, hidden.data_ptr(), hidden.stride(0), hidden.stride(1), markov.data_ptr(),
                           weight.data_ptr(), pointer(temperatures), logits.data_ptr(), confidence.data_ptr(),
                           survived.data_ptr())
    # fmt: on
    return logits, confidence, survived


def survival(confidence: torch.Tensor) -> torch.Tensor:
    """Product of the confidences float32 [B, G] from the left, float32 [B, G].

    NaN and negative ones count as 0, those above 1 as 1, so that it never rises along a row.
    """
    check_tensor("confidence", confidence, dtype=F32, shape=(None, None))
    require(confidence.shape[1] > 0, "confidence", list(confidence.shape), "one column or more")
    return reference.survival(confidence)


def schedule(
    confidence: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    limits: torch.Tensor,
    budget: int | torch.Tensor,
    capacity: int,
    *,
    slots: torch.Tensor | None = None,
    fixed: torch.Tensor | None = None,
    host: torch.Tensor | None = None,
    out: Schedule | None = None,
) -> Schedule:
    """Which drafts of R requests are verified, and the layout of their rows (see `Schedule`).

    The drafts (request r, place j below the request's limit) are ordered by survival descending, then by j, then by r;
    the first `budget` are verified. As survival never rises along a request they are a prefix of each, and whether a
    draft is verified depends on tokens before it alone, which is what keeps rejection sampling exact.

    Args:
        confidence: float32 [S, G], G <= 8, in tables of S rows; NaN and negative ones count as 0, those above 1 as 1.
        tokens: int64 [S, 1 + G], the newest token (anchor) and the drafts behind it.
        starts: int64 [S], position of the anchor.
        limits: int32 [R], most drafts of a request, at most G of them; 0 for a request without drafts, -1 for a padding
            request, which has no row.
        budget: drafts over all requests, an int or int32 [1] beside the tensors (then one below 0 is 0). What does not
            fit in `capacity` is cut.
        capacity: N, rows of the layout, at least one for each request that is no padding.
        slots: int32 [R], the request's row in the tables, -1 for a padding request; None for 0, 1, .. (R = S).
        fixed: int32 [R], 0 or more: so many drafts (up to the limit) are verified and do not count against the budget;
            -1: the request is under the budget.
        host: int32 [R + 1] in CPU memory, takes the place of the result's `host`; pinned if the tensors are on a GPU.
        out: room from `new_schedule`.

    Raises ValueError if fixed lengths do not fit in `capacity`; on a GPU all requests become padding then, and the
    last number in `host` is minus the rows needed. Slots are not checked there.
    """
    check_tensor("confidence", confidence, dtype=F32, shape=(None, None))
    S, G = confidence.shape
    require(1 <= G <= MOST_DRAFTS, "confidence", f"{G} drafts", f"1 to {MOST_DRAFTS}")
    check_tensor("tokens", tokens, dtype=I64, shape=(S, 1 + G))
    check_tensor("starts", starts, dtype=I64, shape=(S,))
    check_tensor("limits", limits, dtype=I32, shape=(None,))
    R = limits.shape[0]
    require(R > 0, "limits", "no request", "1 or more")
    if slots is None:
        require(R == S, "limits", f"{R} requests", f"{S}, as many as there are confidences, or slots")
    else:
        check_tensor("slots", slots, dtype=I32, shape=(R,))
    if fixed is not None:
        check_tensor("fixed", fixed, dtype=I32, shape=(R,))
    if isinstance(budget, torch.Tensor):
        check_tensor("budget", budget, dtype=I32, shape=(1,))
    else:
        require(budget >= 0, "budget", budget, "0 or more")
    require(0 < capacity < 2**31, "capacity", capacity, "1 to 2^31 - 1")
    if host is not None:
        check_tensor("host", host, dtype=I32, shape=(R + 1,))
    where = elsewhere("dspark_kernels.schedule", confidence, kernels=cuda.fits(R, G, confidence.device))
    if confidence.is_cpu:
        _check_requests(limits, slots, S)
    result = new_schedule(R, G, capacity, confidence.device) if out is None else out
    if out is not None:
        check_room("out", out, schedule_room(R, G, capacity), confidence.device, host=True)
    if host is not None:
        result = result._replace(host=host)
    if confidence.is_cuda:
        require(result.host.is_pinned(), "host", "memory that a GPU cannot write to", "pinned memory")
    arguments = (confidence, tokens, starts, limits, budget, capacity, slots, fixed)
    if where == "cuda":
        cuda.schedule(*arguments, result)
        return result
    if where or use_reference():
        if confidence.is_cpu:
            _check_rows(int(reference.needed_rows(limits, slots, fixed, G)), capacity)
        for target, value in zip(result, reference.schedule(*arguments), strict=True):
            target.copy_(value, non_blocking=True)
        return result
    on_device, number = (budget, 0) if isinstance(budget, torch.Tensor) else (None, min(budget, R * G))
    # fmt: off
    needed = native.schedule(
        R, G, capacity, confidence.data_ptr(), tokens.data_ptr(), starts.data_ptr(), limits.data_ptr(), pointer(slots),
        pointer(fixed), number, pointer(on_device), [t.data_ptr() for t in result],
    )
    # fmt: on
    _check_rows(needed, capacity)
    return result


def _check_requests(limits: torch.Tensor, slots: torch.Tensor | None, S: int) -> None:
    r, which = native.bad_request(len(limits), S, limits.data_ptr(), pointer(slots))
    if r >= 0 and which == "l":
        require(False, "limits", f"{int(limits[r])} of request {r}", "-1 or more")
    if r >= 0 and slots is not None:
        require(False, "slots", f"{int(slots[r])} of request {r}", f"-1 to {S - 1}")


def _check_rows(needed: int, capacity: int) -> None:
    allowed = f"at least {needed}: the rows of all requests and fixed drafts"
    require(needed <= capacity, "capacity", capacity, allowed)


register_op(
    "dspark_kernels",
    "confidence_head(Tensor hidden, Tensor markov, Tensor weight, Tensor? temperatures=None) "
    "-> (Tensor, Tensor, Tensor)",
    confidence_head,
    lambda hidden, markov, weight, temperatures=None: tuple(markov.new_empty(markov.shape[:2]) for _ in range(3)),
)
register_op(
    "dspark_kernels",
    "survival(Tensor confidence) -> Tensor",
    survival,
    lambda confidence: torch.empty_like(confidence),
)
register_op(
    "dspark_kernels",
    "schedule(Tensor confidence, Tensor tokens, Tensor starts, Tensor limits, int budget, int capacity, *, "
    "Tensor? slots=None, Tensor? fixed=None) -> (" + ", ".join(["Tensor"] * 11) + ")",
    schedule,
    lambda confidence, tokens, starts, limits, budget, capacity, slots=None, fixed=None: tuple(
        confidence.new_empty(shape, dtype=kind, device="cpu" if i == 10 else confidence.device)
        for i, (kind, shape) in enumerate(schedule_room(len(limits), confidence.shape[1], capacity))
    ),
)
