"""Other projects' kernels at our points: FlashMLA (sgl-flash-mla), DeepGEMM (sgl-deep-gemm) and torch.topk.

Each is imported only when its case runs, makes its own random inputs of the same sizes in its own format, and is
compared with plain PyTorch on one row before it is timed. None of them is needed for anything else.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from kernel_core.bench import Offer
from kernel_core.bench.device import assert_near

DIM, PAGE = 512, 64
FLASH_MLA, DEEP_GEMM = "sgl-flash-mla", "sgl-deep-gemm"
_LEAST_HEADS = 64  # FlashMLA has kernels for 64 and 128
_NOPE, _ROPE, _BODY, _SCALES = 448, 64, 576, 8  # a 584-byte row: FP8 codes, bfloat16 channels; its scales stand apart
_INDEX_DIM = 128


def flash_mla_decode(indices: torch.Tensor, visible: int, heads: int, window: int) -> Offer:
    """Each request's `window` rows and its chosen rows of `visible`, all in 584-byte rows; heads filled up to 64."""
    name = "FlashMLA" if heads >= _LEAST_HEADS else f"FlashMLA, filled to {_LEAST_HEADS} heads"
    return Offer(name, functools.partial(_decode, indices, visible, max(heads, _LEAST_HEADS), window), FLASH_MLA)


def flash_mla_prefill(indices: torch.Tensor, keys: int, heads: int) -> Offer:
    """bfloat16 rows [keys, 512], `indices` [rows, chosen] into them."""
    name = "FlashMLA, bf16 rows" if heads >= _LEAST_HEADS else f"FlashMLA, bf16 rows, filled to {_LEAST_HEADS} heads"
    return Offer(name, functools.partial(_prefill, indices, keys, max(heads, _LEAST_HEADS)), FLASH_MLA)


def deep_gemm_decode(batch: int, keys: int, heads: int, k: int = 0) -> Offer:
    """FP8 index logits from pages of 64 keys, and with `k` torch.topk of them."""
    name = "DeepGEMM FP8" + (" and torch.topk" if k else "")
    return Offer(name, functools.partial(_paged_logits, batch, keys, heads, k), DEEP_GEMM)


def deep_gemm_prefill(rows: int, keys: int, heads: int, k: int = 0) -> Offer:
    """FP8 index logits of one request, and with `k` torch.topk of them."""
    name = "DeepGEMM FP8" + (" and torch.topk" if k else "")
    return Offer(name, functools.partial(_logits, rows, keys, heads, k), DEEP_GEMM)


def torch_topk(scores: torch.Tensor, k: int) -> Offer:
    """The k best of each row, unsorted, ties as they fall."""
    return Offer("torch.topk", lambda: lambda: torch.topk(scores, k, sorted=False), "torch")


class _Rows:
    """A pool of 584-byte rows as FlashMLA keeps them: bodies of a page, then its scales; strides multiples of 576."""

    def __init__(self, pages: int) -> None:
        stride = -(-PAGE * (_BODY + _SCALES) // _BODY) * _BODY
        raw = torch.zeros(pages, stride, dtype=torch.uint8, device="cuda")
        self.body = raw[:, : PAGE * _BODY].view(pages, PAGE, _BODY)
        codes = torch.randint(0, 256, (pages, PAGE, _NOPE), dtype=torch.uint8, device="cuda")
        self.body[..., :_NOPE] = codes.bitwise_and_(0xBF)  # below 2 in magnitude, so none is NaN
        turned = torch.randn(pages, PAGE, _ROPE, dtype=torch.bfloat16, device="cuda")
        self.body[..., _NOPE:] = turned.view(torch.uint8)
        self.scales = raw[:, PAGE * _BODY : PAGE * (_BODY + _SCALES)].view(pages, PAGE, _SCALES)
        self.scales[..., :7] = torch.randint(125, 128, (pages, PAGE, 7), dtype=torch.uint8, device="cuda")
        width = _BODY + _SCALES
        self.cache = raw.as_strided((pages, PAGE, 1, width), (stride, width, width, 1)).view(torch.float8_e4m3fn)

    def decoded(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 [n, 512]"""
        page, row = slots.long() // PAGE, slots.long() % PAGE
        body, scales = self.body[page, row], torch.exp2(self.scales[page, row, :7].float() - 127)
        codes = body[:, :_NOPE].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64)
        turned = body[:, _NOPE:].contiguous().view(torch.bfloat16).float()
        return torch.cat([(codes * scales[..., None]).flatten(1), turned], dim=1)


def _attend(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """One query [heads, 512] over keys [n, 512], in float32; the sink only adds to the sum."""
    scores = q.float() @ keys.T * DIM**-0.5
    weights = torch.softmax(torch.cat([scores, sink[:, None]], dim=1), dim=1)[:, :-1]
    return weights @ keys


def _decode(indices: torch.Tensor, visible: int, heads: int, window: int) -> Callable[[], object]:
    flash_mla = importlib.import_module("flash_mla")
    batch = len(indices)
    chosen = (indices + torch.arange(batch, device="cuda", dtype=torch.int32)[:, None] * visible)[:, None].contiguous()
    near = torch.arange(batch * window, device="cuda", dtype=torch.int32).view(batch, 1, window)
    pool, ring = _Rows(batch * visible // PAGE), _Rows(-(-batch * window // PAGE))
    q = torch.randn(batch, 1, heads, DIM, device="cuda", dtype=torch.bfloat16)
    sink = torch.randn(heads, device="cuda")
    schedule, _ = flash_mla.get_mla_metadata()

    def run() -> torch.Tensor:
        return flash_mla.flash_mla_with_kvcache(
            q, ring.cache, None, None, DIM, schedule, softmax_scale=DIM**-0.5, is_fp8_kvcache=True, indices=near,
            attn_sink=sink, extra_k_cache=pool.cache, extra_indices_in_kvcache=chosen, use_legacy=True,
        )[0]  # fmt: skip

    keys = torch.cat([ring.decoded(near[-1, 0]), pool.decoded(chosen[-1, 0])])
    assert_near("FlashMLA decode", run()[-1, 0], _attend(q[-1, 0], keys, sink), 2e-2)
    return run


def _prefill(indices: torch.Tensor, keys: int, heads: int) -> Callable[[], object]:
    flash_mla = importlib.import_module("flash_mla")
    rows = torch.randn(keys, 1, DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(len(indices), heads, DIM, device="cuda", dtype=torch.bfloat16)
    sink, chosen = torch.randn(heads, device="cuda"), indices[:, None].contiguous()

    def run() -> torch.Tensor:
        return flash_mla.flash_mla_sparse_fwd(q, rows, chosen, DIM**-0.5, DIM, sink, None, use_legacy=True)[0]

    seen = rows[indices[-1][indices[-1] >= 0].long(), 0].float()
    assert_near("FlashMLA prefill", run()[-1], _attend(q[-1], seen, sink), 2e-2)
    return run


def _deep_gemm() -> ModuleType:
    """DeepGEMM compiles its kernels when they are first called: it has to find nvcc, nvrtc and a folder for them."""
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(Path(tempfile.gettempdir()) / "deep_gemm_cache"))
    compiler = shutil.which("nvcc")
    if compiler is not None:
        os.environ.setdefault("CUDA_HOME", str(Path(compiler).resolve().parents[1]))
    places = (path for root in sys.path for path in glob.glob(f"{root}/nvidia/*/lib/libnvrtc.so.1[23]"))
    for place in ("libnvrtc.so.13", *places):
        try:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
            break
        except OSError:
            continue
    return importlib.import_module("deep_gemm")


def _fp8(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and one float32 scale for each key."""
    scale = keys.abs().amax(-1).clamp(min=1e-4) / 448
    return (keys / scale[..., None]).to(torch.float8_e4m3fn), scale


def _score(q: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return weights @ (q.float() @ (codes.float() * scale[:, None]).T).relu()


def _tensor(value: object) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_dlpack(value)


def _chosen(run: Callable[[], torch.Tensor], k: int) -> Callable[[], object]:
    return (lambda: torch.topk(run(), k, sorted=False).indices) if k else run


def _paged_logits(batch: int, keys: int, heads: int, k: int) -> Callable[[], object]:
    deep_gemm = _deep_gemm()
    blocks, width = batch * keys // PAGE, _INDEX_DIM + 4
    pages = torch.empty(blocks, PAGE * width, dtype=torch.uint8, device="cuda")
    for first in range(0, blocks, 8192):
        part = pages[first : first + 8192]
        codes, scale = _fp8(torch.randn(len(part), PAGE, _INDEX_DIM, device="cuda"))
        part[:, : PAGE * _INDEX_DIM] = codes.view(torch.uint8).flatten(1)
        part[:, PAGE * _INDEX_DIM :] = scale.view(torch.uint8)
    q = torch.randn(batch, 1, heads, _INDEX_DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(batch, heads, device="cuda")
    lengths = torch.full((batch, 1), keys, dtype=torch.int32, device="cuda")
    table = torch.randperm(blocks, device="cuda").int().view(batch, -1).contiguous()
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())
    cache = pages.view(blocks, PAGE, 1, width)

    def run() -> torch.Tensor:
        return _tensor(deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, schedule, keys, False))

    own = pages[table[-1, :32].long()]
    codes = own[:, : PAGE * _INDEX_DIM].contiguous().view(torch.float8_e4m3fn).view(-1, _INDEX_DIM)
    scale = own[:, PAGE * _INDEX_DIM :].contiguous().view(torch.float32).flatten()
    assert_near("DeepGEMM", run()[-1, : len(scale)], _score(q[-1, 0], codes, scale, weights[-1]), 1e-2)
    return _chosen(run, k)


def _logits(rows: int, keys: int, heads: int, k: int) -> Callable[[], object]:
    deep_gemm = _deep_gemm()
    q = torch.randn(rows, heads, _INDEX_DIM, device="cuda").to(torch.float8_e4m3fn)
    codes, scale = _fp8(torch.randn(keys, _INDEX_DIM, device="cuda"))
    weights = torch.randn(rows, heads, device="cuda")
    first = torch.zeros(rows, dtype=torch.int32, device="cuda")
    last = torch.full((rows,), keys, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        return _tensor(deep_gemm.fp8_mqa_logits(q, (codes, scale), weights, first, last, False, 0))

    expected = _score(q[-1], codes[:2048], scale[:2048], weights[-1])
    assert_near("DeepGEMM", run()[-1, :2048], expected, 1e-2)
    return _chosen(run, k)
