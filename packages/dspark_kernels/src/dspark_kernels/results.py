"""What the ops of a speculative step write: named tensors that a caller may allocate once and pass as `out`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_core.check import require, tensor

F32, F64, I32, I64 = torch.float32, torch.float64, torch.int32, torch.int64
MOST_DRAFTS = 8  # of a request
CPU = torch.device("cpu")


class Schedule(NamedTuple):
    """Verified drafts and the verification rows of a step: R requests, G drafts each, room for N rows.

    Attributes:
        lengths: int32 [R], drafts of a request that are verified, 0 for padding requests.
        cu_rows: int32 [R + 1], cumulative rows: 1 + length for a request, none for a padding request.
        survival: float32 [R, G], chance that a draft and all before it are accepted; 0 for padding requests.
        owner: int32 [N], request of a row; -1 for padding rows.
        place: int32 [N], 0 for the anchor, j for draft j - 1; 0 for padding rows.
        source: int32 [N], where the row's token stands in the flat table of tokens; -1 for padding rows.
        row_of: int32 [R, 1 + G], the row of (request, place); -1 where there is none.
        tokens: int64 [N], input ids; 0 for padding rows.
        positions: int64 [N], start + place; 0 for padding rows.
        kv_lengths: int32 [R], start + 1 + length; 0 for padding requests.
        host: int32 [R + 1] in CPU memory (pinned beside a GPU): lengths, then the number of rows, which is negative
            where even the requests without budgeted drafts did not fit.
    """

    lengths: torch.Tensor
    cu_rows: torch.Tensor
    survival: torch.Tensor
    owner: torch.Tensor
    place: torch.Tensor
    source: torch.Tensor
    row_of: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    kv_lengths: torch.Tensor
    host: torch.Tensor


class Proposals(NamedTuple):
    """Drafts and the distributions that they were drawn from: every tensor is [B, G].

    Of token v with logit x the probability is exp((x - top) * factor) / mass if it ranks at or before `cut`, else 0.
    A row without a distribution has token -1 and NaN.

    Attributes:
        tokens: int64.
        logprobs: float32, of the token under that distribution.
        top: float32, the largest logit.
        factor: float32, 1 / temperature.
        mass: float64.
        cut: int64, bits of the rank of the last token kept; 0 keeps all.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    top: torch.Tensor
    factor: torch.Tensor
    mass: torch.Tensor
    cut: torch.Tensor


class Verified(NamedTuple):
    """What a step emits for R requests with up to G drafts.

    Attributes:
        tokens: int64 [R, 1 + G], accepted drafts, then the redrawn or the bonus token; -1 behind them.
        logprobs: float32 [R, 1 + G], under the softmax of the logits as given; NaN where the token is -1.
        accepted: int32 [R], accepted drafts.
        counts: int32 [R], emitted tokens: accepted + 1, or accepted where `failed`; 0 for padding requests.
        failed: bool [R], the row behind the accepted drafts has no distribution.
        last: int64 [R], the last emitted token, -1 if there is none.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    accepted: torch.Tensor
    counts: torch.Tensor
    failed: torch.Tensor
    last: torch.Tensor


Room = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""dtype and shape of each tensor of a result."""


def schedule_room(R: int, G: int, N: int) -> Room:
    shapes = ((R,), (R + 1,), (R, G), (N,), (N,), (N,), (R, 1 + G), (N,), (N,), (R,), (R + 1,))
    kinds = (I32, I32, F32, I32, I32, I32, I32, I64, I64, I32, I32)
    return tuple(zip(kinds, shapes, strict=True))


def proposals_room(B: int, G: int) -> Room:
    return tuple((kind, (B, G)) for kind in (I64, F32, F32, F32, F64, I64))


def verified_room(R: int, G: int) -> Room:
    one, block = (R,), (R, 1 + G)
    return ((I64, block), (F32, block), (I32, one), (I32, one), (torch.bool, one), (I64, one))


def new_schedule(requests: int, drafts: int, capacity: int, device: torch.device | str = CPU) -> Schedule:
    """Room for `schedule`; `host` is pinned if `device` is a GPU."""
    *rest, (kind, shape) = schedule_room(requests, drafts, capacity)
    host = torch.empty(shape, dtype=kind, pin_memory=torch.device(device).type == "cuda")
    made = (*(torch.empty(s, dtype=d, device=device) for d, s in rest), host)
    return Schedule(*made)


def new_proposals(requests: int, drafts: int, device: torch.device | str = CPU) -> Proposals:
    """Room for the records of `draft_step`: no draft in any place yet."""
    nothing = (-1, torch.nan, torch.nan, torch.nan, torch.nan, 0)
    room = zip(proposals_room(requests, drafts), nothing, strict=True)
    return Proposals(*(torch.full(s, value, dtype=d, device=device) for (d, s), value in room))


def new_verified(requests: int, drafts: int, device: torch.device | str = CPU) -> Verified:
    """Room for `verify`."""
    return Verified(*(torch.empty(s, dtype=d, device=device) for d, s in verified_room(requests, drafts)))


def check_room(argument: str, given: NamedTuple, room: Room, device: torch.device, *, host: bool = False) -> None:
    """Raise ValueError unless the tensors of `given` are what `room` says, on `device`; the last one in CPU memory
    if `host`."""
    for i, (name, value, (kind, shape)) in enumerate(zip(given._fields, given, room, strict=True)):
        tensor(f"{argument}.{name}", value, dtype=kind, shape=shape)
        wanted = CPU if host and i == len(room) - 1 else device
        require(value.device == wanted, f"{argument}.{name}", f"a tensor on {value.device}", str(wanted))
