"""How a collective's bytes go: in its messages, or over NCCL with only the sizes in messages."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from ep_comm.over_groups.links import Links, Type, reason
from ep_comm.over_groups.mailbox import Mailbox, stamp


class Data(Protocol):
    def exchange(
        self, epoch: int, kind: str, detail: int, parts: list[torch.Tensor], timeout: float
    ) -> list[torch.Tensor]:
        """uint8 [n, width] for each rank, n at will; what each has for this one."""

    def tell(
        self, epoch: int, kind: str, detail: int, payload: torch.Tensor | None, timeout: float
    ) -> dict[int, torch.Tensor]:
        """The same bytes on the host to all peers; theirs, by rank."""


class MessageData:
    """Tensors on the host."""

    def __init__(self, links: Links, mail: Mailbox) -> None:
        self._links, self._mail = links, mail

    def exchange(
        self, epoch: int, kind: str, detail: int, parts: list[torch.Tensor], timeout: float
    ) -> list[torch.Tensor]:
        mine = self._links.rank
        got = self._send(epoch, kind, detail, [part.reshape(-1) for part in parts], timeout)
        return [part if rank == mine else got[rank].reshape(-1, part.shape[1]) for rank, part in enumerate(parts)]

    def tell(
        self, epoch: int, kind: str, detail: int, payload: torch.Tensor | None, timeout: float
    ) -> dict[int, torch.Tensor]:
        empty = torch.empty(0, dtype=torch.uint8)
        return self._send(epoch, kind, detail, [empty if payload is None else payload] * self._links.ranks, timeout)

    def _send(
        self, epoch: int, kind: str, detail: int, payloads: list[torch.Tensor], timeout: float
    ) -> dict[int, torch.Tensor]:
        flag = stamp(epoch, kind, detail)
        for peer, payload in enumerate(payloads):
            if peer != self._links.rank:
                try:
                    self._links.send(peer, Type.part, epoch, flag, payload=payload)
                except RuntimeError as error:  # what it sent before it went comes first
                    self._mail.leave(peer, reason(peer, error))
        return self._mail.take(epoch, flag, timeout)


class NcclData(MessageData):
    """Tensors on a GPU. Sizes cross the host first: all ranks are then known to be here."""

    def __init__(self, links: Links, mail: Mailbox, group: dist.ProcessGroup | None) -> None:
        super().__init__(links, mail)
        self._group = group

    def exchange(
        self, epoch: int, kind: str, detail: int, parts: list[torch.Tensor], timeout: float
    ) -> list[torch.Tensor]:
        sizes = [part.shape[0] for part in parts]
        messages = [torch.tensor([size]).view(torch.uint8) for size in sizes]
        got = self._send(epoch, kind, detail, messages, timeout)
        mine = self._links.rank
        theirs = [size if rank == mine else int(got[rank].view(torch.int64)) for rank, size in enumerate(sizes)]
        received = parts[0].new_empty(sum(theirs), parts[0].shape[1])
        dist.all_to_all_single(received, torch.cat(parts), theirs, sizes, group=self._group)
        return list(received.split(theirs))
