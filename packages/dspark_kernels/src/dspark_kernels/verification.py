"""Which drafts of a step stand, and the token behind them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from dspark_kernels import reference_verify as reference
from dspark_kernels.cuda import rows as cuda
from dspark_kernels.native import native
from dspark_kernels.ops import check_sampling
from dspark_kernels.results import (
    F32,
    I32,
    I64,
    MOST_DRAFTS,
    Proposals,
    Verified,
    check_room,
    new_verified,
    proposals_room,
    verified_room,
)
from kernel_core import elsewhere, register_op, use_reference
from kernel_core.check import require
from kernel_core.check import tensor as check_tensor
from kernel_core.cuda import pointer


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
    *,
    slots: torch.Tensor | None = None,
    coupled: torch.Tensor | None = None,
    out: Verified | None = None,
) -> Verified:
    """Accepted drafts and one token more for each of R requests.

    Draft y is accepted with probability min(1, p(y) / q(y)): p is the target's distribution after temperature, top-p
    and top-k, q the one that the draft was drawn from. The first draft that is rejected is replaced by a draw from
    max(p - q, 0), renormalised; behind accepted drafts alone stands a draw from p. So every token has the target's
    distribution (Leviathan et al., 2023). Rows with a temperature below 1e-5 take the argmax and accept equal drafts.

    Coupled requests draw every token as `sample` would without drafts, and accept a draft that is equal to it: the
    same tokens at any number of drafts, in any batch, for fewer accepted drafts.

    The decided token of row i stands at positions[i] + 1; its draws there are: 0 the token behind accepted drafts, or
    of a coupled request; 2 the test of a draft; 3 the token that replaces it.

    Args:
        logits: float32 [N, V], row i after input i, masks applied (`apply_token_mask`).
        draft_logits: float32 [S, >= G, V] as `draft_step` left them, rows contiguous, other strides free; None if no
            request has a draft.
        proposals: their records [S, G]; None together with `draft_logits`, G = 0 then.
        cu_rows: int32 [R + 1], rows of each request: its drafts and one more, or none for padding.
        positions: int64 [N] of the inputs.
        temperature, top_p, top_k, seeds: as in `sample`, [R]; top_p None is 1 for all. Where both filters are None a
            GPU decides rows as it reads them, from 256 rows on: faster unless most rows are greedy.
        slots: int32 [R], the request's row in the records; None for 0, 1, ..
        coupled: bool [R].
        out: room from `new_verified`.

    A row without a distribution (see `sample`) fails the request if it is reached; the tokens before it stand. A draft
    of -1 is rejected and redrawn from p.
    """
    check_tensor("logits", logits, dtype=F32, shape=(None, None))
    N, V = logits.shape
    check_tensor("cu_rows", cu_rows, dtype=I32, shape=(None,))
    R = cu_rows.shape[0] - 1
    require(R >= 0, "cu_rows", "no entry", "one more than there are requests")
    check_tensor("positions", positions, dtype=I64, shape=(N,))
    where = elsewhere("dspark_kernels.verify", logits, kernels=cuda.fits(logits))
    if where != "cuda" and top_p is None:
        top_p = logits.new_ones(R)
    values = check_sampling(R, V, temperature, temperature if top_p is None else top_p, top_k, seeds)
    require((draft_logits is None) == (proposals is None), "proposals", "one of two", "both or none with draft_logits")
    S = G = 0
    if draft_logits is not None and proposals is not None:
        check_tensor("draft_logits", draft_logits, dtype=F32, shape=(None, None, V), contiguous=False)
        S = draft_logits.shape[0]
        require(draft_logits.stride(2) == 1 or V == 1, "draft_logits", draft_logits.stride(), "contiguous rows")
        check_tensor("proposals.tokens", proposals.tokens, dtype=I64, shape=(S, None))
        most = min(draft_logits.shape[1], MOST_DRAFTS)
        G = proposals.tokens.shape[1]
        require(1 <= G <= most, "proposals", f"{G} drafts", f"1 to {most}")
        check_room("proposals", proposals, proposals_room(S, G), logits.device)
    if slots is not None:
        check_tensor("slots", slots, dtype=I32, shape=(R,))
    else:
        require(G == 0 or R == S, "slots", f"None for {R} requests", f"as many as the {S} records, or slots")
    if coupled is not None:
        check_tensor("coupled", coupled, dtype=torch.bool, shape=(R,))
    if out is not None:
        check_room("out", out, verified_room(R, G), logits.device)
    if not where:
        values()
        _check_rows(cu_rows, slots, N, S, G)
    result = new_verified(R, G, logits.device) if out is None else out
    before = (logits, draft_logits, proposals, cu_rows, positions, temperature)
    if where == "cuda":
        cuda.verify(*before, top_p, top_k, seeds, slots, coupled, result)
        return result
    assert top_p is not None
    arguments = (*before, top_p, top_k, seeds)
    if where or use_reference():
        for target, value in zip(result, reference.verify(*arguments, slots, coupled), strict=True):
            target.copy_(value)
        return result
    strides = (0, 0) if draft_logits is None else draft_logits.stride()[:2]
    records = [0] * 6 if proposals is None else [t.data_ptr() for t in proposals]
    # fmt: off
    native.verify(R, N, V, G, logits.data_ptr(), pointer(draft_logits), *strides, records, cu_rows.data_ptr(),
                  positions.data_ptr(), temperature.data_ptr(), top_p.data_ptr(), pointer(top_k), seeds.data_ptr(),
                  pointer(slots), pointer(coupled), [t.data_ptr() for t in result])
    # fmt: on
    return result


def _check_rows(cu_rows: torch.Tensor, slots: torch.Tensor | None, N: int, S: int, G: int) -> None:
    listed = cu_rows.tolist()
    require(listed[0] == 0, "cu_rows", f"{listed[0]} first", "0")
    require(listed[-1] <= N, "cu_rows", f"{listed[-1]} last", f"at most {N}, the rows of logits")
    for r, (start, end) in enumerate(itertools.pairwise(listed)):
        allowed = f"0 to {1 + G}, one more than there are drafts"
        require(0 <= end - start <= 1 + G, "cu_rows", f"{end - start} rows of request {r}", allowed)
        if slots is not None and end - start > 1:
            require(0 <= int(slots[r]) < S, "slots", f"{int(slots[r])} of request {r}", f"0 to {S - 1}")


def _as_op(
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    proposals: Sequence[torch.Tensor] | None,
    cu_rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    coupled: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    records = None if proposals is None else Proposals(*proposals)
    given = (logits, draft_logits, records, cu_rows, positions, temperature, top_p, top_k, seeds)
    return tuple(verify(*given, slots=slots, coupled=coupled))


def _fake(
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    proposals: Sequence[torch.Tensor] | None,
    cu_rows: torch.Tensor,
    *_: torch.Tensor | None,
    slots: torch.Tensor | None = None,
    coupled: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    drafts = 0 if proposals is None else proposals[0].shape[1]
    return tuple(logits.new_empty(s, dtype=d) for d, s in verified_room(cu_rows.shape[0] - 1, drafts))


register_op(
    "dspark_kernels",
    "verify(Tensor logits, Tensor? draft_logits, Tensor[]? proposals, Tensor cu_rows, Tensor positions, "
    "Tensor temperature, Tensor? top_p, Tensor? top_k, Tensor seeds, *, Tensor? slots=None, Tensor? coupled=None) "
    "-> (" + ", ".join(["Tensor"] * 6) + ")",
    _as_op,
    _fake,
)
