"""Facts read from a lowered kernel, and what they have to be: kind of core, memories, flags, calls.

A gate for what a compiler that is not here would refuse, or a device would hang on. It does not prove either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cann_ops.lowering import Lowered

KIB = 1024
LIMITS = {"UB": 248 * KIB, "L1": 512 * KIB, "L0A": 64 * KIB, "L0B": 64 * KIB, "L0C": 256 * KIB}
"""Bytes of each memory of a core of the Ascend 950 (dav-3510); of the unified buffer what SIMD code may use."""
UB_WITH_SIMT = 216 * KIB  # the rest is data cache of the threads
FLAGS = 8  # of a pair of pipes
MOST_THREADS = 2048

_CALL = re.compile(r"\b(asc_\w+|ascend_\w+|simd_inst::\w+)(?=[<(])")
_SYNC = re.compile(r"asc_sync_(notify|wait)\((PIPE_\w+), (PIPE_\w+), static_cast<event_t>\((.*?)\)\)")
_CROSS = re.compile(r"asc_sync_intra_(arrive|wait)\(PIPE_\w+, (\d+)\)")
_L1_PRODUCT = re.compile(r"ascend_(?:blockscaled_)?gemm_l1<(\d+), (\d+), (\d+), (\d+), (?:true|false), (?:\d+, )?(\w+)")
_THREADS = re.compile(r"cce::dim3\((\d+)")
_BYTES = {"float": 4.0, "bfloat16_t": 2.0, "half": 2.0, "float4_e2m1x2_t": 0.5}


@dataclass(frozen=True)
class Structure:
    """What a kernel's text shows.

    Attributes:
        core: "__vector__", "__cube__" or "__mix__(1, 2)".
        simt: it has regions of threads.
        memory: bytes of "UB", "L1", "L0A", "L0B", "L0C"; of L0A and L0B with the two halves that a product of whole L1
            tiles takes for itself.
        calls: names of device functions that it calls.
        flags: numbers of flags that stand in the text as constants, by (from, to) pipe.
        unpaired: pairs of pipes that are notified and never waited for, or the reverse; crossing ones as "cross N".
        threads: the largest region of threads.
    """

    core: str
    simt: bool
    memory: dict[str, int]
    calls: frozenset[str]
    flags: dict[tuple[str, str], frozenset[int]]
    unpaired: tuple[str, ...]
    threads: int


def read(lowered: Lowered) -> Structure:
    """The structure of a lowered kernel."""
    source = lowered.source
    notified: dict[tuple[str, str], set[str]] = {}
    numbers: dict[tuple[str, str], set[int]] = {}
    for word, first, second, number in _SYNC.findall(source):
        notified.setdefault((first, second), set()).add(word)
        if number.isdigit():
            numbers.setdefault((first, second), set()).add(int(number))
    crossing: dict[int, set[str]] = {}
    for word, number in _CROSS.findall(source):
        crossing.setdefault(int(number) % 16, set()).add(word)  # 16 and more: the same flag of the second vector core
    unpaired = [f"{a} to {b}" for (a, b), words in notified.items() if len(words) == 1]
    unpaired += [f"cross {number}" for number, words in crossing.items() if len(words) == 1]
    memory = dict(lowered.memory)
    for m, _k, n, step, kind in _L1_PRODUCT.findall(source):
        size = _BYTES.get(kind, 1.0)
        for name, rows in (("L0A", int(m)), ("L0B", int(n))):
            memory[name] = max(memory.get(name, 0), int(2 * rows * int(step) * size))
    return Structure(
        lowered.core,
        "__simt_vf__" in source,
        memory,
        frozenset(_CALL.findall(source)),
        {pipes: frozenset(found) for pipes, found in numbers.items()},
        tuple(sorted(unpaired)),
        max((int(count) for count in _THREADS.findall(source)), default=0),
    )


def problems(lowered: Lowered, core: str, calls: tuple[str, ...] = ()) -> list[str]:
    """What is wrong with a kernel that should have this kind of core and make these calls; empty if nothing is."""
    found = read(lowered)
    said = []
    if found.core != core:
        said.append(f"core: got {found.core}, allowed is {core}")
    limits = LIMITS | ({"UB": UB_WITH_SIMT} if found.simt else {})
    for name, used in sorted(found.memory.items()):
        if used > limits[name]:
            said.append(f"{name}: got {used} bytes, allowed are {limits[name]}")
    for (first, second), used_flags in found.flags.items():
        if max(used_flags) >= FLAGS:
            said.append(f"flags {first} to {second}: got {max(used_flags)}, allowed are 0 to {FLAGS - 1}")
    said += [f"flags {pipes}: set or waited for alone" for pipes in found.unpaired]
    said += [f"calls: {call} is missing" for call in calls if call not in found.calls]
    if found.threads > MOST_THREADS:
        said.append(f"threads: got {found.threads}, allowed are up to {MOST_THREADS}")
    return said
