"""TileLang programs as far as a machine without a GPU can take them: source for three targets, machine code for two."""

from __future__ import annotations

import re
import shutil

import pytest

from dspark_kernels.tile import lower

pytest.importorskip("tilelang", reason="TileLang is not installed: its programs are neither lowered nor compiled")
PROGRAMS = {  # name: sizes, and what its CUDA source has to contain
    "schedule": ((64, 5, 400, 70), ("AllReduce<tl::SumOp", "CumSum1D", "__syncthreads")),
    "stats": ((12, 129_280), ("AllReduce<tl::MaxOp", "AllReduce<tl::SumOp", "exp2f")),
    "decide": ((4, 5, 24, 129_280, 6), ("AllReduce<tl::MaxOp", "logf")),
    "token": ((4, 5, 24, 129_280, 6), ("CumSum1D", "AllReduce<tl::MinOp")),
    "cut": ((24, 129_280), ("exp2f", "__syncthreads")),
    "filtered decide": ((4, 5, 24, 129_280, 6), ("exp2f",)),
    "filtered token": ((4, 5, 24, 129_280, 6), ("exp2f", "__syncthreads")),
}


def program(name):
    from dspark_kernels.tile import cut, filtered, schedule, verify

    where = {"schedule": schedule, "cut": cut, "filtered decide": filtered, "filtered token": filtered}.get(
        name, verify
    )
    return getattr(where, f"{name.split()[-1]}_program")(*PROGRAMS[name][0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_cuda_source(name):
    source = lower.lower(program(name), "sm90")
    for part in PROGRAMS[name][1]:
        assert part in source, part
    assert 'extern "C" __global__' in source
    assert "[4096]" not in source, "a whole piece in the registers of one thread"


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "schedule" in name])
def test_no_thread_keeps_a_number_for_itself(name):
    """TileLang has one thread do a statement with a global read outside of parallel loops: a variable that it sets
    stays unset in the others, which all need it here."""
    lines = lower.lower(program(name), "sm90").splitlines()
    guards = [n for n, line in enumerate(lines) if "threadIdx.x) == 0" in line and line.rstrip().endswith("{")]
    assert guards  # the last entry of cu_rows
    for n in guards:
        assert not re.match(r"\s*[a-z_0-9]+ = ", lines[n + 1]), lines[n + 1]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("kind", ["sm90", "sm100"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_machine_code(name, kind):
    """nvcc takes the source for the architecture: an error would be raised."""
    assert len(lower.lower(program(name), kind, machine_code=True)) > 1000


def test_ascend_source():
    """Four SIMT regions between the copies in and out, the same text every time."""
    from dspark_kernels.tile import schedule_asc

    first, second = (lower.lower_ascend(schedule_asc.schedule_program(64, 5, 256, 70)) for _ in range(2))
    assert first == second
    assert first.count("__simt_vf__") >= 4 and "asc_copy_gm2ub_align" in first and "asc_copy_ub2gm_align" in first


def test_sizes_that_do_not_fit_are_refused():
    from dspark_kernels.tile import schedule, schedule_asc

    for sizes in ((1025, 5, 10, 10), (4, 9, 10, 10)):
        with pytest.raises(ValueError, match="got"):
            schedule.schedule_program(*sizes)
    with pytest.raises(ValueError, match="multiples of 8"):
        schedule_asc.schedule_program(12, 5, 64, 12)


def test_targets_are_named():
    with pytest.raises(ValueError, match="kind: got 'sm80'"):
        lower.cuda_target("sm80")
