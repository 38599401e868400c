"""Memory that shows mistakes: poisoned contents, guard bytes around a tensor, an inaccessible page behind it."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys

import torch

_GUARD = 0xA5


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite with NaN (floats) or all bits set (bytes, integers, 8-bit floats: NaN or -1); returns the tensor."""
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        return tensor.fill_(math.nan)
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor


def poisoned(shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A new poisoned CPU tensor: what a kernel leaves unwritten, or reads without right, shows."""
    return poison(torch.empty(shape, dtype=dtype))


class Guarded:
    """A poisoned tensor between guard bytes.

    >>> out = Guarded((4, 8), torch.float32)
    >>> kernel(..., out=out.tensor); out.check()
    """

    def __init__(self, shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32, *, guard: int = 256) -> None:
        size = torch.empty((), dtype=dtype).element_size()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._bytes = math.prod(shape) * size
        self._guard = -(-guard // 64) * 64
        self._buffer = torch.full((self._bytes + 2 * self._guard,), _GUARD, dtype=torch.uint8)
        inner = self._buffer[self._guard : self._guard + self._bytes]
        self.tensor = poison(inner.view(dtype).view(shape)) if self._bytes else torch.empty(shape, dtype=dtype)

    def check(self, name: str = "tensor") -> None:
        """Raise `AssertionError` naming the first guard byte that was written."""
        start, end = self._guard, self._guard + self._bytes
        damaged = (self._buffer != _GUARD).nonzero().flatten()
        outside = damaged[(damaged < start) | (damaged >= end)]
        if len(outside):
            at = int(outside[0])
            where = f"{start - at} bytes before its start" if at < start else f"{at - end} bytes behind its end"
            raise AssertionError(f"{name}: {len(outside)} guard bytes written, first {where}")


def at_page_end(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last of a page, with an inaccessible page behind: reading on crashes the process.

    Linux only; elsewhere a plain copy. The pages live as long as the tensor.
    """
    source = tensor.contiguous()
    size = source.numel() * source.element_size()
    if not sys.platform.startswith("linux") or size == 0:
        return source.clone()
    page = mmap.PAGESIZE
    body = -(-size // page) * page
    pages = mmap.mmap(-1, body + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + body), ctypes.c_size_t(page), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=body - size)
    copy.copy_(source.reshape(-1).view(torch.uint8))
    return copy.view(source.dtype).view(source.shape)
