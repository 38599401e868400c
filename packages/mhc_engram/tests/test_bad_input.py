"""Wrong arguments are named, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mhc_engram
from kernel_core.testing import assert_bitwise

WRONG = [
    ("X", lambda t: t.double()),
    ("X", lambda t: torch.zeros(3, 3, 64)),
    ("X", lambda t: torch.zeros(3, 4, 63)),
    ("X", lambda t: torch.zeros(3, 4, 0)),
    ("X", lambda t: torch.zeros(3, 64, 4).transpose(1, 2)),
    ("X", lambda t: torch.zeros(12, 64)),
    ("y", lambda t: t[:2]),
    ("y", lambda t: t.bfloat16()),
    ("post", lambda t: t[:, :3]),
    ("post", lambda t: None),
    ("comb", lambda t: t.flatten(1)),
    ("fn", lambda t: t[:, :-1]),
    ("fn", lambda t: t[:23]),
    ("base", lambda t: t.double()),
    ("scale", lambda t: t[:2]),
    ("pre_mix", lambda t: t[:, :2]),
    ("norm_weight", lambda t: t[:-1]),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_hc_step(name, wrong, make_step):
    s = make_step(3, 64)
    before = s.X.clone()
    arguments = dict(vars(s))
    arguments[name] = wrong(arguments[name])
    with pytest.raises(ValueError, match=f"{name}.*got.*allowed"):
        mhc_engram.hc_step(**arguments)
    assert_bitwise(s.X, before)


def test_options(make_step):
    s = make_step(3, 64)
    with pytest.raises(ValueError, match="iters: got 0"):
        mhc_engram.hc_coefficients(s.X, *s.parameters, iters=0)
    with pytest.raises(ValueError, match=r"coefficients\[2\]: got"):
        mhc_engram.hc_step(*s.arguments(), coefficients=(s.pre_mix, s.post, torch.empty(3, 16)))
    with pytest.raises(ValueError, match="out"):
        mhc_engram.hc_mix(s.X, s.pre_mix, None, out=torch.empty(3, 63))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X", torch.zeros(2, 4, 40)),
        ("kv", torch.zeros(2, 4 * 32)),
        ("qk_weight", torch.zeros(4, 31)),
        ("dead", torch.zeros(3, dtype=torch.bool)),
        ("dead", torch.zeros(2, dtype=torch.uint8)),
    ],
)
def test_engram_inject(name, value):
    arguments = {"X": torch.zeros(2, 4, 32), "kv": torch.zeros(2, 160), "qk_weight": torch.zeros(4, 32), "dead": None}
    with pytest.raises(ValueError, match=name):
        mhc_engram.engram_inject(**{**arguments, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("table", torch.zeros(4, 64)),
        ("table", torch.zeros(4, 48).to(torch.float8_e4m3fn)),
        ("scale", torch.zeros(4, 3, dtype=torch.uint8)),
        ("rows", torch.zeros(2, 3, dtype=torch.int32)),
        ("out", torch.zeros(2, 64)),
    ],
)
def test_engram_gather(name, value):
    arguments = {
        "table": torch.zeros(4, 64).to(torch.float8_e4m3fn),
        "scale": torch.full((4, 2), 127, dtype=torch.uint8),
        "rows": torch.zeros(2, 3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=name):
        mhc_engram.engram_gather(**{**arguments, name: value})


def test_other_devices_are_named(make_step):
    s = make_step(1, 16)
    with pytest.raises(NotImplementedError, match=r"mhc_engram.hc_step.*'meta'.*cpu"):
        mhc_engram.hc_step(*(t.to("meta") for t in s.arguments()))
    with pytest.raises(ValueError, match="fn"):
        mhc_engram.hc_coefficients(s.X, s.fn.to("meta"), s.base, s.scale)


def test_imports_kernel_core_only():
    ours = {"mla_fp4", "swa_replay", "mega_moe", "dspark_kernels", "ep_comm", "orchestrator"}
    for path in Path(mhc_engram.__file__).parent.rglob("*.py"):
        words = set(path.read_text().replace(".", " ").split())
        assert not words & ours, path
