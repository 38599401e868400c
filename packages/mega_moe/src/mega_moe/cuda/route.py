"""The router and the order of rows by expert, by the CUDA C++ kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_core.cuda import cuda_module, pointer, same_device, stream, workspace

_MOST_EXPERTS, _MOST_SLOTS = 1024, 32
_ONE_BLOCK = 2048  # ids that one block sorts
_I32 = torch.int32


class Permutation(NamedTuple):
    """Rows by expert: those of expert e are rows[offsets[e]:offsets[e + 1]], ascending, int32.

    Row t * top_k + s is slot s of token t; the shared expert, where it is one more, has row tokens * top_k + t of every
    token. Behind the last row there is -1, as often as slots are empty.
    """

    offsets: torch.Tensor
    rows: torch.Tensor


def fits_route(experts: int, top_k: int) -> bool:
    return experts <= _MOST_EXPERTS and top_k <= _MOST_SLOTS


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    bias_vl: torch.Tensor | None,
    is_image: torch.Tensor | None,
    routed_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    same_device(logits, bias=bias, bias_vl=bias_vl, is_image=is_image)
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=_I32, device=logits.device)
    weights = torch.empty(tokens, top_k, device=logits.device)
    if tokens:
        cuda_module("mega_moe").route(
            tokens=tokens,
            experts=experts,
            top_k=top_k,
            logits=logits.data_ptr(),
            bias=bias.data_ptr(),
            bias_vl=pointer(bias_vl),
            is_image=pointer(is_image),
            scale=routed_scale,
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            stream=stream(logits.device),
        )
    return ids, weights


def permute(ids: torch.Tensor, experts: int, *, shared: bool) -> Permutation:
    """Order of the slots of `ids` (int32 [T, k], -1 for an empty slot) by expert."""
    tokens, top_k = ids.shape
    made = _permutation(tokens, experts, top_k, shared, ids.device)
    module = cuda_module("mega_moe")
    scratch = workspace(module.permute_workspace(tokens, top_k, experts), ids.device)
    module.permute(
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        ids=ids.data_ptr(),
        shared=shared,
        offsets=made.offsets.data_ptr(),
        rows=made.rows.data_ptr(),
        workspace=scratch.data_ptr(),
        stream=stream(ids.device),
    )
    return made


def new_ticket(device: torch.device) -> torch.Tensor:
    """What launches of `route_permute` that follow each other on one stream share."""
    return torch.zeros(1, dtype=_I32, device=device)


def fits_one_launch(tokens: int, top_k: int) -> bool:
    return 0 < tokens * top_k <= _ONE_BLOCK


def route_permute(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    ticket: torch.Tensor,
    *,
    bias_vl: torch.Tensor | None = None,
    is_image: torch.Tensor | None = None,
    routed_scale: float = 1.5,
    shared: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Permutation]:
    """`route` and `permute` in one launch, where `fits_one_launch`; the same bits as one after the other."""
    same_device(logits, bias=bias, bias_vl=bias_vl, is_image=is_image, ticket=ticket)
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=_I32, device=logits.device)
    weights = torch.empty(tokens, top_k, device=logits.device)
    made = _permutation(tokens, experts, top_k, shared, logits.device)
    cuda_module("mega_moe").route_permute(
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        logits=logits.data_ptr(),
        bias=bias.data_ptr(),
        bias_vl=pointer(bias_vl),
        is_image=pointer(is_image),
        scale=routed_scale,
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        shared=shared,
        offsets=made.offsets.data_ptr(),
        rows=made.rows.data_ptr(),
        ticket=ticket.data_ptr(),
        stream=stream(logits.device),
    )
    return ids, weights, made


def _permutation(tokens: int, experts: int, top_k: int, shared: bool, device: torch.device) -> Permutation:
    more = int(shared)
    return Permutation(
        torch.empty(experts + more + 1, dtype=_I32, device=device),
        torch.empty(tokens * (top_k + more), dtype=_I32, device=device),
    )
