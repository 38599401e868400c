"""The Ascend 950 counterparts of the kernel packages, in TileLang: same names, arguments and meaning."""

from cann_ops.errors import CannUnavailableError, NotLoweredError
from cann_ops.launch import host_emulation
from cann_ops.ops.attention import gather_window, sparse_attention, window_attention
from cann_ops.ops.experts import fused_experts, mx_linear, route, swiglu_quantize
from cann_ops.ops.indexer import index_scores, index_topk, select_top
from cann_ops.ops.rows import kv_rows, norm_quantize, store_index, store_main, store_window
from cann_ops.ops.streams import hc_coefficients, hc_mix, hc_step, hc_update
from cann_ops.registration import register
from cann_ops.runtime.available import is_available
from cann_ops.status import status

__all__ = [
    "CannUnavailableError",
    "NotLoweredError",
    "fused_experts",
    "gather_window",
    "hc_coefficients",
    "hc_mix",
    "hc_step",
    "hc_update",
    "host_emulation",
    "index_scores",
    "index_topk",
    "is_available",
    "kv_rows",
    "mx_linear",
    "norm_quantize",
    "route",
    "select_top",
    "sparse_attention",
    "status",
    "store_index",
    "store_main",
    "store_window",
    "swiglu_quantize",
    "window_attention",
]
__version__ = "0.1.0"

register()
