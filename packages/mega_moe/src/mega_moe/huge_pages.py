"""Large pages for large weights: reading them in a stream then needs one translation for each 2 MiB, not each 4 KiB."""

from __future__ import annotations

import ctypes
import sys

import torch

_PAGE = 1 << 21
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def advise_huge_pages(*tensors: torch.Tensor) -> int:
    """Ask the operating system to put CPU tensors on 2 MiB pages; returns the bytes for which it agreed.

    Contents and addresses stay. Best on memory that nobody has written yet; memory in use is moved on Linux 6.1 and
    later. A wish only: 0 on other systems, on tensors under 2 MiB and where the system declines. Speed alone
    depends on it.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    agreed = 0
    for tensor in tensors:
        if tensor.device.type != "cpu":
            continue
        begin = -(-tensor.data_ptr() // _PAGE) * _PAGE
        size = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE - begin
        if size <= 0:
            continue
        wished = madvise(begin, size, _MADV_HUGEPAGE) == 0
        moved = madvise(begin, size, _MADV_COLLAPSE) == 0
        agreed += size if wished or moved else 0
    return agreed
