"""The expert kernels' own device code, thread by thread on the host: who waits for whom, where what stands, bits."""

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch

from kernel_core.testing import assert_bitwise, assert_close
from kernel_core.testing.child import load_file
from kernel_core.testing.host import address, host_library
from mega_moe import reference
from mega_moe.cuda import layout, layout_fp8
from mega_moe.cuda.ranks import number_rows

HERE = Path(__file__).parent
CASES = load_file(HERE / "expert_cases.py")
sort_rows, random_ids, quantized = CASES.sort_rows, CASES.random_ids, CASES.quantized
GATHER, FIRST, SECOND, COMBINE, ALL = 1, 2, 4, 8, 15
SECONDS = 60


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expert_device")
    library = host_library(HERE / "host/expert_threads.cpp", folder, HERE.parent / "csrc", HERE / "host/stub")
    library.run_experts.argtypes = [ctypes.c_void_p] * 2 + [
        ctypes.c_float,
        ctypes.c_uint64,
        ctypes.c_double,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    ]
    library.run_experts.restype = ctypes.c_char_p
    return library


class Case:
    def __init__(self, weights, ids, *, d=512, inter=256, experts=4, shared=True):
        tokens, slots = ids.shape
        self.d, self.inter, self.experts = d, inter, experts
        self.x, self.ids, self.gains = weights.normal(tokens, d), ids, torch.rand(tokens, slots)
        self.w13, self.s13 = (t.view(experts, 2 * inter, -1) for t in weights.mxfp4(experts * 2 * inter, d))
        self.w2, self.s2 = (t.view(experts, d, -1) for t in weights.mxfp4(experts * d, inter))
        self.shared = weights.shared(d, inter) if shared else None
        self.packed = layout.pack_experts(self.w13, self.s13, self.w2, self.s2, self.shared)
        self.offsets, self.rows = sort_rows(ids, experts)

    def expected(self):
        """The reference with the kernel's roundings: x and hidden rows are bfloat16."""
        rounded = self.x.bfloat16().float()
        out = torch.zeros_like(rounded)
        for slot in range(self.ids.shape[1]):
            for token, expert in enumerate(self.ids[:, slot].tolist()):
                if 0 <= expert < self.experts:
                    full13 = reference.dequantize_mxfp4(self.w13[expert], self.s13[expert])
                    full2 = reference.dequantize_mxfp4(self.w2[expert], self.s2[expert])
                    out[token] += one(rounded[token], full13, full2, self.gains[token, slot])
        if self.shared is not None:
            full13 = reference.dequantize(self.shared.w13, self.shared.s13)
            full2 = reference.dequantize(self.shared.w2, self.shared.s2)
            for token in range(len(out)):
                out[token] += one(rounded[token], full13, full2, torch.ones(()))
        return out

    def run(self, lib, *, seed=0, chain=False, **options):
        launch = Launch(self, lib, **options)
        launch_all(lib, [launch], seed=seed, chain=chain)
        return launch.result()


class Launch:
    """What one rank's launch reads and writes."""

    def __init__(self, case, lib, *, columns=8, ctas=1, as_float=True, x_as_float=None, split=False, everybody=None,
                 places=None):  # fmt: skip
        tokens, slots = case.ids.shape
        bytes_of = (ctypes.c_int64 * 4)()
        rows_of = (everybody or tokens, slots, case.d, case.inter, case.experts, case.shared is not None, columns)
        lib.sizes((ctypes.c_int64 * 7)(*rows_of), bytes_of)
        images, hidden, parts = (torch.full((size,), 255, dtype=torch.uint8) for size in bytes_of[:3])
        self.state = torch.zeros(bytes_of[3] // 4, dtype=torch.int32)
        dtype = torch.float32 if as_float else torch.bfloat16
        self.guarded = torch.full((tokens + 2, case.d), 77.0, dtype=dtype)
        out = self.guarded[1:-1]
        out[:] = torch.nan
        x_as_float = as_float if x_as_float is None else x_as_float
        p, none = case.packed, torch.empty(0)
        maybe = {name: getattr(p, name, None) for name in ("shared13", "shared2", "scale13", "scale2")}
        maybe = {name: none if value is None else value for name, value in maybe.items()}
        x = case.x.to(torch.float32 if x_as_float else torch.bfloat16)
        tensors = [x, case.ids, case.gains, case.offsets, case.rows, p.w13, p.w2]
        tensors += [maybe["shared13"], maybe["shared2"], out, images, hidden, parts, self.state]
        tensors += [maybe["scale13"], maybe["scale2"], torch.zeros(64, dtype=torch.int32)]
        tensors.append(none if places is None else places)
        self.tensors = tensors
        self.sizes = [x_as_float, tokens, slots, case.d, case.inter, case.experts, 1, as_float]
        self.launch = [columns, ctas, split]

    def result(self):
        assert (self.guarded[0] == 77).all() and (self.guarded[-1] == 77).all()
        return self.guarded[1:-1].clone()


def launch_all(lib, ranks, *, seed=0, chain=False, rows_of_rank=2**31 - 1, parts=(ALL,), met=False):
    """One launch for each rank, all at the same time."""
    pointers = torch.tensor([t.data_ptr() for rank in ranks for t in rank.tensors])
    for part in (GATHER, FIRST, SECOND, COMBINE) if chain else parts:
        numbers = torch.tensor([[*rank.sizes, part, *rank.launch] for rank in ranks], dtype=torch.int64)
        where = address(pointers), address(numbers)
        error = lib.run_experts(*where, 10.0, seed, SECONDS, len(ranks), rows_of_rank, met)
        assert error == b"", error.decode()
        for rank in ranks:
            assert not rank.state[:8].any() and not rank.state[16:].any()


def one(row, full13, full2, weight):
    gate, up = (full13.double() @ row.double()).float().chunk(2)
    hidden = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10) * weight
    return (full2.double() @ hidden.bfloat16().double()).float()


@pytest.mark.parametrize("seed", range(4))
def test_few_rows(lib, weights, seed):
    case = Case(weights, random_ids(3, 2, 4))
    got = case.run(lib, seed=seed, ctas=2)
    assert_close(got, case.expected(), atol=2e-3, rtol=2e-3)
    assert_bitwise(case.run(lib, seed=seed + 4, chain=True), got, name="chain")
    assert_bitwise(case.run(lib, seed=seed + 1, ctas=1, columns=64), got, name="wide tiles")
    assert_bitwise(case.run(lib, seed=seed + 2, ctas=3, as_float=False), got.bfloat16(), name="bfloat16")


@pytest.mark.parametrize("columns", [8, 16, 32, 64, 128])
def test_one_hot_expert_and_empty_ones(lib, weights, columns):
    """All tokens to one expert, in several token tiles; others have none; empty slots and foreign ids."""
    ids = torch.full((19, 2), -1, dtype=torch.int32)
    ids[:, 0] = 2
    ids[3, 1], ids[4, 1], ids[5, 0] = 0, 4, -1
    case = Case(weights, ids, d=256)
    got = case.run(lib, columns=columns, ctas=2, seed=columns // 8)
    assert_close(got, case.expected(), atol=2e-3, rtol=2e-3)
    assert_bitwise(case.run(lib, columns=8, ctas=1), got)


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_straight_from_x(lib, weights, columns, split, seed):
    """bfloat16 rows are read where they lie: the bits of those that go through images."""
    ids = random_ids(11, 2, 4)
    ids[:, 0] = torch.where(ids[:, 1] == 2, ids[:, 0], 2)  # an expert with more than a tile
    case = Case(weights, ids, d=512, inter=256, shared=seed != 1)
    whole = case.run(lib)
    options = {"columns": columns, "split": split, "x_as_float": False, "ctas": 1 + seed}
    assert_bitwise(case.run(lib, seed=seed + 5, **options), whole)
    assert_bitwise(case.run(lib, seed=seed, chain=True, **options), whole, name="chain")


@pytest.mark.parametrize("columns", [8, 16])
def test_a_block_for_each_two_warpgroups(lib, weights, columns):
    case = Case(weights, random_ids(9, 2, 4), d=256)
    assert_bitwise(case.run(lib, columns=columns, split=True, ctas=2, seed=columns), case.run(lib))


@pytest.mark.parametrize("slots", [1, 2, 7])
@pytest.mark.parametrize("ctas", [1, 2])
def test_sums_of_few_and_many_slots(lib, weights, slots, ctas):
    """More places than a thread takes at once, and a rest; with and without the shared expert."""
    for shared in (False, True):
        case = Case(weights, random_ids(37, slots, 3), shared=shared)
        got = case.run(lib, columns=64, ctas=ctas, seed=slots)
        assert_close(got, case.expected(), atol=2e-3, rtol=2e-3)


def test_no_shared_expert(lib, weights):
    ids = random_ids(5, 3, 4)
    ids[2] = -1
    case = Case(weights, ids, inter=512, shared=False)
    got = case.run(lib, ctas=2, seed=3)
    assert_close(got, case.expected(), atol=2e-3, rtol=2e-3)
    assert (got[2] == 0).all()
    assert_bitwise(case.run(lib, columns=16, ctas=3, chain=True, seed=1), got)


def test_a_row_depends_on_itself(lib, weights):
    case = Case(weights, random_ids(9, 2, 4), d=256)
    whole = case.run(lib, columns=16)
    for row in (0, 8):
        alone = Case.__new__(Case)
        alone.__dict__.update(case.__dict__)
        alone.x, alone.ids, alone.gains = (t[row : row + 1].contiguous() for t in (case.x, case.ids, case.gains))
        alone.offsets, alone.rows = sort_rows(alone.ids, case.experts)
        assert_bitwise(alone.run(lib, seed=row), whole[row : row + 1], name=f"row {row}")


def test_nobody_at_home(lib, weights):
    case = Case(weights, torch.full((2, 2), -1, dtype=torch.int32), d=256, shared=False)
    assert (case.run(lib, ctas=2) == 0).all()


def moved_apart(case, order, seed=0):
    """The same experts in a larger pool: expert e stands at order[e], bytes that nobody may read between them."""
    packed = case.packed
    room = max(order) + 2
    wide = [torch.randint(0, 256, (room, t.shape[1]), dtype=torch.uint8) for t in (packed.w13, packed.w2)]
    for to, given in zip(wide, (packed.w13, packed.w2), strict=True):
        to[torch.tensor(order)] = given
    case.packed = dataclasses.replace(packed, w13=wide[0], w2=wide[1])
    return torch.tensor(order, dtype=torch.int32)


@pytest.mark.parametrize("shared", [False, True])
def test_experts_anywhere_in_a_pool(lib, weights, shared):
    case = Case(weights, random_ids(9, 2, 4), d=256, shared=shared)
    whole = case.run(lib)
    places = moved_apart(case, [5, 0, 7, 2])
    assert_bitwise(case.run(lib, ctas=2, places=places, seed=1), whole)
    assert_bitwise(case.run(lib, columns=16, places=places, x_as_float=False, chain=True), whole, name="chain")


@pytest.mark.parametrize("columns", [8, 64])
def test_results_of_slots_alone(lib, weights, columns):
    """Without the sum each slot's row stays where it was put; rows of empty slots and `out` are not touched."""
    ids = random_ids(7, 3, 4)
    ids[2], ids[5, 1] = -1, -1
    case = Case(weights, ids, d=256, shared=False)
    whole = case.run(lib)
    launch = Launch(case, lib, columns=columns, ctas=2)
    launch_all(lib, [launch], parts=(GATHER | FIRST | SECOND,))
    assert launch.result().isnan().all()
    parts = launch.tensors[12].view(torch.float32).view(-1, case.d)[: ids.numel()].view(*ids.shape, -1)
    assert (parts[ids < 0].view(torch.int32) == -1).all()  # as it was filled
    added = torch.zeros_like(whole)
    for slot in range(3):
        added += torch.where(ids[:, slot, None] >= 0, parts[:, slot], 0)
    assert_bitwise(added, whole)


@pytest.mark.parametrize("seed", range(4, 16))
def test_no_bit_depends_on_who_goes_first(lib, weights, seed):
    case = Case(weights, random_ids(4, 2, 4), d=256)
    assert_bitwise(case.run(lib, seed=seed, ctas=1 + seed % 3), case.run(lib))


def expected_fp8(case):
    rounded = quantized(case.x.bfloat16().float())
    out = torch.zeros_like(rounded)
    for slot in range(case.ids.shape[1]):
        for token, expert in enumerate(case.ids[:, slot].tolist()):
            if expert >= 0:
                full13 = reference.dequantize_mxfp4(case.w13[expert], case.s13[expert])
                full2 = reference.dequantize_mxfp4(case.w2[expert], case.s2[expert])
                gate, up = (full13.double() @ rounded[token].double()).float().chunk(2)
                hidden = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10) * case.gains[token, slot]
                out[token] += (full2.double() @ quantized(hidden).double()).float()
    return out


@pytest.mark.parametrize(("tokens", "seed"), [(3, 0), (70, 1), (140, 2), (9, 3)])
def test_fp8_activations(lib, weights, tokens, seed):
    """Tiles of 64 and 128 rows; a token of zeros."""
    ids = random_ids(tokens, 2, 4)
    ids[1:, 0] = 2  # more than a tile
    ids[:, 1] = torch.where(ids[:, 1] == 2, -1, ids[:, 1])
    case = Case(weights, ids, d=256, inter=256, shared=False)
    case.x[0] = 0
    case.packed = layout_fp8.pack_experts(case.w13, case.s13, case.w2, case.s2)
    got = case.run(lib, columns=128, ctas=2, seed=seed)
    assert (got - expected_fp8(case)).norm() < 1e-3 * got.norm()
    assert_bitwise(case.run(lib, columns=128, ctas=3, seed=seed + 5, chain=True), got, name="chain")


# ---- several ranks


def split_over_ranks(case, counts, experts):
    """The same tokens and experts as `case`, a rank at a time; rows are numbered over all ranks."""
    ranks, first, width = [], 0, 0
    for rank, count in enumerate(counts):
        one_rank = Case.__new__(Case)
        one_rank.__dict__.update(case.__dict__)
        own = slice(first, first + count)
        one_rank.x, one_rank.ids, one_rank.gains = (t[own].contiguous() for t in (case.x, case.ids, case.gains))
        mine = slice(rank * experts, (rank + 1) * experts)
        raw = [t[mine].contiguous() for t in (case.w13, case.s13, case.w2, case.s2)]
        one_rank.packed = layout.pack_experts(*raw, case.shared)
        one_rank.experts = experts
        one_rank.offsets, one_rank.rows, width = number_rows(case.ids.split(counts), rank, experts)
        ranks.append(one_rank)
        first += count
    return ranks, width


@pytest.mark.parametrize("counts", [(3, 3), (0, 5), (6, 1), (2, 0)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("seed", "x_as_float"), [(0, True), (3, True), (3, False)])
def test_ranks_give_the_bits_of_one(lib, weights, counts, shared, seed, x_as_float):
    """Also ranks without tokens, ranks whose experts nobody wants, and launches after each other."""
    ids = random_ids(sum(counts), 2, 4)
    if counts == (2, 0):
        ids %= 2  # all to the first rank's experts
        ids[:, 1] = -1
    case = Case(weights, ids, d=256, shared=shared)
    whole = case.run(lib)
    cases, width = split_over_ranks(case, counts, 2)
    ranks = [Launch(each, lib, ctas=2, x_as_float=x_as_float, everybody=sum(counts)) for each in cases]
    for turn in range(3):
        for rank in ranks:
            rank.guarded[1:-1] = torch.nan
        # A launch here begins when all ranks' earlier ones have ended: they need not meet inside.
        launch_all(lib, ranks, seed=seed + turn, rows_of_rank=width, chain=turn == 1, met=turn == 2)
        got = torch.cat([rank.result() for rank in ranks])
        assert_bitwise(got, whole, name=f"turn {turn}")
        assert [int(rank.state[8]) for rank in ranks] == [turn + 1] * 2
