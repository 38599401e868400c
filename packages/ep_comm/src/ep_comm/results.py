"""What a dispatch gives, and what a transfer of bytes is."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Dispatched:
    """Tokens that came to this rank, one row a token however many of its experts are here.

    Rows stand by source rank, then by the token's number there. Packed rows follow each other without a gap,
    N = sum of counts. Fixed rows stand at source * max_tokens, N = ranks * max_tokens, and rows behind a source's
    count have ids -1 and any bytes: kernels with a fixed grid and captured graphs take those.

    x: [N, hidden] in the dispatch format. scales: float32 [N, hidden / 128] with "fp8", else None.
    ids: int32 [N, top_k], number of the expert on this rank, -1 where the slot is empty or another rank's.
    weights: float32 [N, top_k], undefined where ids is -1.
    counts: int32 [ranks], rows from each source; on the tokens' device.
    sources: int32 [N], the token's number at its source, -1 in unused rows.
    fixed: whether rows are fixed.
    epoch: of the dispatch; `combine` takes the latest one only.
    state: what the transport needs to find the way back; nobody else reads it.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    sources: torch.Tensor
    fixed: bool
    epoch: int
    state: object = field(default=None, repr=False)


@dataclass(frozen=True)
class Transfer:
    """Bytes from one rank to another, known to both: `tag` pairs the two sides, unique among those under way.

    buffer: uint8 [n], contiguous. It is read at `source` and written at `target`; other ranks do not pass the transfer.
    """

    tag: int
    source: int
    target: int
    buffer: torch.Tensor
