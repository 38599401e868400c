"""CUDA source that TileLang wrote, run by host threads: one thread of the host for each of a block, blocks in turn."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

from kernel_core.testing.host import host_library

THREADS = Path(__file__).parents[2] / "mla_fp4" / "tests" / "host"
_HEAD = """#include <bit>

#include "threads.hpp"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
using uint = unsigned;
using uchar = unsigned char;
#define CUDART_INF_F __builtin_inff()
"""


class Program:
    """Compile `source` (without library templates) into `folder`; call it with tensors by their arguments' names."""

    def __init__(self, source: str, folder: Path) -> None:
        found = re.search(r"__launch_bounds__\((\d+), \d+\) (\w+)\(([^)]*)\) \{", source)
        assert found is not None, source[:2000]
        self.threads, kernel = int(found[1]), found[2]
        kinds, self.names = [], []
        for argument in found[3].split(", "):
            kind, name = argument.replace(" __restrict__", "").rsplit(" ", 1)
            kinds.append(kind)
            self.names.append(name)
        body = re.sub(r"^ *#.*$", "", source[source.index('extern "C"') :], flags=re.MULTILINE)
        body = re.sub(r"extern __shared__ [^;]*;", "uchar* buf_dyn_shmem = block->shared;", body)
        # its casts by pointer are nvcc's; here the bits are copied
        body = re.sub(r"\(\*\((\w+) \*\)\(&\((\w+)\)\)\)", r"std::bit_cast<\1>(\2)", body)
        given = ", ".join(f"({kind})a[{i}]" for i, kind in enumerate(kinds))
        text = f"""{_HEAD}{body}
extern "C" void run_program(int blocks, int threads, void** a) {{
  std::vector<uint8_t> shared(1 << 18, 0x5A);
  for (int i = 0; i < blocks; ++i)
    run_block(threads, shared.data(), static_cast<unsigned>(i), [&] {{ {kernel}({given}); }});
}}
"""
        path = folder / f"{kernel}_{len(list(folder.iterdir()))}.cpp"
        path.write_text(text)
        self._run = host_library(path, folder, THREADS).run_program

    def __call__(self, blocks: int, **tensors: torch.Tensor) -> None:
        assert set(tensors) == set(self.names), (set(tensors) ^ set(self.names), self.names)
        for name, value in tensors.items():
            assert value.is_contiguous(), name
        given = (ctypes.c_void_p * len(self.names))(*[tensors[n].data_ptr() for n in self.names])
        self._run(blocks, self.threads, given)
