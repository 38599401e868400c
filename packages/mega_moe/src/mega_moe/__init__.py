"""Router, fused experts with MXFP4 weights and dense products on packed weights."""

import torch  # noqa: F401  (first, so that one OpenMP runtime is mapped)

from mega_moe.huge_pages import advise_huge_pages
from mega_moe.ops.dense import grouped_linear, linear
from mega_moe.ops.experts import fused_experts
from mega_moe.ops.packed import pack_for, packed_experts, packed_slots
from mega_moe.ops.routing import route
from mega_moe.weights import SharedExpert, stack_experts

__all__ = [
    "SharedExpert",
    "advise_huge_pages",
    "fused_experts",
    "grouped_linear",
    "linear",
    "pack_for",
    "packed_experts",
    "packed_slots",
    "route",
    "stack_experts",
]
__version__ = "0.1.0"
