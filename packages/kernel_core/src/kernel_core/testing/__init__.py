"""Test kit of the kernel packages: comparison with metrics, hostile memory, invariance, shapes at the edges.

Needs pytest only where a helper is a pytest mark.
"""

from kernel_core.testing.compare import Metrics, assert_bitwise, assert_close, calc_diff, compare, row_max
from kernel_core.testing.invariance import assert_repeatable, assert_row_invariant, assert_thread_invariant
from kernel_core.testing.memory import Guarded, at_page_end, poison, poisoned
from kernel_core.testing.shapes import RaggedBatch, edge_sizes, ragged_batches
from kernel_core.testing.variants import each_isa

__all__ = [
    "Guarded",
    "Metrics",
    "RaggedBatch",
    "assert_bitwise",
    "assert_close",
    "assert_repeatable",
    "assert_row_invariant",
    "assert_thread_invariant",
    "at_page_end",
    "calc_diff",
    "compare",
    "each_isa",
    "edge_sizes",
    "poison",
    "poisoned",
    "ragged_batches",
    "row_max",
]
