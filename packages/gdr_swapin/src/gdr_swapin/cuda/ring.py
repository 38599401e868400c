"""The staging area on the device: a ring of parts, with events that say when a part is full and when it is empty."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdr_swapin.cuda.device import Device


class StagingRing:
    """A part is filled again only behind the kernel that emptied it, which the compiled module sees to."""

    def __init__(self, device: Device, part_bytes: int, parts: int) -> None:
        self._device, self._parts = device, parts
        self._area = device.memory(part_bytes * parts)
        self._events = device.order_events(2 * parts)  # filled, then emptied
        self._rounds, self._lost = 0, ""
        first = self._events.ctypes.data
        self._fixed = {
            "area": self._area.data_ptr(),
            "part_bytes": part_bytes,
            "parts": parts,
            "filled": first,
            "emptied": first + 8 * parts,
        }

    def arguments(self, streams: int) -> dict[str, int]:
        """The area and where in it the next call starts; rounds take turns on so many streams."""
        if self._lost:
            raise RuntimeError(f"the staging area is lost: {self._lost}")
        return {**self._fixed, "part": self._rounds % self._parts, "turn": self._rounds % streams}

    def advance(self, rounds: int) -> None:
        """So many parts were taken."""
        self._rounds += rounds

    def empty_behind(self, stream: Any) -> None:
        """All parts are empty once everything queued on the stream is over. Never raises: without it none is used."""
        try:
            self._device.module.record_events(
                events=self._fixed["emptied"], count=self._parts, stream=stream.cuda_stream
            )
        except Exception as error:  # who fills a part now could overwrite what a kernel still reads
            self._lost = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Free the events; nothing may be queued any more."""
        if len(self._events):
            self._device.module.free_events(events=self._events.ctypes.data, count=len(self._events))
            self._events = np.zeros(0, dtype=np.uint64)
