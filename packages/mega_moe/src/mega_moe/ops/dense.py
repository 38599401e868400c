"""Dense products on weights as stored: FP8 with block scales, bfloat16 or float32.

On an NVIDIA GPU a kernel takes FP8 weights whose columns are a multiple of 64: they stream through registers, x stands
for itself as three bfloat16 numbers, and sums are float32, so that the error is again that of a float32 product and a
row's bits do not depend on the other rows. Only with `reproducible=False` many rows take PyTorch's bfloat16 product
instead, on the same three numbers and a bfloat16 copy of the weight. Other weights run in PyTorch's operators on a
float32 copy made at each call.
"""

from __future__ import annotations

import torch

import kernel_core
from kernel_core import check
from mega_moe import library, reference
from mega_moe.cuda import linear as cuda_linear
from mega_moe.native import native

_FEW = 64  # rows for which the kernel, bound by the weight's bytes, is the faster path
_FORMATS = {torch.float8_e4m3fn: 1, torch.bfloat16: 2, torch.float32: 3}


def _explain(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor | None, groups: int | None
) -> None:
    """Raise for the first argument that is wrong. Runs only when the quick test of a call has failed."""
    check.tensor("weight", weight, dtype=tuple(_FORMATS), shape=(None, None))
    rows, columns = weight.shape
    if weight.dtype == torch.float8_e4m3fn:
        if scale is None:
            raise ValueError("scale: got None, allowed is a uint8 tensor, one UE8M0 byte for each 32 x 32 block")
        check.tensor("scale", scale, dtype=torch.uint8, shape=((rows + 31) // 32, (columns + 31) // 32))
    else:
        check.require(scale is None, "scale", "a tensor", f"None for a weight of {weight.dtype}")
    if groups is None:
        check.tensor("x", x, dtype=torch.float32, shape=(None, columns))
        shape: tuple[int, ...] = (x.shape[0], rows)
    else:
        check.tensor("x", x, dtype=torch.float32, shape=(None, None, columns))
        groups = x.shape[1]
        allowed = f"a multiple of the {groups} groups of x"
        check.require(groups > 0 and rows % groups == 0, "weight", f"{rows} rows", allowed)
        shape = (x.shape[0], groups, rows // groups)
    if out is not None:
        check.tensor("out", out, dtype=torch.float32, shape=shape)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    reproducible: bool = True,
) -> torch.Tensor:
    """`x @ weight.T` on weights as they are stored, without expanding them.

    x: float32 [T, i]; T may be 0.
    weight: [o, i], float8_e4m3fn with scale uint8 [ceil(o/32), ceil(i/32)] (value = e4m3 * 2^(scale - 127)),
        or bfloat16 or float32 with scale None.
    out: float32 [T, o], optional, must not overlap the inputs.
    reproducible: False lets a GPU choose the product by T, for more than 64 rows; a CPU does not need it.
    Returns float32 [T, o]. Every format is exact in float32 and sums are float32, so the error is that of a
    float32 product. On a CPU a row does not depend on the other rows, on its place, or on the thread count; on an
    NVIDIA GPU it does not where a kernel takes the weight.
    Raises ValueError for wrong shapes, dtypes or strides; NotImplementedError away from CPU and NVIDIA GPU.
    """
    # This runs dozens of times for every token: one cheap test, and the full checks only where it fails.
    x_shape, w_shape = x.shape, weight.shape
    if len(x_shape) != 2 or len(w_shape) != 2 or x_shape[1] != w_shape[1] or not _plain(x, weight, scale, w_shape):
        _explain(x, weight, scale, out, None)
    tokens, k = x_shape
    rows = w_shape[0]
    given = out
    if out is None:
        out = torch.empty((tokens, rows)) if x.is_cpu else torch.empty((tokens, rows), device=x.device)
    elif out.dtype is not torch.float32 or out.shape != (tokens, rows) or not out.is_contiguous():
        _explain(x, weight, scale, out, None)
    if kernel_core.use_reference():
        return out.copy_(reference.linear(x, weight, scale))
    where = kernel_core.elsewhere("mega_moe.linear", x, kernels=True)
    if where == "cuda" and scale is not None and cuda_linear.fits(x, weight, scale, 1, out):
        if not reproducible and tokens > _FEW and rows % 32 == 0:
            result = library.linear_split(x, weight, scale)
            return result if given is None else out.copy_(result)
        return cuda_linear.linear(x, weight, scale, out)
    if where:
        result = library.linear(x, weight, scale)
        return result.contiguous() if given is None else out.copy_(result)
    native.linear(
        x.data_ptr(),
        weight.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        out.data_ptr(),
        tokens,
        rows,
        k,
        1,
        _FORMATS[weight.dtype],
    )
    return out


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """G independent products that share a call: `y[t, g] = weight[g*o:(g+1)*o] @ x[t, g]`.

    x: float32 [T, G, i]. weight: [G*o, i] with formats and scales as in `linear` (scale rows count over all G*o
    rows). Returns float32 [T, G, o]; `out`, errors and invariance as in `linear`.
    """
    x_shape, w_shape = x.shape, weight.shape
    if (
        len(x_shape) != 3
        or len(w_shape) != 2
        or x_shape[2] != w_shape[1]
        or x_shape[1] == 0
        or w_shape[0] % x_shape[1]
        or not _plain(x, weight, scale, w_shape)
    ):
        _explain(x, weight, scale, out, 0)
    tokens, groups, k = x_shape
    rows = w_shape[0] // groups
    given = out
    if out is None:
        out = torch.empty((tokens, groups, rows), device=x.device)
    elif out.dtype is not torch.float32 or out.shape != (tokens, groups, rows) or not out.is_contiguous():
        _explain(x, weight, scale, out, 0)
    if kernel_core.use_reference():
        return out.copy_(reference.grouped_linear(x, weight, scale))
    where = kernel_core.elsewhere("mega_moe.grouped_linear", x, kernels=True)
    if where == "cuda" and scale is not None and cuda_linear.fits(x, weight, scale, groups, out):
        return cuda_linear.linear(x, weight, scale, out, groups)
    if where:
        result = library.grouped_linear(x, weight, scale)
        return result.contiguous() if given is None else out.copy_(result)
    native.linear(
        x.data_ptr(),
        weight.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        out.data_ptr(),
        tokens,
        rows,
        k,
        groups,
        _FORMATS[weight.dtype],
    )
    return out


def _plain(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, w_shape: torch.Size) -> bool:
    """Whether dtypes, strides and the scale's shape are as they have to be."""
    if x.dtype is not torch.float32 or not x.is_contiguous() or not weight.is_contiguous():
        return False
    if scale is None:
        return weight.dtype is torch.bfloat16 or weight.dtype is torch.float32
    return (
        weight.dtype is torch.float8_e4m3fn
        and scale.dtype is torch.uint8
        and scale.is_contiguous()
        and scale.shape == ((w_shape[0] + 31) // 32, (w_shape[1] + 31) // 32)
    )


kernel_core.register_op(
    "mega_moe",
    "linear(Tensor x, Tensor weight, Tensor? scale=None) -> Tensor",
    lambda x, weight, scale=None: linear(x, weight, scale),
    lambda x, weight, scale=None: x.new_empty(x.shape[0], weight.shape[0]),
)
kernel_core.register_op(
    "mega_moe",
    "grouped_linear(Tensor x, Tensor weight, Tensor? scale=None) -> Tensor",
    lambda x, weight, scale=None: grouped_linear(x, weight, scale),
    lambda x, weight, scale=None: x.new_empty(x.shape[0], x.shape[1], weight.shape[0] // x.shape[1]),
)
