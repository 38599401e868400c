"""The ops as `torch.ops.cann_ops.*`, with fakes for torch.compile.

An implementation is the public function itself, for every device: it runs the kernel on an NPU, and says what is
missing elsewhere, instead of the dispatcher's message that the op has no such backend.
"""

from __future__ import annotations

import torch

from cann_ops.ops import attention, experts, indexer, rows, streams
from kernel_core import formats, register_op

_WINDOW = (
    "Tensor q, Tensor new_rows, Tensor ring, Tensor ring_slot, Tensor cu_seqlens, Tensor start_pos, Tensor lower, "
    "int window"
)
_BYTES = {"main": formats.main_row_bytes, "window": formats.window_row_bytes, "index": formats.index_row_bytes}


def _mx(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = x.new_empty(x.shape[0], width, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(x.shape[0], width // 32, dtype=torch.uint8)


def _coefficients(X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return X.new_empty(X.shape[0], 4), X.new_empty(X.shape[0], 4), X.new_empty(X.shape[0], 4, 4)


def register() -> None:
    """Publish every op. Called once, when the package is imported."""
    for schema, op, fake in _TABLE:
        register_op("cann_ops", schema, op, fake)


_TABLE = (
    (
        "kv_rows(Tensor x, Tensor? weight, float eps, Tensor? rope, *, str format='main', bool round_bf16=False) "
        "-> Tensor",
        rows.kv_rows,
        lambda x, weight, eps, rope, *, format="main", round_bf16=False: x.new_empty(
            x.shape[0], _BYTES[format](x.shape[1]), dtype=torch.uint8
        ),
    ),
    (
        "norm_quantize(Tensor x, Tensor? weight, float eps=1e-06) -> (Tensor, Tensor)",
        rows.norm_quantize,
        lambda x, weight, eps=1e-6: _mx(x, x.shape[1]),
    ),
    ("store_main(Tensor rows, Tensor(a!) pages, Tensor slots) -> ()", rows.store_main, lambda *_: None),
    (
        "store_index(Tensor rows, Tensor(a!) pages, Tensor slots, int rows_per_block) -> ()",
        rows.store_index,
        lambda *_: None,
    ),
    (
        "store_window(Tensor new_rows, Tensor(a!) ring, Tensor ring_slot, Tensor cu_seqlens, Tensor start_pos, "
        "Tensor floor) -> ()",
        rows.store_window,
        lambda *_: None,
    ),
    (
        f"window_attention({_WINDOW}, Tensor sink, Tensor rope, float scale, *, bool block=False) -> Tensor",
        attention.window_attention,
        lambda q, *_, **__: torch.empty_like(q),
    ),
    (
        f"sparse_attention({_WINDOW}, Tensor pages, int rows_per_block, Tensor block_table, Tensor indices, "
        "Tensor sink, Tensor rope, float scale) -> Tensor",
        attention.sparse_attention,
        lambda q, *_: torch.empty_like(q),
    ),
    (
        "index_scores(Tensor q, Tensor head_weights, Tensor pages, int rows_per_block, Tensor block_table, "
        "Tensor cu_seqlens, Tensor visible, *, int longest) -> Tensor",
        indexer.index_scores,
        lambda q, *_, longest: q.new_empty(q.shape[0], longest),
    ),
    (
        "select_top(Tensor scores, Tensor visible, int k) -> Tensor",
        indexer.select_top,
        lambda scores, visible, k: visible.new_empty(scores.shape[0], k),
    ),
    (
        "route(Tensor logits, Tensor bias, int top_k, *, Tensor? bias_vl=None, Tensor? is_image=None, "
        "float routed_scale=1.5) -> (Tensor, Tensor)",
        experts.route,
        lambda logits, bias, top_k, **_: (
            logits.new_empty(logits.shape[0], top_k, dtype=torch.int32),
            logits.new_empty(logits.shape[0], top_k),
        ),
    ),
    (
        "swiglu_quantize(Tensor gate_up, Tensor weights, *, float limit=10.0) -> (Tensor, Tensor)",
        experts.swiglu_quantize,
        lambda gate_up, weights, *, limit=10.0: _mx(gate_up, gate_up.shape[1] // 2),
    ),
    (
        "mx_linear(Tensor codes, Tensor scales, Tensor first, Tensor weight, Tensor weight_scales) -> Tensor",
        experts.mx_linear,
        lambda codes, scales, first, weight, weight_scales: codes.new_empty(
            codes.shape[0], weight.shape[1], dtype=torch.float32
        ),
    ),
    (
        "fused_experts(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor s13, Tensor w2, Tensor s2, *, "
        "float limit=10.0) -> Tensor",
        experts.fused_experts,
        lambda x, *_, **__: torch.empty_like(x),
    ),
    (
        "hc_coefficients(Tensor X, Tensor fn, Tensor base, Tensor scale, *, float norm_eps=1e-20, float hc_eps=1e-06, "
        "int iters=20) -> (Tensor, Tensor, Tensor)",
        streams.hc_coefficients,
        lambda X, *_, **__: _coefficients(X),
    ),
    (
        "hc_mix(Tensor X, Tensor pre, Tensor? norm_weight, float eps=1e-20) -> Tensor",
        streams.hc_mix,
        lambda X, *_: X.new_empty(X.shape[0], X.shape[2]),
    ),
    ("hc_update(Tensor(a!) X, Tensor y, Tensor post, Tensor comb) -> ()", streams.hc_update, lambda *_: None),
)
