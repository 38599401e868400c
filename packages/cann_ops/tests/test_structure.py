"""What the gate reads from a kernel's text, and that it refuses what it should: on texts of our own."""

from __future__ import annotations

import dataclasses

import pytest

from cann_ops import structure
from cann_ops.kernels import Kernel
from cann_ops.lowering import Lowered, Parameter, _memory, _parameter

TEXT = """
__simd_vf__ inline void k_vf(__ubuf__ float* b) { simd_inst::vsts_norm(simd_inst::vadd(b, b), b); }
extern "C" __global__ __vector__ void k(__gm__ float* x, int32_t n) {
  asc_sync_notify(PIPE_MTE3, PIPE_MTE2, static_cast<event_t>(0));
  asc_sync_wait(PIPE_MTE3, PIPE_MTE2, static_cast<event_t>((v & 1)));
  asc_copy_gm2ub_align(b, x, 1, 32);
  k_vf(b);
}
"""


def lowered(source=TEXT, **changes):
    base = Lowered(Kernel.of("k"), source, "k", "__vector__", 64, 1024, (), {}, {"UB": 1024})
    return dataclasses.replace(base, **changes)


def test_a_plain_kernel_has_nothing_wrong():
    assert structure.problems(lowered(), "__vector__", ("asc_copy_gm2ub_align", "simd_inst::vadd")) == []


@pytest.mark.parametrize(
    "change, said",
    [
        ({"core": "__cube__"}, "core: got __cube__"),
        ({"memory": {"UB": 248 * 1024 + 1}}, "UB: got 253953 bytes, allowed are 253952"),
        ({"memory": {"L1": 512 * 1024 + 32}}, "L1"),
        ({"memory": {"L0C": 256 * 1024 + 64}}, "L0C"),
        ({"source": TEXT.replace("asc_copy_gm2ub_align", "asc_copy_other")}, "asc_copy_gm2ub_align is missing"),
        ({"source": TEXT.replace("asc_sync_wait", "asc_sync_look")}, "PIPE_MTE3 to PIPE_MTE2: set or waited for alone"),
        ({"source": TEXT.replace("event_t>(0)", "event_t>(8)")}, "got 8, allowed are 0 to 7"),
        ({"source": TEXT + "asc_sync_intra_arrive(PIPE_V, 3);"}, "cross 3"),
    ],
)
def test_what_is_wrong_is_said(change, said):
    found = structure.problems(lowered(**change), "__vector__", ("asc_copy_gm2ub_align",))
    assert len(found) == 1 and said in found[0], found


def test_threads_leave_less_of_the_unified_buffer():
    source = TEXT + "__simt_vf__ void t(); asc_vf_call<t>(cce::dim3(128), b);"
    assert structure.problems(lowered(source, memory={"UB": 216 * 1024}), "__vector__") == []
    assert "allowed are 221184" in structure.problems(lowered(source, memory={"UB": 216 * 1024 + 1}), "__vector__")[0]
    many = source.replace("dim3(128)", "dim3(4096)")
    assert "threads: got 4096" in structure.problems(lowered(many), "__vector__")[0]


def test_crossing_flags_of_both_vector_cores_pair():
    source = (
        TEXT
        + "asc_sync_intra_arrive(PIPE_FIX, 1); asc_sync_intra_arrive(PIPE_FIX, 17); asc_sync_intra_wait(PIPE_V, 1);"
    )
    assert structure.problems(lowered(source), "__vector__") == []


def test_products_of_whole_tiles_count_both_halves_of_l0():
    source = TEXT + "ascend_blockscaled_gemm_l1<64, 256, 128, 256, true, 4, float8_e4m3_t, int16_t, float>(a, b);"
    memory = structure.read(lowered(source)).memory
    assert memory["L0A"] == 2 * 64 * 256 and memory["L0B"] == 2 * 128 * 256
    assert structure.problems(lowered(source), "__vector__") == []
    large = source.replace("<64, 256, 128, 256,", "<64, 512, 128, 512,")
    assert "L0B: got 131072 bytes" in structure.problems(lowered(large), "__vector__")[0]


def test_memory_is_read_from_the_lowered_program():
    script = """
        a = T.alloc_buffer((T.int64(10880),), "uint8", scope="shared.l1.dyn")
        b = T.alloc_buffer((4096,), scope="shared.l0c")
        c = T.alloc_buffer((2, 64), "bfloat16", scope="shared.l0a")
        d = T.alloc_buffer((64, 128), "float4_e2m1fn", scope="shared.l0b")
        e = T.alloc_buffer((1,), "int32", scope="local.var")
    """
    assert _memory(script) == {"L1": 10880, "L0C": 4 * 4096, "L0A": 256, "L0B": 4096}


def test_parameters_lose_their_address_space():
    assert _parameter("__gm__ const float* x") == Parameter("x", "float", True)
    assert _parameter("int32_t n") == Parameter("n", "int32_t", False)
