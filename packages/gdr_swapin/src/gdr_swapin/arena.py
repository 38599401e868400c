"""Host memory for blocks at rest: slots of one block each, in private or shared memory, pinned where a GPU reads it.

A slot is empty, being written, or ready; who loads it holds a lease meanwhile. So a loader never reads half a block,
and nobody writes into one that a copy engine still reads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gdr_swapin.layout import BlockLayout
from gdr_swapin.plan import Source, checked_ids
from gdr_swapin.region import PAGE, check_header, data_offset, region_bytes, states_of, write_header
from kernel_core import check

EMPTY, WRITING, READY = 0, 1, 2


class HostArena:
    """`slots` blocks at rest. `data: uint8[slots, block_bytes]` are their bytes, `stride` bytes from block to block.

    Make one with `allocate`, `over` or `foreign`. A buffer given to the latter two stays exported as long as the arena
    lives, so it cannot be closed before.
    """

    def __init__(
        self, layout: BlockLayout, region: torch.Tensor, data: torch.Tensor, states: np.ndarray, owner: Any = None
    ) -> None:
        self.layout, self.region, self.data = layout, region, data
        self.slots, self.stride = int(data.shape[0]), int(data.stride(0))
        self._states = states
        self._leases = np.zeros(self.slots, dtype=np.int32)
        self._lock = threading.Lock()
        self._owner = owner  # keeps foreign memory alive
        self._registered = False

    @staticmethod
    def allocate(layout: BlockLayout, slots: int, *, pinned: bool = False) -> HostArena:
        """New private memory, one block right behind the other; `pinned` needs a CUDA device."""
        check.require(slots > 0, "slots", slots, "at least 1")
        size = region_bytes(layout, slots)
        if pinned:
            region = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        else:
            spare = torch.zeros(size + PAGE, dtype=torch.uint8)
            start = -spare.data_ptr() % PAGE
            region = spare[start : start + size]
        write_header(region, layout, slots)
        return _of_region(layout, region, slots, None)

    @staticmethod
    def over(layout: BlockLayout, buffer: Any, slots: int, *, create: bool) -> HostArena:
        """On a writable buffer of whole pages, such as `multiprocessing.shared_memory.SharedMemory.buf`.

        The region holds a header and a state byte a slot, so that a process that fills it and one that loads from it
        agree. create: write the header and mark all slots empty; otherwise the header has to say this layout and as
        many slots, or ValueError says what it says. `register` makes the memory readable for a GPU.
        """
        check.require(slots > 0, "slots", slots, "at least 1")
        region, view = _tensor(buffer, region_bytes(layout, slots))
        if create:
            write_header(region, layout, slots)
        else:
            check_header(region, layout, slots)
        return _of_region(layout, region, slots, view)

    @staticmethod
    def foreign(layout: BlockLayout, buffer: Any, slots: int, *, offset: int, stride: int) -> HostArena:
        """On a region with a form of its own: block i starts at `offset + i * stride`, multiples of 16 bytes.

        Who keeps the region knows which slots hold what, and checks it; here all count as ready, and nothing is written
        but by `Loader.store`.
        """
        check.require(slots > 0, "slots", slots, "at least 1")
        check.require(offset >= 0 and offset % 16 == 0, "offset", offset, "a multiple of 16")
        check.require(stride % 16 == 0 and stride >= layout.block_bytes, "stride", stride,
                      f"a multiple of 16 of at least {layout.block_bytes}")  # fmt: skip
        region, view = _tensor(buffer, offset + (slots - 1) * stride + layout.block_bytes)
        data = region.as_strided((slots, layout.block_bytes), (stride, 1), offset)
        return HostArena(layout, region, data, np.full(slots, READY, dtype=np.uint8), view)

    @property
    def source(self) -> Source:
        """Where the blocks are."""
        return Source(self.data.data_ptr(), self.stride)

    @property
    def pinned(self) -> bool:
        """Whether a GPU reads this memory by itself."""
        return self._registered or self.region.is_pinned()

    def register(self) -> None:
        """Pin and map memory that was not allocated pinned. Once; RuntimeError where the driver refuses."""
        if self.pinned:
            return
        from kernel_core.cuda import cuda_module

        cuda_module("gdr_swapin").register_host(at=self.region.data_ptr(), bytes=self.region.numel())
        self._registered = True

    def unregister(self) -> None:
        """Undo `register`, before the memory goes away. Refused while a lease is held."""
        with self._lock:
            held = int(self._leases.sum())
        check.require(held == 0, "arena", f"{held} leases held", "none: wait for the transfers")
        if self._registered:
            from kernel_core.cuda import cuda_module

            cuda_module("gdr_swapin").unregister_host(at=self.region.data_ptr())
            self._registered = False

    def state(self, slot: int) -> int:
        """EMPTY, WRITING or READY."""
        check.require(0 <= slot < self.slots, "slot", slot, f"0 to {self.slots - 1}")
        return int(self._states[slot])

    def begin_write(self, slots: Iterable[int]) -> None:
        """Mark slots as being written; refused, all of them, if one is leased or being written already."""
        ids = self.checked(slots)
        with self._lock:
            leased, writing = ids[self._leases[ids] > 0], ids[self._states[ids] == WRITING]
            check.require(not len(leased), "slots", f"leased slots {leased[:4].tolist()}", "slots that nobody loads")
            check.require(not len(writing), "slots", f"slots {writing[:4].tolist()} that are being written",
                          "slots that nobody writes")  # fmt: skip
            self._states[ids] = WRITING

    def end_write(self, slots: Iterable[int], *, valid: bool = True) -> None:
        """Publish what was written; `valid=False` leaves the slots empty."""
        ids = self.checked(slots)
        with self._lock:
            odd = ids[self._states[ids] != WRITING]
            check.require(not len(odd), "slots", f"slots {odd[:4].tolist()} that nobody writes", "slots being written")
            self._states[ids] = READY if valid else EMPTY

    @contextmanager
    def writing(self, slots: Iterable[int]) -> Iterator[torch.Tensor]:
        """`with arena.writing(ids) as data: data[ids] = ...`; an error inside leaves the slots empty."""
        ids = self.checked(slots)
        self.begin_write(ids)
        try:
            yield self.data
        except BaseException:
            self.end_write(ids, valid=False)
            raise
        self.end_write(ids)

    def lease(self, slots: np.ndarray) -> None:
        """Hold ready slots for reading; ValueError names one that is not ready, and then none is held."""
        with self._lock:
            odd = slots[self._states[slots] != READY]
            check.require(not len(odd), "slots", f"slots {odd[:4].tolist()} that are not written", "ready slots")
            self._count(slots, 1)

    def release(self, slots: np.ndarray) -> None:
        """Give back what `lease` took."""
        with self._lock:
            self._count(slots, -1)

    def _count(self, slots: np.ndarray, by: int) -> None:
        """A slot that comes twice counts twice. Loaders sort theirs; what grows strictly takes the short way."""
        if len(slots) < 2 or bool((slots[1:] > slots[:-1]).all()):
            self._leases[slots] += by
        else:
            np.add.at(self._leases, slots, by)

    def checked(self, slots: Iterable[int] | np.ndarray | torch.Tensor) -> np.ndarray:
        """Slots as int64; ValueError names one out of range."""
        return checked_ids("slots", slots, 0, self.slots)


def _tensor(buffer: Any, size: int) -> tuple[torch.Tensor, memoryview]:
    """A buffer's first `size` bytes as a tensor, and what keeps them alive."""
    view = memoryview(buffer).cast("B")
    check.require(not view.readonly, "buffer", "read-only memory", "writable memory")
    check.require(view.nbytes >= size, "buffer", f"{view.nbytes} bytes", f"at least {size}")
    region = torch.frombuffer(view, dtype=torch.uint8, count=size)
    check.require(region.data_ptr() % PAGE == 0, "buffer", "an address inside a page", "whole pages")
    return region, view


def _of_region(layout: BlockLayout, region: torch.Tensor, slots: int, owner: Any) -> HostArena:
    data = region[data_offset(slots) :].view(slots, layout.block_bytes)
    return HostArena(layout, region, data, states_of(region, slots).numpy(), owner)
