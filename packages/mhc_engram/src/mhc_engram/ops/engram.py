"""Engram: hashed n-gram rows of a large table, added to the streams through a gate.

On an NVIDIA GPU all of it runs in kernels; a table may then lie in pinned host memory. What stands in offsets, primes
and row numbers is not checked there, as that would wait for the device: a row that the table does not have gives NaN.
"""

from __future__ import annotations

import torch

from kernel_core import elsewhere, register_op, use_reference
from kernel_core.check import require
from kernel_core.check import tensor as check_tensor
from mhc_engram import cuda, reference
from mhc_engram.ops.native import native

F32, I64 = torch.float32, torch.int64
_GROUP = 32


def engram_rows(
    mapped: torch.Tensor,
    dead: torch.Tensor,
    history: torch.Tensor,
    cu_seqlens: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad_mapped: int,
) -> torch.Tensor:
    """Table rows of each token's n-grams, int64 [T, orders * heads]; -1 at a dead (image) position.

    mapped int64 [T]: ids after the token map (ignored where dead); dead bool [T]; history int64 [B, orders]:
    mapped ids at positions start-1, start-2, ... of each request, -1 where there is none or it is dead;
    cu_seqlens int32 [B+1]; multipliers int64 [orders+1]; primes, offsets int64 [orders*heads].

    Slot s holds the id s positions back; from the first missing or dead position on, all further slots hold
    `pad_mapped`. rolling = id0 m0, then for each order rolling ^= id_s m_s and
    row = rolling mod prime + offset for each head (64-bit, wrapping; the remainder is never negative).
    Because of `history`, cutting a sequence into chunks changes nothing.
    """
    check_tensor("multipliers", multipliers, dtype=I64, shape=(None,))
    orders = multipliers.shape[0] - 1
    require(orders >= 1, "multipliers", orders + 1, "2 or more")
    check_tensor("mapped", mapped, dtype=I64, shape=(None,))
    T = mapped.shape[0]
    check_tensor("dead", dead, dtype=torch.bool, shape=(T,))
    check_tensor("cu_seqlens", cu_seqlens, dtype=torch.int32, shape=(None,))
    B = cu_seqlens.shape[0] - 1
    require(B >= 0, "cu_seqlens", "no entry", "one entry more than requests")
    check_tensor("history", history, dtype=I64, shape=(B, orders))
    check_tensor("primes", primes, dtype=I64, shape=(None,))
    columns = primes.shape[0]
    require(columns > 0 and columns % orders == 0, "primes", columns, f"a multiple of {orders} orders")
    check_tensor("offsets", offsets, dtype=I64, shape=(columns,))
    where = "library" if use_reference() else elsewhere("mhc_engram.engram_rows", mapped, kernels=True)
    if where == "cuda":
        return cuda.engram_rows(mapped, dead, history, cu_seqlens, multipliers, primes, offsets, pad_mapped)
    if where:
        return reference.engram_rows(mapped, dead, history, cu_seqlens, multipliers, primes, offsets, pad_mapped)
    out = torch.empty(T, columns, dtype=I64)
    # fmt: off
    problem = native.engram_rows(B, T, orders + 1, columns // orders, mapped.data_ptr(), dead.data_ptr(),
                                 history.data_ptr(), cu_seqlens.data_ptr(), multipliers.data_ptr(), primes.data_ptr(),
                                 offsets.data_ptr(), pad_mapped, out.data_ptr())
    # fmt: on
    if problem == "cu_seqlens":
        require(False, "cu_seqlens", cu_seqlens.tolist(), f"0 to {T}, never falling")
    if problem == "primes":
        require(False, "primes", primes.tolist(), "positive numbers")
    return out


def engram_gather(
    table: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Looked-up rows side by side, float32 [T, C * dim] (exact, also in bfloat16); row -1 gives zeros.

    table float8_e4m3fn [R, dim]; scale uint8 [R, dim / 32], the exponent byte of 2^(b - 127) for 32 values;
    rows int64 [T, C], each -1 or below R (ValueError otherwise, on a CPU). With rows on an NVIDIA GPU, table and
    scale lie there too or both in pinned host memory, and only the rows asked for cross the link.
    """
    check_tensor("table", table, dtype=torch.float8_e4m3fn, shape=(None, None))
    R, dim = table.shape
    require(dim > 0 and dim % _GROUP == 0, "table", f"rows of {dim}", f"rows of a multiple of {_GROUP} values")
    check_tensor("scale", scale, dtype=torch.uint8, shape=(R, dim // _GROUP))
    check_tensor("rows", rows, dtype=I64, shape=(None, None))
    T, C = rows.shape
    if out is not None:
        check_tensor("out", out, dtype=F32, shape=(T, C * dim))
    where = elsewhere("mhc_engram.engram_gather", rows, kernels=True)
    if not (table.is_cpu or table.device == rows.device):
        require(False, "table", f"a tensor on {table.device}", f"{rows.device}, or pinned host memory")
    if where == "cuda" and not use_reference() and cuda.fits_engram_gather(table, rows, out):
        return cuda.engram_gather(table, scale, rows, out)
    if where:
        value = reference.engram_gather(table, scale, rows)
        return value if out is None else out.copy_(value)
    bad = native.first_row_outside(rows.data_ptr(), T * C, R)
    if bad >= 0:
        require(False, "rows", f"{rows.flatten()[bad].item()} at {divmod(bad, C)}", f"-1 to {R - 1}")
    if use_reference():
        value = reference.engram_gather(table, scale, rows)
        return value if out is None else out.copy_(value)
    result = torch.empty(T, C * dim, dtype=F32) if out is None else out
    native.engram_gather(T * C, dim, table.data_ptr(), scale.data_ptr(), rows.data_ptr(), result.data_ptr())
    return result


def engram_inject(
    X: torch.Tensor, kv: torch.Tensor, qk_weight: torch.Tensor, dead: torch.Tensor | None = None, eps: float = 1e-20
) -> None:
    """Add the Engram value to the streams, in place: X[j] += gate[j] value; a dead row stays as it is.

    X float32 [T, n, d]; kv float32 [T, (n+1) d]: a key for each stream, then the value; qk_weight float32 [n, d]:
    the product of query and key norm weights; dead bool [T].

    dot = sum(X[j] qk_weight[j] key[j]) rsqrt(mean(X[j]^2) + eps) rsqrt(mean(key[j]^2) + eps) / sqrt(d);
    gate = sigmoid(sign(dot) sqrt(max(|dot|, 1e-6))).
    """
    check_tensor("X", X, dtype=F32, shape=(None, None, None))
    T, n, d = X.shape
    require(d > 0 and d % 16 == 0, "X", f"{d} channels", "a multiple of 16 channels")
    check_tensor("kv", kv, dtype=F32, shape=(T, (n + 1) * d))
    check_tensor("qk_weight", qk_weight, dtype=F32, shape=(n, d))
    if dead is not None:
        check_tensor("dead", dead, dtype=torch.bool, shape=(T,))
    where = "library" if use_reference() else elsewhere("mhc_engram.engram_inject", X, kernels=True)
    if where == "cuda" and cuda.fits_engram_inject(X, kv, qk_weight):
        return cuda.engram_inject(X, kv, qk_weight, dead, eps)
    if where:
        return reference.engram_inject(X, kv, qk_weight, dead, eps)
    mask = 0 if dead is None else dead.data_ptr()
    native.engram_inject(T, n, d, X.data_ptr(), kv.data_ptr(), qk_weight.data_ptr(), mask, eps)
    return None


register_op(
    "mhc_engram",
    "engram_rows(Tensor mapped, Tensor dead, Tensor history, Tensor cu_seqlens, Tensor multipliers, Tensor primes, "
    "Tensor offsets, int pad_mapped) -> Tensor",
    engram_rows,
    lambda mapped, dead, history, cu_seqlens, multipliers, primes, offsets, pad_mapped: mapped.new_empty(
        mapped.shape[0], primes.shape[0]
    ),
)
register_op(
    "mhc_engram",
    "engram_gather(Tensor table, Tensor scale, Tensor rows) -> Tensor",
    engram_gather,
    lambda table, scale, rows: rows.new_empty(rows.shape[0], rows.shape[1] * table.shape[1], dtype=F32),
)
register_op(
    "mhc_engram",
    "engram_inject(Tensor(a!) X, Tensor kv, Tensor qk_weight, Tensor? dead=None, float eps=1e-20) -> ()",
    engram_inject,
    lambda X, kv, qk_weight, dead=None, eps=1e-20: None,
)
