"""How ranks with a GPU each reach each other on one host: tokens through peers' memory, the rest through the host's."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.cluster.links import Pair, control_shape

if TYPE_CHECKING:
    from ep_comm import Shape

MOST_FUSED = 1024  # tokens of a rank in a step up to which experts read and write peers' memory themselves
_MOST_FUSED_RANKS = 8


@dataclass(frozen=True)
class PeerLinks:
    """Processes of one host that have set their GPU. `path` is new in every epoch."""

    path: str
    shape: Shape
    timeout: float

    def open(self, rank: int) -> Pair:
        import torch.distributed as dist

        from ep_comm import shared_memory
        from ep_comm.cuda import FusedExchange, FusedSizes, Symmetric, peer_buffers, peers

        shape, ranks = self.shape, self.shape.ranks
        control = shared_memory(f"{self.path}.control", rank, control_shape(ranks), timeout=self.timeout)
        wait = timedelta(seconds=self.timeout)
        store = self._store(rank, control, wait)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
        group = dist.group.WORLD
        data = peers(group, shape, store=store, timeout=self.timeout, packed=False)
        closing: list[Any] = []
        fused = None
        if 1 < ranks <= _MOST_FUSED_RANKS and shape.max_tokens <= MOST_FUSED:
            sizes = FusedSizes(ranks, shape.max_tokens, shape.hidden, shape.top_k)
            symmetric = Symmetric(group, rank, sizes.offsets()["bytes"])
            fused = FusedExchange(data, peer_buffers(symmetric, rank, sizes))
            closing.append(lambda: symmetric.close(self.timeout))
        closing.append(dist.destroy_process_group)
        return Pair(data, control, fused, tuple(closing))

    def _store(self, rank: int, control: Any, wait: timedelta) -> Any:
        """Rank 0 listens; its port goes round by the control link."""
        from torch.distributed import TCPStore

        ranks, port, store = self.shape.ranks, 0, None
        if rank == 0:
            store = TCPStore("127.0.0.1", 0, ranks, is_master=True, timeout=wait, wait_for_workers=False)
            port = store.port
        told = control.all_gather(torch.tensor([port], dtype=torch.int64))
        return store or TCPStore("127.0.0.1", int(told[0, 0]), ranks, is_master=False, timeout=wait)
