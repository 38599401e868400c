"""One step of a block of drafts: the bias of the token before, filters, one draw, and a record for verification."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark_kernels import reference_verify as reference
from dspark_kernels.cuda import rows as cuda
from dspark_kernels.native import native
from dspark_kernels.ops import check_sampling
from dspark_kernels.results import F32, I64, MOST_DRAFTS, Proposals, check_room, proposals_room
from kernel_core import elsewhere, register_op, use_reference
from kernel_core.check import require
from kernel_core.check import tensor as check_tensor
from kernel_core.cuda import pointer


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
    *,
    coupled: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draft k of every request: column k of `logits` becomes logits + bias, and `sample` draws a token from it.

    Args:
        logits: float32 [B, >= G, V], rows contiguous, other strides free. Column k is changed; `verify` reads it again.
        k: place of the draft, 0 to G - 1.
        bias: float32 [B, V], what the token before adds (the Markov head of it), or None.
        temperature, top_p, top_k, seeds: as in `sample`, [B].
        positions: int64 [B] of the anchors: draft k stands at position + 1 + k, and the draw is number 1 there.
        out: records of G drafts (`new_proposals`), whose column k is written.
        coupled: bool [B]: these rows take draw 0, that of target tokens (see `verify`).

    Returns the tokens int64 [B]; -1 for a row without a distribution, which `verify` rejects.
    """
    check_tensor("logits", logits, dtype=F32, shape=(None, None, None), contiguous=False)
    B, places, V = logits.shape
    check_tensor("out.tokens", out.tokens, dtype=I64, shape=(B, None))
    G = out.tokens.shape[1]
    require(1 <= G <= min(places, MOST_DRAFTS), "out", f"{G} drafts", f"1 to {min(places, MOST_DRAFTS)}")
    check_room("out", out, proposals_room(B, G), logits.device)
    require(0 <= k < G, "k", k, f"0 to {G - 1}")
    require(logits.stride(2) == 1 or V == 1, "logits", f"strides {logits.stride()}", "contiguous rows")
    if bias is not None:
        check_tensor("bias", bias, dtype=F32, shape=(B, V))
    if coupled is not None:
        check_tensor("coupled", coupled, dtype=torch.bool, shape=(B,))
    check_tensor("positions", positions, dtype=I64, shape=(B,))
    values = check_sampling(B, V, temperature, top_p, top_k, seeds)
    where = elsewhere("dspark_kernels.draft_step", logits, kernels=cuda.fits(logits))
    if where == "cuda":
        return cuda.draft_step(logits, k, bias, temperature, top_p, top_k, seeds, positions, out, coupled)
    if not where:
        values()
    if where or use_reference():
        return reference.draft_step(logits, k, bias, temperature, top_p, top_k, seeds, positions, out, coupled)
    tokens = torch.empty(B, dtype=I64)
    # fmt: off
    native.draft_step(B, V, G, k, logits[:, k].data_ptr(), logits.stride(0), pointer(bias), temperature.data_ptr(),
                      top_p.data_ptr(), pointer(top_k), seeds.data_ptr(), positions.data_ptr(), pointer(coupled),
                      tokens.data_ptr(), [t.data_ptr() for t in out])
    # fmt: on
    return tokens


def _as_op(
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: Sequence[torch.Tensor],
    *,
    coupled: torch.Tensor | None = None,
) -> torch.Tensor:
    return draft_step(logits, k, bias, temperature, top_p, top_k, seeds, positions, Proposals(*out), coupled=coupled)


register_op(
    "dspark_kernels",
    "draft_step(Tensor(a!) logits, int k, Tensor? bias, Tensor temperature, Tensor top_p, Tensor? top_k, Tensor seeds, "
    "Tensor positions, Tensor(b!)[] out, *, Tensor? coupled=None) -> Tensor",
    _as_op,
    lambda logits, k, bias, temperature, top_p, top_k, seeds, positions, out, *, coupled=None: torch.empty_like(seeds),
)
