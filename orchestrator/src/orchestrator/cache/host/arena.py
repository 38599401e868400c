"""Shared memory of the host tier: slots that each hold one block object. No locks: bytes answer for themselves."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from orchestrator.cache.block_object import HEADER_BYTES, Header, WrongBytes, parse, seal, verify
from orchestrator.cache.store.base import At, nowhere

_MAGIC = b"FTHMARN\x01"
PAGE = 4096
_HEAD = struct.Struct("<8s32sQQ")


class HostArena:
    """A file in memory (or anywhere) that the engine and the I/O process map.

    A slot holds header and payload of `block_object`; the payload begins 128 bytes after a page boundary. A slot is
    written by the one process that it was given to. A reader copies and then checks key, generation and checksum, so
    a slot that changed under it, or whose writer died, reads as a miss.
    """

    def __init__(self, path: Path, fd: int, layout: bytes, slots: int, block_bytes: int) -> None:
        self.path, self.layout, self.slots, self.block_bytes = path, layout, slots, block_bytes
        self.stride = -(-(HEADER_BYTES + block_bytes) // PAGE) * PAGE
        self._map = mmap.mmap(fd, PAGE + slots * self.stride)
        self.view = memoryview(self._map)
        self.at: At = nowhere

    @staticmethod
    def create(path: Path, layout: bytes, slots: int, block_bytes: int) -> HostArena:
        """Make the file, or take over the one of an earlier life if layout and sizes are the same.

        Raises OSError (ENOSPC) where the memory is not there.
        """
        if slots < 1 or block_bytes < 1:
            raise ValueError(f"slots, block_bytes: got {slots}, {block_bytes}, allowed are at least 1")
        head = _HEAD.pack(_MAGIC, layout, slots, block_bytes)
        stride = -(-(HEADER_BYTES + block_bytes) // PAGE) * PAGE
        if path.exists() and _head(path) != head:
            path.unlink()  # engines that still map the old one keep it
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, PAGE + slots * stride)
            os.pwrite(fd, head, 0)
            return HostArena(path, fd, layout, slots, block_bytes)
        finally:
            os.close(fd)

    @staticmethod
    def attach(path: Path) -> HostArena:
        """Map an arena that another process made. Raises ValueError for other files."""
        fd = os.open(path, os.O_RDWR)
        try:
            head = os.pread(fd, _HEAD.size, 0)
            if len(head) < _HEAD.size or head[:8] != _MAGIC:
                raise ValueError(f"path: got {path}, allowed is a host arena of this version")
            _, layout, slots, block_bytes = _HEAD.unpack(head)
            return HostArena(path, fd, layout, slots, block_bytes)
        finally:
            os.close(fd)

    def write(self, slot: int, key: bytes, parent: bytes, depth: int, generation: int, payload: bytes) -> None:
        """Fill a slot that the caller was given."""
        if len(payload) != self.block_bytes:
            raise ValueError(f"payload: got {len(payload)} bytes, allowed are {self.block_bytes}")
        start, half = self._start(slot) + HEADER_BYTES, len(payload) // 2
        self.at("slot.erase")
        self.erase(slot)
        self.at("slot.payload")
        self.view[start : start + half] = payload[:half]
        self.at("slot.half")
        self.view[start + half : start + len(payload)] = payload[half:]
        self.at("slot.header")
        self.view[start - HEADER_BYTES : start] = seal(self.layout, key, parent, depth, generation, payload)
        self.at("slot.done")

    def erase(self, slot: int) -> None:
        """Make the slot's bytes no block's."""
        start = self._start(slot)
        self.view[start : start + 8] = bytes(8)

    def read(self, slot: int, key: bytes, generation: int) -> bytes:
        """A verified copy of the payload. Raises `WrongBytes`."""
        start = self._start(slot)
        end = start + HEADER_BYTES + self.block_bytes
        return verify(self.view[start:end], self.layout, key, generation)

    def payload(self, slot: int) -> memoryview:
        """The payload's memory itself, for copy engines; ask `holds` after the copy."""
        start = self._start(slot) + HEADER_BYTES
        return self.view[start : start + self.block_bytes]

    def holds(self, slot: int, key: bytes, generation: int) -> bool:
        """Is this still the slot's block, by its header?"""
        try:
            header = self._header(slot)
        except WrongBytes:
            return False
        return header.key == key and header.generation == generation

    def survey(self) -> Iterator[tuple[int, Header]]:
        """Slots whose bytes verify, with their headers: what a new I/O process takes over."""
        for slot in range(self.slots):
            try:
                header = self._header(slot)
                self.read(slot, header.key, header.generation)
            except WrongBytes:
                continue
            yield slot, header

    def close(self) -> None:
        """Unmap; the file stays for the other process."""
        self.view.release()
        self._map.close()

    def _header(self, slot: int) -> Header:
        start = self._start(slot)
        return parse(bytes(self.view[start : start + HEADER_BYTES]))

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot: got {slot}, allowed are 0 to {self.slots - 1}")
        return PAGE + slot * self.stride


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD.size)
