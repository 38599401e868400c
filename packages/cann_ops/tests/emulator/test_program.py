"""The Python side: reading source, arguments, errors that name what is missing, and what a run leaves behind."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cann_ops import emulate
from cann_ops.emulate import build, lowered, source
from cann_ops.emulate.errors import from_message

COPY = """
#include "c_api/asc_simd.h"
extern "C" __global__ __vector__ void copy(__gm__ float* x, __gm__ float* y, int32_t n, float scale, bool twice,
                                           int64_t skip, uint8_t small) {
  for (int i = 0; i < n; ++i) y[i + skip] = x[i] * scale * (twice ? 2 : 1) + small;
}
extern "C" __global__ __cube__ void nothing(__gm__ const uint8_t* __restrict__ a) {}
"""


def arguments(n=3):
    return {"x": torch.arange(float(n)), "y": torch.full((n + 2,), 9.0), "n": n, "scale": 0.5, "twice": True, "skip": 1,
            "small": 255}  # fmt: skip


def test_kernels_and_parameters_are_read(program):
    ready = program(COPY)
    assert list(ready.kernels) == ["copy", "nothing"]
    copy, nothing = ready.kernels.values()
    assert copy.core == "vector" and nothing.core == "cube"
    assert [(p.name, p.kind, p.is_tensor) for p in copy.parameters[:3]] == [
        ("x", "float", True), ("y", "float", True), ("n", "int32_t", False),
    ]  # fmt: skip
    assert nothing.parameters == (source.Parameter("a", "uint8_t", True),)
    mixed = source.kernels('extern "C" __global__ __mix__(1, 2) void both() {}')
    assert mixed == (source.KernelSource("both", "mix", ()),)


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_scalars_of_all_kinds_and_both_kinds_of_arrays(program, kind):
    given = arguments()
    if kind is np.ndarray:
        given |= {"x": given["x"].numpy(), "y": given["y"].numpy()}
    report = program(COPY).run(given, cores=1, kernel="copy")
    assert np.array_equal(np.asarray(given["y"]), [9.0, 255.0, 256.0, 257.0, 9.0])
    assert report.defined["y"].all() and (report.instructions, report.read_bytes) == (0, 0)


def test_what_nothing_wrote_comes_back_as_poison(program):
    given = arguments()
    report = program(COPY).run(given, cores=1, kernel="copy", undefined=["y"])
    y = given["y"]
    assert y[1:4].tolist() == [255.0, 256.0, 257.0] and y[[0, 4]].isnan().all()
    assert report.defined["y"].reshape(5, 4).all(1).tolist() == [False, True, True, True, False]


def test_views_with_steps_keep_what_lies_between(program):
    rows = torch.full((4, 3), 7.0)
    rows[:, 0] = torch.arange(4.0)
    given = arguments() | {"x": rows[:, 0], "y": rows[:, 1], "n": 10, "skip": 0, "twice": False, "scale": 1.0}
    with pytest.raises(emulate.InstructionError, match="tensors y and x share byte 0 of the former"):
        program(COPY).run(given, cores=1, kernel="copy")
    given |= {"y": torch.zeros(10)}
    program(COPY).run(given, cores=1, kernel="copy")
    assert given["y"].tolist() == [255.0, 262.0, 262.0, 256.0, 262.0, 262.0, 257.0, 262.0, 262.0, 258.0]
    with pytest.raises(emulate.BoundsError, match=r"tensor x bytes \[40, 44\), allowed is \[0, 40\)"):
        program(COPY).run(given | {"n": 11}, cores=1, kernel="copy")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": None}, "x: got NoneType, allowed is a torch.Tensor or numpy.ndarray"),
        ({"x": torch.zeros(3, dtype=torch.int32)}, "x: got torch.int32 on cpu, allowed is torch.float32 on the CPU"),
        ({"x": torch.zeros(3, device="meta")}, "x: got torch.float32 on meta"),
        ({"x": np.zeros(3)}, "x: got float64, allowed is a contiguous writable float32 array"),
        ({"x": np.zeros(6, np.float32)[::2]}, "x: got float32, allowed is a contiguous"),
        ({"n": 1.5}, "n: got 1.5, allowed are values of int32_t"),
        ({"n": 2**31}, "n: got 2147483648, allowed are values of int32_t"),
        ({"small": -1}, "small: got -1, allowed are values of uint8_t"),
        ({"n": torch.tensor(1)}, "n: got Tensor, allowed is a number"),
        ({"other": 1}, "arguments of copy: got them also other, allowed are exactly x, y, n"),
    ],
)
def test_wrong_arguments_are_named_before_anything_runs(program, change, text):
    given = arguments() | change
    with pytest.raises(ValueError, match=text):
        program(COPY).run(given, cores=1, kernel="copy")
    assert (given["y"] == 9).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cores": 0}, "cores: got 0, allowed are 1 to 64"),
        ({"cores": 65}, "cores: got 65"),
        ({"ub_bytes": -1}, "ub_bytes: got -1, allowed are 0 to 253952"),
        ({"ub_bytes": emulate.UB_BYTES + 1}, "ub_bytes: got 253953"),
        ({"kernel": None}, "kernel: got None, allowed are copy, nothing"),
        ({"kernel": "k"}, "kernel: got 'k', allowed are copy, nothing"),
        ({"most_steps": 0}, "most_steps: got 0, allowed are 1 and more"),
        ({"undefined": ["n"]}, "undefined: got n, allowed are x, y"),
    ],
)
def test_wrong_options_are_named(program, options, text):
    with pytest.raises(ValueError, match=text):
        program(COPY).run(arguments(), **({"cores": 1, "kernel": "copy"} | options))


def test_a_missing_argument_is_named(program):
    given = arguments()
    del given["scale"]
    with pytest.raises(ValueError, match="without scale, allowed are exactly"):
        program(COPY).run(given, cores=1, kernel="copy")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("int x;", "a text without a kernel"),
        ('extern "C" __global__ __vector__ void k(double x) {}', "the scalar parameter 'double x'"),
        ('extern "C" __global__ __vector__ void k(float) {}', "the parameter 'float'"),
    ],
)
def test_a_source_that_is_none_is_refused(text, error):
    with pytest.raises(ValueError, match=error):
        source.kernels(text)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("asc_copy_l12bt(0, 1);", "the emulator does not have asc_copy_l12bt"),
        ("vector_f32 a; asc_storealign_intlv((float*)0, a, 0, vector_bool());", "asc_storealign_intlv is not emulated"),
        ("asc_mmad((int32_t*)0, (int8_t*)0, (int8_t*)0, 1, 1, 1, 0, 0, 0, 1);", "only float accumulators are emulated"),
        ("vector_f32 a; vector_f16 b; vcvt(b, a, asc_create_mask_b16(PAT_ALL), ROUND_O, PART_EVEN);",
         "to this type only ROUND_R is emulated"),
        ("float x = 1 +;", "generated.asc:3:.*expected primary-expression"),
    ],
)  # fmt: skip
def test_what_is_not_emulated_is_named_when_it_is_compiled(body, text):
    there, why = emulate.available()
    if not there:
        pytest.skip(why)
    kernel = f'#include "c_api/asc_simd.h"\nextern "C" __global__ __vector__ void k() {{\n{body}\n}}\n'
    with pytest.raises(emulate.CompileError, match=text):
        emulate.Program(kernel)


def test_compiled_source_is_kept(program, tmp_path, monkeypatch):
    program(COPY)
    monkeypatch.setattr(build, "_run", lambda *_: pytest.fail("it was compiled again"))
    build.library.cache_clear()
    assert emulate.Program(COPY).kernels
    monkeypatch.setenv("CANN_OPS_EMULATE_CACHE", str(tmp_path / "made"))
    assert build.cache_dir() == tmp_path / "made" and (tmp_path / "made").is_dir()


def test_old_compiled_source_is_removed(tmp_path):
    for name in ("kernel_new.so", "kernel_old.so", "else.so"):
        (tmp_path / name).touch()
    for name in ("runtime_new", "runtime_old"):
        (tmp_path / name).mkdir()
    for name in ("kernel_old.so", "runtime_old", "else.so"):
        os.utime(tmp_path / name, (0, 0))
    build.prune(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["else.so", "kernel_new.so", "runtime_new"]


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert emulate.available() == (False, "the emulator needs g++")


def test_messages_become_errors():
    assert isinstance(from_message("race: a: b"), emulate.RaceError) and str(from_message("race: a: b")) == "a: b"
    assert type(from_message("host: no memory")) is emulate.EmulationError


def test_a_lowered_kernel_brings_grid_sizes_and_memory(program):
    described = SimpleNamespace(source=COPY, name="copy", grid=1, unified_bytes=0, sizes={"n": ("x", 0)})
    given = arguments()
    tensors = {name: given[name] for name in ("x", "y")}
    scalars = {name: given[name] for name in ("scale", "twice", "skip", "small")}
    lowered.run_lowered(described, tensors, scalars=scalars, undefined=["y"])
    assert given["y"][1:4].tolist() == [255.0, 256.0, 257.0]


WILD = """
#include "c_api/asc_simd.h"
int deeper(volatile int* n) {
  volatile int here[64] = {*n};
  return *n < 0 ? here[3] : deeper(here) + 1;
}
extern "C" __global__ __vector__ void wild(__gm__ int32_t* x, int32_t fault) {
  if (fault == 1) *(int32_t*)0x123456789abcull = 1;
  if (fault == 2) x[0] = deeper((volatile int*)&fault);
  if (fault == 3) x[int64_t(1) << 40] = 1;
}
"""


@pytest.mark.parametrize("fault", [1, 2, 3])
def test_wild_addresses_and_endless_recursion_are_errors_of_the_run(program, fault):
    with pytest.raises(emulate.BoundsError, match=r"address|tensor x|unified buffer"):
        program(WILD).run({"x": torch.zeros(1, dtype=torch.int32), "fault": fault}, cores=1)
    program(WILD).run({"x": torch.zeros(1, dtype=torch.int32), "fault": 0}, cores=1)


def test_a_kernel_that_does_not_end_is_stopped(program):
    text = """
#include "c_api/asc_simd.h"
extern "C" __global__ __vector__ void spin(__gm__ int32_t* x) {
  auto* seen = (volatile int32_t*)x;
  while (*seen == 0) {
  }
}
"""
    with pytest.raises(emulate.FlagError, match="more than 1000 instructions and accesses"):
        program(text).run({"x": torch.zeros(2, dtype=torch.int32)}, cores=1, most_steps=1000)
    program(text).run({"x": torch.ones(1, dtype=torch.int32)}, cores=3, most_steps=3)


OVER = """
#include "c_api/asc_simd.h"
__simd_vf__ inline void eight(__ubuf__ float* x, __ubuf__ float* y, int32_t lanes) {
  vector_f32 a, b;
  uint32_t count = lanes;
  vector_bool m = asc_update_mask_b32(count);
  asc_loadalign(a, x);
  asc_add(b, a, a, m);
  asc_storealign(y, b, 0, m);
}
extern "C" __global__ __vector__ void over(__gm__ float* x, __gm__ float* y, int32_t lanes) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  auto load = static_cast<asc_load_l2_cache_mode>(0);
  asc_copy_gm2ub_align(ub, (uint8_t*)x, 1, 32, 0, 0, 0, load, 32, 32);
  asc_sync();
  asc_copy_gm2ub_align(ub + 32, (uint8_t*)(x + 8), 1, 224, 0, 0, 0, load, 224, 224);
  eight((__ubuf__ float*)ub, (__ubuf__ float*)(ub + 256), lanes);
  asc_sync();
  asc_copy_ub2gm_align((uint8_t*)y, ub + 256, 1, lanes * 4, static_cast<asc_store_l2_cache_mode>(0), 256, 256);
}
"""


def test_a_load_that_reaches_too_far_is_an_error_only_if_it_matters(program):
    """A register is loaded whole while a copy still writes behind the eight numbers that are used."""
    x, y = torch.randn(64), torch.zeros(8)
    program(OVER).run({"x": x, "y": y, "lanes": 8}, cores=1, undefined=["y"])
    assert torch.equal(y, 2 * x[:8])
    with pytest.raises(emulate.RaceError, match=r"a result depends on this: UB byte 32: the read by pipe V .* MTE2"):
        program(OVER).run({"x": x, "y": torch.zeros(9), "lanes": 9}, cores=1, undefined=["y"])
