"""The compile gate reads ptxas right, holds its rules, and says so where it could not look."""

import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parents[1] / "ci" / "compile_gate"


@pytest.fixture(scope="module")
def gate():
    loader = importlib.machinery.SourceFileLoader("compile_gate", str(GATE))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("compile_gate", loader))
    sys.modules["compile_gate"] = module  # dataclasses look their module up
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
        del sys.modules["compile_gate"]
    return module


PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstPf' for 'sm_90a'
ptxas info    : Function properties for _Z5firstPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 8 bytes cmem[0]
ptxas info    : Compile time = 11.452 ms
ptxas info    : Compiling entry function '_Z6secondPf' for 'sm_100a'
ptxas info    : Function properties for _Z6secondPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for _Z6helperf
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 16 bytes cumulative stack size
"""


def test_parser(gate):
    first, second = gate.parse(PTXAS)
    assert (first.name, first.arch, first.registers, first.shared) == ("_Z5firstPf", "sm_90a", 40, 1024)
    assert (first.stack, first.spill_stores, first.spill_loads) == (0, 0, 0)
    assert (second.name, second.arch, second.registers, second.shared) == ("_Z6secondPf", "sm_100a", 255, 0)
    assert (second.stack, second.spill_stores, second.spill_loads) == (16, 4, 12)
    assert gate.parse("") == []


def test_faults(gate):
    clean, spilling = gate.parse(PTXAS)
    assert gate.faults([clean], {}) == []
    assert gate.faults([clean], {"first": {"registers": 40, "shared": 1024}}) == []
    (fault,) = gate.faults([clean], {"first": {"registers": 39}})
    assert "registers 40, the budget is 39" in fault
    (fault,) = gate.faults([clean], {"first": {"shared": 1023}})
    assert "shared 1024" in fault
    (fault,) = gate.faults([clean], {"gone": {"registers": 255}})
    assert "'gone' fits no kernel" in fault
    spill, stack = gate.faults([spilling], {})
    assert "4 bytes stored, 12 loaded" in spill and "stack frame of 16 bytes" in stack
    # a budget may allow a stack frame, never a spill
    (only,) = gate.faults([spilling], {"second": {"stack": 16}})
    assert "spills" in only


SASS = """
		Function : _Z5firstPf
	.headerflags	@"EF_CUDA_SM100"
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                       /* 0x0000df00ff017b82 */
        /*0010*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;   /* 0x0000000000000000 */
        /*0020*/              @!P0 UTCHMMA.2CTA gdesc[UR4], gdesc[UR6] ;         /* 0x0000000000000000 */
        /*0030*/             @!UPT UTCCP.T.S.4x32dp128bit tmem[UR4], gdesc[UR6] ; /* 0x0000000000000000 */
		Function : _Z6secondPf
        /*0000*/               @P1 STL.64 [R1+0x8], R2 ;                         /* 0x0000000000000000 */
"""


def test_machine_code(gate):
    counts = gate.count_instructions(SASS)
    assert (counts["_Z5firstPf"]["UTCHMMA"], counts["_Z5firstPf"]["UTCCP"], counts["_Z5firstPf"]["LDL"]) == (2, 1, 0)
    first, _ = gate.parse(PTXAS)
    wanted = {"first": {"sass": {"UTCHMMA": 3}}}
    assert gate.faults([first], wanted) == []  # nobody looked
    first.sass = counts["_Z5firstPf"]
    (fault,) = gate.faults([first], wanted)
    assert "2 UTCHMMA, at least 3" in fault
    first.sass = counts["_Z6secondPf"]
    (fault,) = gate.faults([first], {})
    assert "1 STL" in fault


PRODUCTS = """
        /*0010*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R56, R96, gdesc[UR36], RZ, !UPT, gsb0 ; /* 0x0 */
        /*0020*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, R96, gdesc[UR20], RZ, !UPT, gsb0 ; /* 0x0 */
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;                                      /* 0x0 */
        /*0040*/                   FFMA R5, R56, R152, R5 ;                                             /* 0x0 */
        /*0050*/                   LDS.64 R56, [R178+0x4440] ;                                          /* 0x0 */
        /*0060*/                   STS.64 [R24+0x4440], R56 ;                                           /* 0x0 */
        {}
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;                                      /* 0x0 */
        /*0090*/                   IMAD.SHL.U32 R24, R0, 0x8, RZ ;                                      /* 0x0 */
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/*0070*/ FFMA R5, R56, R152, R5 ;", []),
        ("/*0070*/ @!P0 LDS R55, [R154+0x8a00] ;", ["LDS R55, [R154+0x8a00]"]),
        ("/*0070*/ LDS.128 R20, [R155+0x6a00] ;", []),
        ("/*0070*/ LDS.128 R22, [R155+0x6a00] ;", ["LDS.128 R22, [R155+0x6a00]"]),
        ("/*0070*/ LOP3.LUT P0, R24, R24, 0x18, RZ, 0xc0, !PT ;", ["LOP3.LUT P0, R24, R24, 0x18, RZ, 0xc0, !PT"]),
        ("/*0070*/ IMAD.WIDE.U32 R23, R12, 0x4, R6 ;", ["IMAD.WIDE.U32 R23, R12, 0x4, R6"]),
    ],
)
def test_registers_of_products_under_way(gate, line, expected):
    """After a wait for all groups but the last, only the last one's sums are owned; reads and stores write nothing."""
    text = PRODUCTS.format("        " + line)
    assert gate.owned_writes(text.splitlines()) == expected
    first, _ = gate.parse(PTXAS)
    first.owned = gate.functions_of("\t\tFunction : _Z5firstPf\n" + text)["_Z5firstPf"]
    first.owned = gate.owned_writes(first.owned)
    faults = gate.faults([first], {})
    assert len(faults) == len(expected) and all("product under way" in fault for fault in faults)


def test_architectures(gate, tmp_path):
    """By name; what the package lists as common, for both."""
    (tmp_path / "CMakeLists.txt").write_text(
        "kernel_core_add_cuda_module(_cuda\n  SOURCES\n    csrc/b.cu\n  COMMON\n    csrc/c.cu\n    csrc/d.cu)"
    )
    found = {name: gate.architectures(tmp_path / "csrc" / f"{name}.cu") for name in ("b", "c", "d", "e_sm100")}
    assert found == {"b": ("90a",), "c": ("90a", "100a"), "d": ("90a", "100a"), "e_sm100": ("100a",)}
    text = (GATE.parents[1] / "packages" / "swa_replay" / "CMakeLists.txt").read_text()
    assert gate.common_sources(text) == {"csrc/cuda/ring_store.cu"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void a::(anonymous namespace)::k<a::Config<float, 8> >(a::Params, long)", "a::k<a::Config<float, 8> >"),
        ("a::_GLOBAL__N__1d3521be_11_x_cu_fb34e284::pool(a::Params)", "a::pool"),
        ("plain", "plain"),
    ],
)
def test_names(gate, name, expected):
    assert gate.short(name) == expected


def test_an_unknown_limit_is_named(gate, tmp_path):
    path = tmp_path / "budgets.json"
    path.write_text('{"k": {"registres": 1}}')
    with pytest.raises(SystemExit, match="registres"):
        gate.read_budgets(path)
    path.write_text('{"k": {"sass": {"UTCHMAM": 1}}}')
    with pytest.raises(SystemExit, match="UTCHMAM"):
        gate.read_budgets(path)


def run(*arguments, path=None):
    environment = os.environ | ({"PATH": str(path)} if path else {})
    return subprocess.run(
        [sys.executable, str(GATE), *map(str, arguments)], capture_output=True, text=True, env=environment
    )


def test_without_nvcc_it_says_that_nothing_was_compiled(tmp_path):
    done = run("--json", tmp_path / "report.json", path=tmp_path)
    assert done.returncode == 0
    assert "skipped" in done.stdout and "no device kernel was compiled" in done.stdout
    assert not (tmp_path / "report.json").exists()


TINY = """
__global__ void __launch_bounds__(32) tiny(float* x) {
  __shared__ float kept[32];
  kept[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = kept[31 - threadIdx.x];
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_tiny_kernel_and_its_budget(tmp_path):
    cuda = tmp_path / "some" / "csrc" / "cuda"
    cuda.mkdir(parents=True)
    (cuda / "tiny.cu").write_text(TINY)
    (cuda / "tiny_sm100.cu").write_text(TINY)
    report = tmp_path / "report.json"
    done = run("--packages", tmp_path, "--json", report)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = json.loads(report.read_text())["kernels"]
    assert [(k["name"], k["arch"], k["shared"]) for k in kernels] == [
        ("tiny", "sm_90a", 128),
        ("tiny", "sm_100a", 128),
    ]
    assert all(0 < k["registers"] < 64 and k["spill_stores"] == 0 for k in kernels)

    (cuda / "budgets.json").write_text('{"tiny": {"registers": 1}}')
    done = run("--packages", tmp_path, "--json", report)
    assert done.returncode == 1
    assert "the budget is 1" in done.stdout
    (cuda / "tiny.cu").write_text("broken")
    done = run("--packages", tmp_path, "--json", report)
    assert done.returncode == 1
    assert "does not compile" in done.stderr
