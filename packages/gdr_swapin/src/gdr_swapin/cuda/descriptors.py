"""Block ids where kernels read them. A slot belongs to one transfer until its last kernel is over."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdr_swapin.cuda.device import Device
from gdr_swapin.transfer import Busy


@dataclass(frozen=True)
class Ids:
    """Addresses of `int32[n]` on the device."""

    slot: int
    slots: int
    blocks: int

    def behind(self, n: int) -> Ids:
        """Without the first n."""
        return Ids(self.slot, self.slots + 4 * n, self.blocks + 4 * n)


class Descriptors:
    """A ring of pinned buffers and their device copies: written again only after `release`."""

    def __init__(self, device: Device, depth: int, capacity: int) -> None:
        self._module, self._bytes = device.module, 8 * capacity
        self._memory = device.pinned_ids(depth, 2 * capacity), device.ids(depth, 2 * capacity)
        self._host, self._on_device = (memory.data_ptr() for memory in self._memory)
        self._free = list(range(depth))
        self._lock = threading.Lock()

    def acquire(self, slots: np.ndarray, blocks: np.ndarray, stream: Any) -> Ids:
        """Queue the upload of `int64[n]` each on `stream`; kernels behind it there see the ids."""
        with self._lock:
            if not self._free:
                raise Busy("no descriptor buffer is free")
            at = self._free.pop()
        device, count = self._on_device + at * self._bytes, len(slots)
        try:
            self._module.upload_ids(
                pinned=self._host + at * self._bytes, device=device, slots=slots.ctypes.data, blocks=blocks.ctypes.data,
                count=count, stream=stream.cuda_stream,
            )  # fmt: skip
        except BaseException:
            self.release(at)
            raise
        return Ids(at, device, device + 4 * count)

    def release(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)
