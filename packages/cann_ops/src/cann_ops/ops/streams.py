"""Hyper-connections: four residual streams, mixed into a layer's input and updated by its output."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cann_ops.kernels import Kernel
from cann_ops.launch import launch, place
from cann_ops.reference import streams as reference
from kernel_core import check

_F32 = torch.float32
_N = 4
_OUT = (2 + _N) * _N
_PADDED = 32
Coefficients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def hc_coefficients(
    X: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float = 1e-20,
    hc_eps: float = 1e-6,
    iters: int = 20,
) -> Coefficients:
    """Coefficients of a sublayer from the streams it starts with: `mhc_engram.hc_coefficients` says the formula.

    X: float32 [T, 4, d], d a multiple of 64 up to 8192; fn: float32 [24, 4 d]; base: float32 [24]; scale: float32 [3].
    Returns pre [T, 4], post [T, 4], comb [T, 4, 4], float32. Products are float32 on the cube.
    Raises ValueError and CannUnavailableError as `cann_ops.kv_rows`.
    """
    _check_streams(X)
    _check_parameters(X, fn, base, scale, iters)
    if place("cann_ops.hc_coefficients", X) == "reference":
        return reference.hc_coefficients(X, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters)
    squares = X.square().sum((1, 2))
    return _coefficients(X, squares, fn, base, scale, norm_eps, hc_eps, iters)


def hc_mix(X: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor | None, eps: float = 1e-20) -> torch.Tensor:
    """sum over j of pre[j] · X[j], normed where there is a weight: float32 [T, d]. X [T, 4, d], pre [T, 4], weight [d].

    Raises ValueError and CannUnavailableError as `cann_ops.kv_rows`.
    """
    rows, d = _check_streams(X)
    check.tensor("pre", pre, dtype=_F32, shape=(rows, _N))
    if norm_weight is not None:
        check.tensor("norm_weight", norm_weight, dtype=_F32, shape=(d,))
    if place("cann_ops.hc_mix", X) == "reference":
        return reference.hc_mix(X, pre, norm_weight, eps)
    return _rows(X, None, pre, norm_weight, eps)[0]


def hc_update(X: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    """X[j] = post[j] · y + sum over i of comb[i][j] · X[i], in place.

    X [T, 4, d], y [T, d], post [T, 4], comb [T, 4, 4].

    Raises ValueError and CannUnavailableError as `cann_ops.kv_rows`.
    """
    rows, d = _check_streams(X)
    _check_update(rows, d, y, post, comb)
    if place("cann_ops.hc_update", X) == "reference":
        return reference.hc_update(X, y, post, comb)
    _rows(X, (y, post, comb), None, None, 0.0)
    return None


def hc_step(
    X: torch.Tensor,
    y: torch.Tensor | None,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor | None,
    *,
    eps: float = 1e-20,
    norm_eps: float = 1e-20,
    hc_eps: float = 1e-6,
    iters: int = 20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hc_update` where y is given, then `hc_mix` by pre_mix and `hc_coefficients` of the new streams: three launches.

    Returns the mix [T, d] and pre, post, comb. Arguments and errors as in those.
    """
    rows, d = _check_streams(X)
    _check_parameters(X, fn, base, scale, iters)
    check.tensor("pre_mix", pre_mix, dtype=_F32, shape=(rows, _N))
    update = None
    if y is not None and post is not None and comb is not None:
        _check_update(rows, d, y, post, comb)
        update = (y, post, comb)
    else:
        check.require(y is None and post is None and comb is None, "y, post, comb", "some", "all or none")
    if norm_weight is not None:
        check.tensor("norm_weight", norm_weight, dtype=_F32, shape=(d,))
    if place("cann_ops.hc_step", X) == "reference":
        if update is not None:
            reference.hc_update(X, *update)
        made = reference.hc_coefficients(X, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters)
        return reference.hc_mix(X, pre_mix, norm_weight, eps), *made
    mixed, squares = _rows(X, update, pre_mix, norm_weight, eps)
    return mixed, *_coefficients(X, squares, fn, base, scale, norm_eps, hc_eps, iters)


def _rows(X, update, pre, weight, eps) -> tuple[torch.Tensor, torch.Tensor]:
    rows, _, d = X.shape
    mixed, squares = X.new_empty(rows, d), X.new_empty(rows)
    if rows == 0:
        return mixed, squares
    given = {"X": X, "out": mixed, "squares": squares}
    if update is not None:
        y, post, comb = update
        given |= {"y": y, "post": post, "comb": comb.view(rows, _N * _N)}
    if pre is not None:
        given["pre"] = pre
    if weight is not None:
        given["weight"] = weight
    kernel = Kernel.of("hc_rows", d=d, update=update is not None, mix=pre is not None, norm=weight is not None)
    launch(kernel, given, written=["out", "squares"], scalars={"eps": eps})
    return mixed, squares


def _coefficients(X, squares, fn, base, scale, norm_eps, hc_eps, iters) -> Coefficients:
    rows, _, d = X.shape
    made = X.new_empty(rows, _OUT)
    if rows:
        m = X.new_empty(rows, _PADDED)
        wide = F.pad(fn, (0, 0, 0, _PADDED - _OUT))
        launch(Kernel.of("hc_products", width=_N * d), {"u": X.view(rows, -1), "fn": wide, "m": m}, written=["m"])
        given = {"m": m, "squares": squares, "base": base, "scale": F.pad(scale, (0, 5)), "coefficients": made}
        numbers = {"width": float(_N * d), "norm_eps": norm_eps, "hc_eps": hc_eps}
        launch(Kernel.of("hc_sinkhorn", iters=iters), given, written=["coefficients"], scalars=numbers)
    pre, post, comb = made.split((_N, _N, _N * _N), dim=1)
    return pre.contiguous(), post.contiguous(), comb.reshape(rows, _N, _N)


def _check_streams(X: torch.Tensor) -> tuple[int, int]:
    check.tensor("X", X, dtype=_F32, shape=(None, _N, None))
    rows, _, d = X.shape
    check.require(d % 64 == 0 and 64 <= d <= 8192, "X", f"{d} channels", "a multiple of 64 up to 8192")
    return rows, d


def _check_parameters(X, fn, base, scale, iters) -> None:
    check.tensor("fn", fn, dtype=_F32, shape=(_OUT, _N * X.shape[2]))
    check.tensor("base", base, dtype=_F32, shape=(_OUT,))
    check.tensor("scale", scale, dtype=_F32, shape=(3,))
    check.require(1 <= iters <= 64, "iters", iters, "1 to 64")


def _check_update(rows: int, d: int, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    check.tensor("y", y, dtype=_F32, shape=(rows, d))
    check.tensor("post", post, dtype=_F32, shape=(rows, _N))
    check.tensor("comb", comb, dtype=_F32, shape=(rows, _N, _N))
