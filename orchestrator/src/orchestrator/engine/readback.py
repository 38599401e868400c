"""Results on their way from the device to the host: packed into one copy a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their bytes in one uint8 tensor on their device, wide types first so that every one is aligned."""
    return torch.cat([tensors[i].contiguous().view(-1).view(torch.uint8) for i in _order(tensors)])


def unpack(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a buffer that `pack` filled from tensors of these shapes and dtypes, in their order."""
    found, start = [torch.empty(0)] * len(like), 0
    for i in _order(like):
        size = like[i].numel() * like[i].element_size()
        found[i] = buffer[start : start + size].view(like[i].dtype).view(like[i].shape)
        start += size
    return found


def fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All of them on the host: the place where a step waits for a GPU."""
    if not tensors or tensors[0].is_cpu:
        return list(tensors)
    return unpack(pack(tensors).cpu(), tensors)


def _order(tensors: Sequence[torch.Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())


class HostRing:
    """Pinned host buffers for the results of steps in flight, one a step, used in turn.

    A buffer belongs to its step from `claim` until `release`. Claiming one that still belongs to another step is an
    error (rule H4): its results would be read as those of the wrong step.
    """

    def __init__(self, depth: int, *, pinned: bool, guarded: bool = True) -> None:
        """`depth` buffers: one more than there are steps in flight."""
        self.depth, self._pinned, self._guarded = depth, pinned, guarded
        self._owners: list[int | None] = [None] * depth
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * depth

    def claim(self, step: int) -> int:
        """The place of a step's buffer."""
        place = step % self.depth
        owner = self._owners[place]
        if self._guarded and owner is not None:
            raise RuntimeError(f"step {step} wants the host buffer of step {owner}, which was not read yet")
        self._owners[place] = step
        return place

    def fill(self, place: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start the copy of a step's results, in the order of the device's stream."""
        packed = pack(tensors)
        if self._buffers[place].numel() < packed.numel():
            size = 1 << (packed.numel() - 1).bit_length()
            self._buffers[place] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self._buffers[place][: packed.numel()].copy_(packed, non_blocking=True)

    def read(self, place: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What `fill` copied, once the step has ended; valid until `release`."""
        return unpack(self._buffers[place], like)

    def release(self, place: int) -> None:
        self._owners[place] = None
