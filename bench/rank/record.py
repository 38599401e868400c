"""Which ops a step calls, with what, and what each has to move and to multiply."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

Cost = tuple[float, float]  # bytes, operations
ROW_BYTES = {"main": 288, "window": 528, "index": 68}
OPS = {
    "mega_moe": ("route", "linear", "grouped_linear", "fused_experts", "packed_experts"),
    "mhc_engram": ("hc_step", "hc_update", "hc_mix", "engram_rows", "engram_gather", "engram_inject"),
    "mla_fp4": ("compress", "norm_rope", "kv_rows", "store_main", "store_index", "index_topk", "sparse_attention"),
    "swa_replay": ("window_attention", "store_window"),
    "torch": ("mm", "bmm"),  # dense products of a GPU
}


@dataclass
class Call:
    """An op on tensors of certain shapes: the first call of that kind, and how many there were."""

    op: str
    shapes: str
    run: Callable[[], object]
    bytes: float
    operations: float
    count: int = 1


@dataclass
class Recording:
    """Calls by op and shapes, in order of their first one."""

    calls: dict[tuple[str, str], Call] = field(default_factory=dict)

    def note(self, op: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the op and count it."""
        result = function(*args, **options)
        shapes = _shapes(args, options)
        if known := self.calls.get((op, shapes)):
            known.count += 1
        else:
            moved, operations = cost(op, args, options, result)
            run = lambda: function(*args, **options)  # noqa: E731
            self.calls[op, shapes] = Call(op, shapes, run, moved, operations)
        return result


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Every op of the packages goes through the recording while this lasts. Calls keep their tensors alive."""
    import importlib

    kept, record = [], Recording()
    try:
        for package, names in OPS.items():
            module = importlib.import_module(package)
            for name in names:
                function = getattr(module, name)
                kept.append((module, name, function))
                op = f"{package}.{name}"
                setattr(module, name, lambda *a, _f=function, _op=op, **k: record.note(_op, _f, a, k))
        yield record
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def cost(op: str, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> Cost:
    """Bytes that have to cross the memory bus, and operations. Of caches and tables only the rows that are read."""
    name = op.split(".")[1]
    if name in _SPECIAL:
        return _SPECIAL[name](args, options, result)
    moved = sum(_size(t) for t in {t.data_ptr(): t for t in _tensors((args, options, result))}.values())
    operations = 0.0
    if name in ("mm", "bmm"):
        operations = 2.0 * args[0].numel() * args[1].shape[-1]
    if name in ("linear", "grouped_linear"):
        operations = 2.0 * args[0].numel() // args[0].shape[-1] * args[1].numel()
        if name == "grouped_linear":
            operations /= args[0].shape[1]
    return float(moved), operations


def _attention(args: tuple[Any, ...], selected: int, out: torch.Tensor) -> Cost:
    q, window = args[0], args[7]
    rows, heads, dim = q.shape
    longest = max(1, rows // max(1, args[4].numel() - 1))
    windows = rows * window if longest == 1 else rows + window * (args[4].numel() - 1)
    moved = _size(q) + _size(out) + windows * ROW_BYTES["window"] + rows * selected * ROW_BYTES["main"]
    return float(moved), 4.0 * rows * heads * dim * (window + selected)


def _sparse(args: tuple[Any, ...], options: dict[str, Any], result: Any) -> Cost:
    moved, operations = _attention(args, args[11].shape[1], result)
    rows, selected = args[11].shape
    most = args[8].shape[0] * args[9]  # rows of the pool: rows of one request share what they select
    return moved - max(0, rows * selected - most) * ROW_BYTES["main"], operations


def _index(args: tuple[Any, ...], options: dict[str, Any], result: Any) -> Cost:
    q, visible, requests = args[0], args[6], args[5].numel() - 1
    rows, heads, dim = q.shape
    seen = float(visible.sum())
    keys = seen if rows == requests else float(visible.max()) * requests
    return _size(q) + keys * ROW_BYTES["index"] + 4.0 * rows * args[7], 2.0 * seen * heads * dim


def _experts(args: tuple[Any, ...], options: dict[str, Any], result: Any) -> Cost:
    x, ids, shared = args[0], args[1], options.get("shared")
    count, _, d = args[3].shape[0], 0, x.shape[1]
    inter = args[5].shape[2] * 2
    moved = count * 3 * d * inter * 17 / 32 + (3 * d * inter if shared is not None else 0) + 2 * _size(x)
    return moved, 6.0 * d * inter * (ids.numel() + (x.shape[0] if shared is not None else 0))


def _packed(args: tuple[Any, ...], options: dict[str, Any], result: Any) -> Cost:
    x, ids, packed = args[0], args[1], args[3]
    shared = 3 * packed.d * packed.inter if packed.shared13 is not None else 0
    moved = packed.w13.shape[0] * 3 * packed.d * packed.inter * 17 / 32 + shared + 2 * _size(x)
    return moved, 6.0 * packed.d * packed.inter * (ids.numel() + (x.shape[0] if shared else 0))


def _gather(args: tuple[Any, ...], options: dict[str, Any], result: Any) -> Cost:
    width = args[0].shape[1] * 33 // 32
    return float(args[2].numel() * (8 + width) + _size(result)), 0.0


def _store(args: tuple[Any, ...], options: dict[str, Any], result: Any) -> Cost:
    return 2.0 * _size(args[0]), 0.0


_SPECIAL: dict[str, Callable[..., Cost]] = {
    "sparse_attention": _sparse,
    "window_attention": lambda a, o, r: _attention(a, 0, r),
    "index_topk": _index,
    "fused_experts": _experts,
    "packed_experts": _packed,
    "engram_gather": _gather,
    "store_main": _store,
    "store_index": _store,
    "store_window": _store,
    "compress": lambda a, o, r: (float(_size(a[0]) + _size(a[1]) + _size(r)), 0.0),
}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in _tensors(getattr(value, field.name))]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    return []


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shapes(args: tuple[Any, ...], options: dict[str, Any]) -> str:
    tensors = [f"{'x'.join(map(str, t.shape))}" for t in _tensors((args, options))]
    kind = options.get("format", "")
    return " ".join([*tensors[:2], kind]).strip() + f" #{abs(hash(tuple(tensors))) % 1000}"
