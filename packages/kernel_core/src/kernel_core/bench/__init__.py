"""Benchmark kit: describe an op's cases, time them beside their reference, and write ledger rows.

A file `bench/bench_<op>.py` of a package defines ``BENCHES: list[Bench]``; `fathom bench` finds and runs them.
"""

from kernel_core.bench.case import Bench, Case, Offer, Peer, Problem
from kernel_core.bench.ceilings import Ceilings, ceilings
from kernel_core.bench.cuda import cuda_ceilings, device_ledger, interleave_cuda
from kernel_core.bench.digest import source_digest
from kernel_core.bench.ledger import FIELDS, append_row, bound_us, ledger_row, read_rows
from kernel_core.bench.measure import check_case, run_case
from kernel_core.bench.timing import Timing, evict_caches, interleave, time_pair

__all__ = [
    "FIELDS",
    "Bench",
    "Case",
    "Ceilings",
    "Offer",
    "Peer",
    "Problem",
    "Timing",
    "append_row",
    "bound_us",
    "ceilings",
    "check_case",
    "cuda_ceilings",
    "device_ledger",
    "evict_caches",
    "interleave",
    "interleave_cuda",
    "ledger_row",
    "read_rows",
    "run_case",
    "source_digest",
    "time_pair",
]
