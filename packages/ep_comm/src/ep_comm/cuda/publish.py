"""Laying tokens out for experts that read them where they are, with the choice of copies in the same launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ep_comm.cuda.communicator import CudaCommunicator
from ep_comm.cuda.fused import FusedBuffers
from kernel_core.check import require, tensor
from kernel_core.cuda import aligned, pointer

_MOST_CTAS = 32
_CHANNELS_A_CTA = 512 * 8  # a thread rounds eight


@dataclass(frozen=True)
class CopyTables:
    """Of a layer's logical experts, on the GPU: own int32 [E], the copy on this rank or -1; counts int32 [E];
    copies int32 [E, ranks], physical numbers, the first `counts` of a row. A rank's own copy goes first, else token t
    of rank r takes copy (r + t) mod counts."""

    own: torch.Tensor
    counts: torch.Tensor
    copies: torch.Tensor


class FusedExchange:
    """A rank's buffers and the communicator whose flags order them. All ranks publish in the same order."""

    def __init__(self, communicator: CudaCommunicator, buffers: FusedBuffers) -> None:
        s, b = communicator.shape, buffers.sizes
        for name, mine, theirs in (
            ("ranks", s.ranks, b.ranks),
            ("hidden", s.hidden, b.hidden),
            ("top_k", s.top_k, b.top_k),
            ("max_tokens", s.max_tokens, b.tokens),
        ):
            require(mine == theirs, f"buffers.{name}", theirs, f"{mine}, as the communicator")
        require(buffers.rank == communicator.rank, "buffers.rank", buffers.rank, str(communicator.rank))
        self.communicator, self.buffers = communicator, buffers
        addresses = [t.data_ptr() for t in buffers.slots]
        self._table = torch.tensor(addresses, dtype=torch.int64, device=communicator.device)

    def publish(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        copies: CopyTables | None = None,
        padding: torch.Tensor | None = None,
        routed: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue it on the current stream; returns the physical experts, int32 [T, top_k], -1 for an empty slot.

        x: float32 or bfloat16 [T, hidden], rounded to bfloat16; ids: int32 [T, top_k], logical experts with `copies`,
        else physical ones; weights: float32 [T, top_k]; padding: bool [T], rows that go nowhere.
        routed: int32 [E], adds how often each logical expert was wanted. received: int64 [1], set to the slots that
        came to this rank. Raises as `Communicator.dispatch`; a failure of the launch is raised by the next call.
        """
        comm, b = self.communicator, self.buffers
        s, tokens = comm.shape, x.shape[0]
        if copies is not None:
            experts = copies.own.numel()
            tensor("copies.counts", copies.counts, dtype=torch.int32, shape=(experts,))
            tensor("copies.copies", copies.copies, dtype=torch.int32, shape=(experts, s.ranks))
            if routed is not None:
                tensor("routed", routed, dtype=torch.int32, shape=(experts,))
        require(routed is None or copies is not None, "routed", "without copies", "copies too")
        if padding is not None:
            tensor("padding", padding, dtype=torch.bool, shape=(tokens,))
        require(aligned(x), "x", "an address that is no multiple of 16", "an aligned tensor")
        comm.begin_publish(x, ids, weights)
        physical = torch.empty_like(ids)
        ctas = max(1, min(_MOST_CTAS, comm.most_ctas, -(-tokens * s.hidden // _CHANNELS_A_CTA)))
        comm.launch_publish(
            rows=b.x[b.rank].data_ptr(),
            weights=b.weights[b.rank].data_ptr(),
            slots=self._table.data_ptr(),
            physical=physical.data_ptr(),
            padding=pointer(padding),
            logical=0 if copies is None else copies.own.numel(),
            own=0 if copies is None else copies.own.data_ptr(),
            counts=0 if copies is None else copies.counts.data_ptr(),
            copies=0 if copies is None else copies.copies.data_ptr(),
            routed=pointer(routed),
            received=pointer(received),
            ctas=ctas,
        )
        return physical
