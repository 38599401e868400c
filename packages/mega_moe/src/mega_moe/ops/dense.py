"""Dense products on weights as stored: FP8 with block scales, bfloat16 or float32."""

from __future__ import annotations

import torch

import kernel_core
from kernel_core import check
from mega_moe import reference
from mega_moe.native import native

_FORMATS = {torch.float8_e4m3fn: 1, torch.bfloat16: 2, torch.float32: 3}
_EXISTS = "cpu"


def _check_weight(weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    check.tensor("weight", weight, dtype=tuple(_FORMATS), shape=(None, None))
    if weight.dtype == torch.float8_e4m3fn:
        check.require(scale is not None, "scale", None, "a uint8 tensor, one UE8M0 byte for each 32 x 32 block")
        rows, columns = weight.shape
        check.tensor("scale", scale, dtype=torch.uint8, shape=((rows + 31) // 32, (columns + 31) // 32))
    else:
        check.require(scale is None, "scale", "a tensor", f"None for a weight of {weight.dtype}")


def _output(out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, device=like.device)
    check.tensor("out", out, dtype=torch.float32, shape=shape)
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T` on weights as they are stored, without expanding them.

    x: float32 [T, i]; T may be 0.
    weight: [o, i], float8_e4m3fn with scale uint8 [ceil(o/32), ceil(i/32)] (value = e4m3 * 2^(scale - 127)),
        or bfloat16 or float32 with scale None.
    out: float32 [T, o], optional, must not overlap the inputs.
    Returns float32 [T, o]. Every format is exact in float32 and sums are float32, so the error is that of a
    float32 product. A row does not depend on the other rows, on its place, or on the thread count.
    Raises ValueError for wrong shapes, dtypes or strides; NotImplementedError away from the CPU.
    """
    check.tensor("x", x, dtype=torch.float32, shape=(None, weight.shape[-1]))
    _check_weight(weight, scale)
    tokens, k = x.shape
    rows = weight.shape[0]
    out = _output(out, (tokens, rows), x)
    if kernel_core.use_reference():
        return out.copy_(reference.linear(x, weight, scale))
    if x.device.type != "cpu":
        raise kernel_core.unsupported("mega_moe.linear", x, _EXISTS)
    scale_pointer = 0 if scale is None else scale.data_ptr()
    native.linear(
        x.data_ptr(), weight.data_ptr(), scale_pointer, out.data_ptr(), tokens, rows, k, 1, _FORMATS[weight.dtype]
    )
    return out


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """G independent products that share a call: `y[t, g] = weight[g*o:(g+1)*o] @ x[t, g]`.

    x: float32 [T, G, i]. weight: [G*o, i] with formats and scales as in `linear` (scale rows count over all G*o
    rows). Returns float32 [T, G, o]; `out`, errors and invariance as in `linear`.
    """
    check.tensor("x", x, dtype=torch.float32, shape=(None, None, weight.shape[-1]))
    _check_weight(weight, scale)
    tokens, groups, k = x.shape
    rows = weight.shape[0]
    check.require(
        groups > 0 and rows % groups == 0, "weight", f"{rows} rows", f"a multiple of the {groups} groups of x"
    )
    out = _output(out, (tokens, groups, rows // groups), x)
    if kernel_core.use_reference():
        return out.copy_(reference.grouped_linear(x, weight, scale))
    if x.device.type != "cpu":
        raise kernel_core.unsupported("mega_moe.grouped_linear", x, _EXISTS)
    scale_pointer = 0 if scale is None else scale.data_ptr()
    native.linear(
        x.data_ptr(),
        weight.data_ptr(),
        scale_pointer,
        out.data_ptr(),
        tokens,
        rows // groups,
        k,
        groups,
        _FORMATS[weight.dtype],
    )
    return out


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
