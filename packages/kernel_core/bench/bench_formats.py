"""Row codecs: 4096 cache rows to bytes and back, beside the PyTorch reference."""

from __future__ import annotations

import functools

import torch

from kernel_core import formats, native_formats
from kernel_core.bench import Bench, Case, Problem

ROWS = 4096


def _encode(kind: str, width: int) -> Problem:
    x = torch.randn(ROWS, width)
    native, reference = getattr(native_formats, f"quantize_{kind}"), getattr(formats, f"quantize_{kind}")
    out = native(x)

    def check() -> None:
        assert torch.equal(out, reference(x))

    return Problem(
        native=functools.partial(native, x, out=out),
        reference=functools.partial(reference, x),
        bytes=x.numel() * 4 + out.numel(),
        flops=0,
        check=check,
    )


def _decode(kind: str, width: int) -> Problem:
    rows = getattr(formats, f"quantize_{kind}")(torch.randn(ROWS, width))
    native, reference = getattr(native_formats, f"dequantize_{kind}"), getattr(formats, f"dequantize_{kind}")
    out = native(rows)

    def check() -> None:
        assert torch.equal(out, reference(rows))

    return Problem(
        native=functools.partial(native, rows, out=out),
        reference=functools.partial(reference, rows),
        bytes=rows.numel() + out.numel() * 4,
        flops=0,
        check=check,
    )


def _cases(make, verb: str) -> list[Case]:
    return [
        Case(f"{kind}_{verb}_r{ROWS}", {"rows": ROWS, "width": width}, functools.partial(make, kind, width))
        for kind, width in (("main", 512), ("window", 512), ("index", 128))
    ]


_SOURCES = ("csrc/**/*", "src/kernel_core/*.py", "src/kernel_core/formats/*.py", "CMakeLists.txt")
BENCHES = [
    Bench("kernel_core.quantize_rows", _cases(_encode, "encode"), _SOURCES),
    Bench("kernel_core.dequantize_rows", _cases(_decode, "decode"), _SOURCES),
]
