"""The device code of the experts for many tokens, thread by thread on the host."""

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from kernel_core.testing import assert_bitwise
from kernel_core.testing.child import load_file
from kernel_core.testing.host import address, host_library
from mega_moe import reference
from mega_moe.cuda import layout, layout_fp8

HERE = Path(__file__).parent
CASES = load_file(HERE / "expert_cases.py")
sort_rows, random_ids, quantized = CASES.sort_rows, CASES.random_ids, CASES.quantized
SECONDS = 120


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefill_device")
    library = host_library(HERE / "host/prefill_threads.cpp", folder, HERE.parent / "csrc", HERE / "host/stub")
    library.run_prefill.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_float, ctypes.c_uint64, ctypes.c_double]
    library.run_prefill.restype = ctypes.c_char_p
    library.prefill_tiles.restype = ctypes.c_int64
    return library


class Case:
    def __init__(self, weights, ids, *, d=256, inter=256, experts=3, fp8=True):
        tokens, slots = ids.shape
        self.d, self.inter, self.experts = d, inter, experts
        self.x, self.ids, self.gains = weights.normal(tokens, d).bfloat16(), ids, torch.rand(tokens, slots)
        self.w13, self.s13 = (t.view(experts, 2 * inter, -1) for t in weights.mxfp4(experts * 2 * inter, d))
        self.w2, self.s2 = (t.view(experts, d, -1) for t in weights.mxfp4(experts * d, inter))
        self.fp8 = fp8
        self.packed = (layout_fp8 if fp8 else layout).pack_experts(self.w13, self.s13, self.w2, self.s2)
        self.offsets, self.rows = sort_rows(ids, experts)

    def expected(self):
        kept = quantized if self.fp8 else bfloat
        rounded = kept(self.x.float())
        out = torch.zeros_like(rounded)
        for slot in range(self.ids.shape[1]):
            for token, expert in enumerate(self.ids[:, slot].tolist()):
                if 0 <= expert < self.experts:
                    full13 = reference.dequantize_mxfp4(self.w13[expert], self.s13[expert])
                    full2 = reference.dequantize_mxfp4(self.w2[expert], self.s2[expert])
                    gate, up = (full13.double() @ rounded[token].double()).float().chunk(2)
                    hidden = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
                    hidden = kept(hidden * self.gains[token, slot])
                    out[token] += (full2.double() @ hidden.double()).float()
        return out

    def run(
        self, lib, *, tile=128, ctas=2, seed=0, expanded=False, as_float=True, parts_are_float=True, direct=False, lag=0
    ):
        tokens, slots = self.ids.shape
        sizes = (ctypes.c_int64 * 2)()
        lib.prefill_bytes((ctypes.c_int64 * 6)(tokens, slots, self.d, self.inter, self.experts, self.fp8), sizes)
        images, hidden = (guarded_bytes(size) for size in sizes)
        dtype = torch.float32 if as_float else torch.bfloat16
        guarded = torch.full((tokens + 2, self.d), 77.0, dtype=dtype)
        out = guarded[1:-1]
        out[:] = torch.nan
        of_parts = torch.float32 if parts_are_float else torch.bfloat16
        parts = out if direct else torch.full((tokens * slots, self.d), torch.nan, dtype=of_parts)
        p, none = self.packed, torch.empty(0)
        expanded13 = torch.full((self.w13.numel() * 2,), 255, dtype=torch.uint8) if expanded else none
        expanded2 = torch.full((self.w2.numel() * 2,), 255, dtype=torch.uint8) if expanded else none
        x = self.x.to(dtype)
        scales = [p.scale13, p.scale2] if self.fp8 else [none, none]
        tensors = [x, self.ids, self.gains, self.offsets, self.rows, p.w13, p.w2, *scales, out]
        tensors += [images[0], hidden[0], parts, expanded13, expanded2]
        pointers = torch.tensor([t.data_ptr() for t in tensors])
        numbers = torch.tensor(
            [as_float, tokens, slots, self.d, self.inter, self.experts, as_float, parts_are_float, tile, ctas, lag]
        )
        error = lib.run_prefill(address(pointers), address(numbers), 10.0, seed, SECONDS)
        assert error == b"", error.decode()
        assert (guarded[0] == 77).all() and (guarded[-1] == 77).all()
        for inside, whole in (images, hidden):
            assert (whole[inside.numel() :] == 255).all()
        return out.clone()


def guarded_bytes(size):
    whole = torch.full((size + 4096,), 255, dtype=torch.uint8)
    return whole[:size], whole


def bfloat(rows):
    return rows.bfloat16().float()


def close(got, case, limit=1e-3):
    want = case.expected()
    assert (got - want).norm() < limit * want.norm()


VARIANTS = list(itertools.product((64, 128), (False, True)))


@pytest.mark.parametrize(("tile", "expanded"), VARIANTS)
@pytest.mark.parametrize("tokens", [1, 70])
def test_against_the_reference(lib, weights, tile, expanded, tokens):
    case = Case(weights, random_ids(tokens, 2, 3), d=512)
    close(case.run(lib, tile=tile, expanded=expanded, seed=tile // 64), case)


@pytest.mark.parametrize("seed", range(8))
def test_no_bit_depends_on_variants_or_who_goes_first(lib, weights, seed):
    """One hot expert, in several tiles and with a tail; one that has none; empty slots and foreign ids; odd groups."""
    ids = torch.full((135, 2), -1, dtype=torch.int32)
    ids[:, 0] = 2
    ids[3, 1], ids[4, 1], ids[5, 0] = 0, 3, -1
    case = Case(weights, ids, inter=256 if seed % 2 else 512)
    whole = case.run(lib)
    close(whole, case)
    assert (whole[5] == 0).all()
    tile, expanded = VARIANTS[seed % 4]
    assert_bitwise(case.run(lib, tile=tile, expanded=expanded, ctas=1 + seed % 3, lag=seed % 3, seed=seed), whole)


@pytest.mark.parametrize("seed", range(8))
def test_bfloat16_activations(lib, weights, seed):
    ids = torch.full((135, 2), -1, dtype=torch.int32)
    ids[:, 0] = 2
    ids[3, 1], ids[4, 1], ids[5, 0] = 0, 3, -1
    case = Case(weights, ids, inter=256 if seed % 2 else 512, d=256 if seed % 3 else 512, fp8=False)
    whole = case.run(lib)
    close(whole, case, limit=2e-4)
    assert (whole[5] == 0).all()
    assert_bitwise(case.run(lib, tile=64 if seed % 4 < 2 else 128, ctas=1 + seed % 3, lag=seed % 2, seed=seed), whole)


def test_results_of_both_types(lib, weights):
    case = Case(weights, random_ids(9, 2, 3))
    whole = case.run(lib)
    assert_bitwise(case.run(lib, as_float=False), whole.bfloat16())
    close(case.run(lib, as_float=False, parts_are_float=False).float(), case, limit=1e-2)


@pytest.mark.parametrize("as_float", [False, True])
def test_one_slot_needs_no_parts(lib, weights, as_float):
    ids = random_ids(9, 1, 3)
    ids[4] = -1
    case = Case(weights, ids)
    options = {"as_float": as_float, "parts_are_float": as_float}
    assert_bitwise(case.run(lib, direct=True, **options), case.run(lib, **options))


def test_zeros_and_nan_are_a_tokens_own(lib, weights):
    case = Case(weights, random_ids(9, 2, 3))
    clean = case.run(lib)
    case.x[2], case.x[4] = 0, torch.nan
    got = case.run(lib)
    assert (got[2] == 0).all() and got[4].isnan().all()
    keep = torch.tensor([0, 1, 3, 5, 6, 7, 8])
    assert_bitwise(got[keep], clean[keep])


def test_nobody_at_home(lib, weights):
    case = Case(weights, torch.full((2, 2), -1, dtype=torch.int32))
    assert (case.run(lib) == 0).all()


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_tiles_cover_all_once(lib, tile, groups):
    counts = [0, 1, 64, 65, 0, 200, 128, 0]
    out = torch.zeros(5 * 1000, dtype=torch.int32)
    given = torch.tensor(counts)
    rows = out.view(-1, 5)[: lib.prefill_tiles(address(given), len(counts), groups, tile, address(out))].tolist()
    seen = [(e, b + i, g + j) for e, b, blocks, g, more in rows for i in range(blocks) for j in range(more)]
    wanted = [(e, b, g) for e, n in enumerate(counts) for b in range(-(-n // 64)) for g in range(groups)]
    assert sorted(seen) == wanted
