"""AscendC source that TileLang wrote for SIMT regions, run by host threads: regions one after another, cores in turn.

It shows indices and numbers, not races, and nothing of the compiler that takes such source.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

from kernel_core.testing.host import host_library

THREADS = Path(__file__).parents[2] / "mla_fp4" / "tests" / "host"
_HEAD = """#include <bit>
#include <limits>

#include "threads.hpp"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define __gm__
#define __ubuf__
#define __simt_vf__
#define __vector__
#define block_idx core
namespace tl::limits {
inline constexpr float kFloatInf = std::numeric_limits<float>::infinity(), kFloatNInf = -kFloatInf;
}
namespace cce {
struct dim3 {
  explicit dim3(int count) : threads(count) {}
  int threads;
};
}
enum Pipe { PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_S };
enum event_t : int {};
enum asc_store_l2_cache_mode : int {};
inline int core = 0;
inline std::vector<uint8_t> unified(1 << 18, 0xFF);
inline void asc_init() {}
inline void asc_sync_notify(Pipe, Pipe, event_t) {}
inline void asc_sync_wait(Pipe, Pipe, event_t) {}
inline void asc_syncthreads() { __syncthreads(); }
inline void asc_copy_ub2gm_align(uint8_t* to, const uint8_t* from, int bursts, int bytes, asc_store_l2_cache_mode, int,
                                 int) {
  if (bursts != 1) __builtin_trap();
  std::memcpy(to, from, static_cast<size_t>(bytes));
}
template <auto Region, typename... Given>
void asc_vf_call(cce::dim3 count, Given... given) {
  run_block(count.threads, unified.data(), 0, [=] { Region(given...); });
}
"""


class Program:
    """Compile `source` into `folder`; call it with tensors by the names of its arguments (more are ignored)."""

    def __init__(self, source: str, folder: Path) -> None:
        found = re.search(r'extern "C" __global__ __vector__ void (\w+)\(([^)]*)\) \{', source)
        assert found is not None, source[:2000]
        kinds, self.names = [], []
        for argument in found[2].split(", "):
            kind, name = argument.rsplit(" ", 1)
            kinds.append(kind)
            self.names.append(name)
        body = re.sub(r"^ *#.*$", "", source, flags=re.MULTILINE)
        body = body.replace("(__ubuf__ uint8_t *)0", "unified.data()")
        body = re.sub(r"\(\*\((\w+) \*\)\(&\((\w+)\)\)\)", r"std::bit_cast<\1>(\2)", body)
        given = ", ".join(f"({kind})a[{i}]" for i, kind in enumerate(kinds))
        text = f"""{_HEAD}{body}
extern "C" void run_program(int cores, void** a) {{
  for (core = 0; core < cores; ++core) {found[1]}({given});
}}
"""
        path = folder / f"{found[1]}_{len(list(folder.iterdir()))}.cpp"
        path.write_text(text)
        self._run = host_library(path, folder, THREADS).run_program

    def __call__(self, cores: int, **tensors: torch.Tensor) -> None:
        assert set(self.names) <= set(tensors), set(self.names) - set(tensors)
        for name, value in tensors.items():
            assert value.is_contiguous(), name
        self._run(cores, (ctypes.c_void_p * len(self.names))(*[tensors[n].data_ptr() for n in self.names]))
