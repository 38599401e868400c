"""Named ranges on steps and ops for profilers: NVTX on a GPU, PyTorch's own everywhere. Off, they cost little."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

OPS = {
    "mega_moe": ("route", "linear", "grouped_linear", "fused_experts", "packed_experts"),
    "mhc_engram": ("hc_step", "hc_update", "hc_mix", "engram_rows", "engram_gather", "engram_inject"),
    "mla_fp4": ("compress", "norm_rope", "kv_rows", "store_main", "store_index", "index_topk", "sparse_attention"),
    "swa_replay": ("window_attention", "store_window"),
    "dspark_kernels": ("schedule", "verify", "draft_step", "confidence_head", "sample", "apply_token_mask",
                       "top_logprobs"),
}  # fmt: skip
"""Public functions that `ranges_on` names, by package."""

_active = False
_NOTHING: AbstractContextManager[None] = nullcontext()


def named(name: str) -> AbstractContextManager[None]:
    """A range of that name while ranges are on."""
    return _range(name) if _active else _NOTHING


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


@contextlib.contextmanager
def ranges_on() -> Iterator[None]:
    """Name steps and ops while this lasts. Not to be nested."""
    global _active
    kept = []
    try:
        for package, names in OPS.items():
            module = importlib.import_module(package)
            for name in names:
                function = getattr(module, name)
                kept.append((module, name, function))
                setattr(module, name, _wrapped(f"{package}.{name}", function))
        _active = True
        yield
    finally:
        _active = False
        for module, name, function in kept:
            setattr(module, name, function)


def _wrapped(name: str, function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        with _range(name):
            return function(*args, **options)

    return call
