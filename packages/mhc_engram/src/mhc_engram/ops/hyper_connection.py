"""Hyper-connections: n residual streams, mixed into a layer's input and updated by its output.

The coefficients of a sublayer come from the streams it starts with; its input is mixed with the `pre` of the
sublayer before, so that update, coefficients, mixing and norm are one pass (`hc_step`).

On an NVIDIA GPU one kernel runs whichever parts are asked for; a row's bits depend on that row alone there too.
"""

from __future__ import annotations

import torch

from kernel_core import elsewhere, register_op, use_reference
from kernel_core.check import require
from kernel_core.check import tensor as check_tensor
from mhc_engram import cuda, reference
from mhc_engram.ops.native import native

F32 = torch.float32
_STREAMS = 4
_ROWS = (2 + _STREAMS) * _STREAMS
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
    """Coefficients of a sublayer from the streams it starts with.

    X float32 [T, n, d]; fn float32 [(2+n)n, n*d] with rows pre, post, comb[i][j] (source i, destination j) and
    stream-major columns; base float32 [(2+n)n]; scale float32 [3] for pre, post, comb.

    With u = flatten(X) and m = (fn u) rsqrt(mean(u^2) + norm_eps):
    pre = sigmoid(m scale0 + base) + hc_eps; post = 2 sigmoid(m scale1 + base); comb = Sinkhorn of
    m scale2 + base: softmax over j plus hc_eps, then `iters` column and `iters - 1` row normalisations in turn,
    each by the sum + hc_eps.

    Returns pre [T, n], post [T, n], comb [T, n, n], float32.
    """
    T, d, where = _streams(X, "hc_coefficients")
    _check_parameters(X, d, fn, base, scale, iters)
    if where == "cuda" and cuda.fits_hyper_connection(X, fn):
        made = _empty_coefficients(T, X)
        cuda.hyper_connection(
            X, parameters=(fn, base, scale), coefficients=made, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters
        )
        return made
    if where:
        return reference.hc_coefficients(X, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters)
    pre, post, comb = _empty_coefficients(T, X)
    # fmt: off
    native.hc_step(T, d, X.data_ptr(), 0, 0, 0, fn.data_ptr(), base.data_ptr(), scale.data_ptr(), norm_eps, hc_eps,
                   iters, pre.data_ptr(), post.data_ptr(), comb.data_ptr(), 0, 0, 0.0, 0)
    # fmt: on
    return pre, post, comb


def hc_mix(
    X: torch.Tensor,
    pre: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float = 1e-20,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A layer's input, float32 [T, d]: RMSNorm(sum_j pre[j] X[j]), without the norm where `norm_weight` is None.

    X float32 [T, n, d]; pre float32 [T, n]; norm_weight float32 [d].
    """
    T, d, where = _streams(X, "hc_mix")
    _check_mix(X, "pre", pre, norm_weight, out)
    if where == "cuda" and cuda.fits_hyper_connection(X, norm_weight, out):
        result = X.new_empty(T, d) if out is None else out
        cuda.hyper_connection(X, pre_mix=pre, norm_weight=norm_weight, mixed=result, eps=eps)
        return result
    if where:
        return _into(out, reference.hc_mix(X, pre, norm_weight, eps))
    mixed = torch.empty(T, d, dtype=F32) if out is None else out
    weight = 0 if norm_weight is None else norm_weight.data_ptr()
    # fmt: off
    native.hc_step(T, d, X.data_ptr(), 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, pre.data_ptr(), weight, eps,
                   mixed.data_ptr())
    # fmt: on
    return mixed


def hc_update(X: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    """Add a sublayer's output to the streams, in place: X[j] = post[j] y + sum_i comb[i][j] X[i].

    X float32 [T, n, d]; y float32 [T, d]; post float32 [T, n]; comb float32 [T, n, n].
    """
    T, d, where = _streams(X, "hc_update")
    _check_update(X, y, post, comb)
    if where == "cuda" and cuda.fits_hyper_connection(X, y):
        return cuda.hyper_connection(X, update=(y, post, comb))
    if where:
        return reference.hc_update(X, y, post, comb)
    # fmt: off
    native.hc_step(T, d, X.data_ptr(), y.data_ptr(), post.data_ptr(), comb.data_ptr(), 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0,
                   0, 0, 0.0, 0)
    # fmt: on
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
    out: torch.Tensor | None = None,
    coefficients: Coefficients | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Between two sublayers, in one pass: the update, the next coefficients, the next input.

    Bitwise equal to `hc_update(X, y, post, comb)` (left out where y is None), then
    `hc_coefficients(X, fn, base, scale)` and `hc_mix(X, pre_mix, norm_weight, eps)`. X changes in place.

    Returns x [T, d] and pre [T, n], post [T, n], comb [T, n, n]: x is the input of the sublayer whose output
    post and comb will add; pre is the `pre_mix` of the step after. They are written to `out` and `coefficients`
    (pre, post, comb) where given: pre_mix, post and comb themselves may stand there, since they are read before.
    Otherwise no two arguments may share memory.
    """
    T, d, where = _streams(X, "hc_step")
    _check_parameters(X, d, fn, base, scale, iters)
    _check_mix(X, "pre_mix", pre_mix, norm_weight, out)
    if y is not None:
        _check_update(X, y, post, comb)
    if coefficients is None:
        coefficients = _empty_coefficients(T, X)
    elif coefficients[0] is not pre_mix or coefficients[1] is not post or coefficients[2] is not comb or y is None:
        _check_coefficients(X, coefficients)
    pre, new_post, new_comb = coefficients
    if where == "cuda" and cuda.fits_hyper_connection(X, y, fn, norm_weight, out):
        x = X.new_empty(T, d) if out is None else out
        cuda.hyper_connection(
            X,
            update=None if y is None or post is None or comb is None else (y, post, comb),
            parameters=(fn, base, scale),
            coefficients=coefficients,
            pre_mix=pre_mix,
            norm_weight=norm_weight,
            mixed=x,
            eps=eps,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            iters=iters,
        )
        return x, pre, new_post, new_comb
    if where:
        x, *values = reference.hc_step(
            X, y, post, comb, fn, base, scale, pre_mix, norm_weight,
            eps=eps, norm_eps=norm_eps, hc_eps=hc_eps, iters=iters,
        )  # fmt: skip
        for target, value in zip(coefficients, values, strict=True):
            target.copy_(value)
        return _into(out, x), pre, new_post, new_comb
    x = torch.empty(T, d, dtype=F32) if out is None else out
    update = [0 if t is None or y is None else t.data_ptr() for t in (y, post, comb)]
    # fmt: off
    native.hc_step(T, d, X.data_ptr(), *update, fn.data_ptr(), base.data_ptr(), scale.data_ptr(), norm_eps, hc_eps,
                   iters, pre.data_ptr(), new_post.data_ptr(), new_comb.data_ptr(), pre_mix.data_ptr(),
                   0 if norm_weight is None else norm_weight.data_ptr(), eps, x.data_ptr())
    # fmt: on
    return x, pre, new_post, new_comb


def _streams(X: torch.Tensor, op: str) -> tuple[int, int, str]:
    """Tokens and channels of X after its checks, and what runs: "cuda", "library", or "" for the CPU code."""
    if X.dtype is not F32 or X.ndim != 3 or X.shape[1] != _STREAMS or not X.is_contiguous():
        check_tensor("X", X, dtype=F32, shape=(None, _STREAMS, None))
    T, _, d = X.shape
    if d == 0 or d % 16:
        require(False, "X", f"{d} channels", "a multiple of 16 channels")
    return T, d, "library" if use_reference() else elsewhere(f"mhc_engram.{op}", X, kernels=True)


def _float(argument: str, value: torch.Tensor, shape: tuple[int, ...], X: torch.Tensor) -> None:
    # The usual case first: this runs for every argument of every half-layer of every decode step.
    if value.dtype is F32 and value.shape == shape and value.is_contiguous() and value.is_cpu == X.is_cpu:
        return
    check_tensor(argument, value, dtype=F32, shape=shape)
    require(value.device == X.device, argument, value.device, f"the device of X, {X.device}")


def _check_parameters(
    X: torch.Tensor, d: int, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, iters: int
) -> None:
    _float("fn", fn, (_ROWS, _STREAMS * d), X)
    _float("base", base, (_ROWS,), X)
    _float("scale", scale, (3,), X)
    if iters < 1:
        require(False, "iters", iters, "1 or more")


def _check_update(X: torch.Tensor, y: torch.Tensor, post: torch.Tensor | None, comb: torch.Tensor | None) -> None:
    T, n, d = X.shape
    if post is None or comb is None:
        raise ValueError("post, comb: got None, allowed are tensors where y is given")
    _float("y", y, (T, d), X)
    _float("post", post, (T, n), X)
    _float("comb", comb, (T, n, n), X)


def _check_mix(
    X: torch.Tensor, name: str, pre: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor | None
) -> None:
    T, n, d = X.shape
    _float(name, pre, (T, n), X)
    if weight is not None:
        _float("norm_weight", weight, (d,), X)
    if out is not None:
        _float("out", out, (T, d), X)


def _check_coefficients(X: torch.Tensor, coefficients: Coefficients) -> None:
    T, n, _ = X.shape
    pre, post, comb = coefficients
    _float("coefficients[0]", pre, (T, n), X)
    _float("coefficients[1]", post, (T, n), X)
    _float("coefficients[2]", comb, (T, n, n), X)


def _empty_coefficients(T: int, X: torch.Tensor) -> Coefficients:
    n = _STREAMS
    return X.new_empty(T, n), X.new_empty(T, n), X.new_empty(T, n, n)


def _into(out: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return value if out is None else out.copy_(value)


def _fake_coefficients(X: torch.Tensor, *_: object, **__: object) -> Coefficients:
    return _empty_coefficients(X.shape[0], X)


def _fake_mix(X: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return X.new_empty(X.shape[0], X.shape[2])


_EPS = "float norm_eps=1e-20, float hc_eps=1e-6, int iters=20"
register_op(
    "mhc_engram",
    f"hc_coefficients(Tensor X, Tensor fn, Tensor base, Tensor scale, *, {_EPS}) -> (Tensor, Tensor, Tensor)",
    hc_coefficients,
    _fake_coefficients,
)
register_op(
    "mhc_engram",
    "hc_mix(Tensor X, Tensor pre, Tensor? norm_weight, float eps=1e-20) -> Tensor",
    hc_mix,
    _fake_mix,
)
register_op(
    "mhc_engram",
    "hc_update(Tensor(a!) X, Tensor y, Tensor post, Tensor comb) -> ()",
    hc_update,
    lambda X, y, post, comb: None,
)
register_op(
    "mhc_engram",
    "hc_step(Tensor(a!) X, Tensor? y, Tensor? post, Tensor? comb, Tensor fn, Tensor base, Tensor scale, "
    f"Tensor pre_mix, Tensor? norm_weight, *, float eps=1e-20, {_EPS}) -> (Tensor, Tensor, Tensor, Tensor)",
    hc_step,
    lambda X, *args, **options: (_fake_mix(X), *_fake_coefficients(X)),
)
