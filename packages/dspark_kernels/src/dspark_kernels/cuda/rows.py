"""Sampling, draft steps, verification and masks on rows of logits."""

from __future__ import annotations

import torch

from dspark_kernels.cuda import has_code
from dspark_kernels.results import I64, Proposals, Verified
from kernel_core.cuda import cuda_module, pointer, same_device, stream, workspace

MOST_VOCABULARY = 2**20


def fits(logits: torch.Tensor) -> bool:
    """Whether the kernels take such rows on their device; others run as PyTorch's operators."""
    return logits.shape[-1] <= MOST_VOCABULARY and has_code(logits.device)


def _scratch(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    return workspace(cuda_module("dspark_kernels").rows_workspace(rows=rows, vocab=vocabulary), device)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    case: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    same_device(logits, temperature=temperature, top_p=top_p, top_k=top_k, seeds=seeds, positions=positions)
    T, V = logits.shape
    tokens = torch.empty(T, dtype=I64, device=logits.device)
    logprobs = torch.empty(T, device=logits.device)
    if T:
        scratch = _scratch(T, V, logits.device)
        cuda_module("dspark_kernels").sample(
            tokens=T,
            vocab=V,
            logits=logits.data_ptr(),
            temperature=temperature.data_ptr(),
            top_p=top_p.data_ptr(),
            top_k=pointer(top_k),
            seeds=seeds.data_ptr(),
            positions=positions.data_ptr(),
            draw=case,
            chosen=tokens.data_ptr(),
            logprobs=logprobs.data_ptr(),
            workspace=scratch.data_ptr(),
            stream=stream(logits.device),
        )
    return tokens, logprobs


def draft_step(
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: Proposals,
    coupled: torch.Tensor | None,
) -> torch.Tensor:
    same_device(logits, bias=bias, temperature=temperature, top_p=top_p, top_k=top_k, seeds=seeds,
                positions=positions, coupled=coupled)  # fmt: skip
    B, V = logits.shape[0], logits.shape[2]
    tokens = torch.empty(B, dtype=I64, device=logits.device)
    if B:
        scratch = _scratch(B, V, logits.device)
        cuda_module("dspark_kernels").draft_step(
            requests=B,
            vocab=V,
            drafts=out.tokens.shape[1],
            step=k,
            logits=logits[:, k].data_ptr(),
            row_stride=logits.stride(0),
            bias=pointer(bias),
            temperature=temperature.data_ptr(),
            top_p=top_p.data_ptr(),
            top_k=pointer(top_k),
            seeds=seeds.data_ptr(),
            positions=positions.data_ptr(),
            coupled=pointer(coupled),
            chosen=tokens.data_ptr(),
            tokens=out.tokens.data_ptr(),
            logprobs=out.logprobs.data_ptr(),
            top=out.top.data_ptr(),
            factor=out.factor.data_ptr(),
            mass=out.mass.data_ptr(),
            cut=out.cut.data_ptr(),
            workspace=scratch.data_ptr(),
            stream=stream(logits.device),
        )
    return tokens


def verify(
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    proposals: Proposals | None,
    cu_rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    slots: torch.Tensor | None,
    coupled: torch.Tensor | None,
    out: Verified,
) -> None:
    same_device(logits, draft_logits=draft_logits, cu_rows=cu_rows, positions=positions, temperature=temperature,
                top_p=top_p, top_k=top_k, seeds=seeds, slots=slots, coupled=coupled)  # fmt: skip
    (N, V), R = logits.shape, cu_rows.shape[0] - 1
    request, step = (0, 0) if draft_logits is None else draft_logits.stride()[:2]
    records = (None,) * 6 if proposals is None else proposals
    scratch = _scratch(max(N, R), V, logits.device)
    cuda_module("dspark_kernels").verify(
        requests=R,
        rows=N,
        vocab=V,
        drafts=out.tokens.shape[1] - 1,
        logits=logits.data_ptr(),
        draft_logits=pointer(draft_logits),
        draft_request=request,
        draft_step=step,
        draft_tokens=pointer(records[0]),
        draft_logprobs=pointer(records[1]),
        draft_top=pointer(records[2]),
        draft_factor=pointer(records[3]),
        draft_mass=pointer(records[4]),
        draft_cut=pointer(records[5]),
        cu_rows=cu_rows.data_ptr(),
        positions=positions.data_ptr(),
        temperature=temperature.data_ptr(),
        top_p=pointer(top_p),
        top_k=pointer(top_k),
        seeds=seeds.data_ptr(),
        slots=pointer(slots),
        coupled=pointer(coupled),
        tokens=out.tokens.data_ptr(),
        logprobs=out.logprobs.data_ptr(),
        accepted=out.accepted.data_ptr(),
        counts=out.counts.data_ptr(),
        failed=out.failed.data_ptr(),
        last=out.last.data_ptr(),
        workspace=scratch.data_ptr(),
        stream=stream(logits.device),
    )


def apply_token_mask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None) -> None:
    same_device(logits, bitmask=bitmask, rows=rows)
    if len(bitmask):
        cuda_module("dspark_kernels").token_mask(
            count=bitmask.shape[0],
            vocab=logits.shape[1],
            words=bitmask.shape[1],
            logits=logits.data_ptr(),
            bitmask=bitmask.data_ptr(),
            rows=pointer(rows),
            stream=stream(logits.device),
        )
