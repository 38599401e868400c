"""Publishing tokens for fused experts: the device code on host threads against a plain rule."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from ep_comm import Shape
from kernel_core.testing.child import load_file

EMULATED = load_file(Path(__file__).parent / "emulated.py")
Report = EMULATED.Report
TIMEOUT = 1


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    made = EMULATED.device_code(tmp_path_factory.mktemp("publish"))
    made.run_publish.restype = None
    return made


def guarded(*shape, dtype):
    """A tensor of NaN or -7 with a guard behind it."""
    size = torch.Size(shape).numel()
    fill = float("nan") if dtype.is_floating_point else -7
    whole = torch.full((size + 16,), fill, dtype=dtype)
    whole[size:] = 77
    return whole


class Group:
    """All ranks of a shape, with `logical` experts whose copies are drawn by `seed`."""

    def __init__(self, library, shape: Shape, logical: int, seed: int) -> None:
        self.library, self.shape, self.seed = library, shape, seed
        self.emulated = EMULATED.Emulated(library, shape)
        g = torch.Generator().manual_seed(seed)
        self.copies = torch.full((logical, shape.ranks), -1, dtype=torch.int32)
        self.counts = torch.zeros(logical, dtype=torch.int32)
        free = torch.randperm(shape.physical_experts, generator=g).tolist()
        for e in range(logical):  # a copy each, then further ones on other ranks while there is room
            self._add(e, free.pop())
        for i, place in enumerate(free):
            self._add(i % logical, place)
        self.own = [
            torch.tensor([max([c for c in row.tolist() if c // shape.experts == r and c >= 0], default=-1)
                          for row in self.copies], dtype=torch.int32)
            for r in range(shape.ranks)
        ]  # fmt: skip

    def _add(self, expert: int, place: int) -> None:
        ranks = {int(c) // self.shape.experts for c in self.copies[expert] if c >= 0}
        if place // self.shape.experts not in ranks:
            self.copies[expert, self.counts[expert]] = place
            self.counts[expert] += 1

    def choose(self, rank, ids, padding):
        made = torch.full_like(ids, -1)
        for token, row in enumerate(ids.tolist()):
            for slot, e in enumerate(row):
                if padding[token] or not 0 <= e < len(self.counts):
                    continue
                turn = int((token + rank) % self.counts[e])
                made[token, slot] = self.own[rank][e] if self.own[rank][e] >= 0 else self.copies[e, turn]
        return made

    def run(self, turns, *, ctas=2, comes=None, limit=10**7, narrow=False):
        """`turns`: for each the ranks' (x, ids, weights, padding); returns what each turn left, by rank."""
        s, made, values = self.shape, [], []
        for turn in turns:
            left = []
            for rank in range(s.ranks):
                x, ids, weights, padding = turn[rank]
                buffers = {
                    "rows": guarded(s.max_tokens, s.hidden, dtype=torch.bfloat16),
                    "gains": guarded(s.max_tokens, s.top_k, dtype=torch.float32),
                    "slots": guarded(s.ranks, s.max_tokens, s.top_k, dtype=torch.int32),
                    "physical": guarded(len(x), s.top_k, dtype=torch.int32),
                    "routed": torch.zeros(len(self.counts), dtype=torch.int32),
                    "received": torch.full((1,), -7),
                }
                b = buffers
                tensors = [x, None, ids, weights, b["rows"], b["gains"], b["slots"], b["physical"], padding, None,
                           self.own[rank], self.counts, self.copies, b["routed"], b["received"]]  # fmt: skip
                numbers = [len(x), *(0 if t is None else t.data_ptr() for t in tensors)]
                numbers[2], numbers[10] = int(narrow), len(self.counts)
                values += numbers
                left.append(buffers)
            made.append(left)
        reports = (Report * s.ranks)()
        at = [ctypes.addressof(reports) + r * ctypes.sizeof(Report) for r in range(s.ranks)]
        memory = [m.data_ptr() for m in self.emulated.regions]
        error = ctypes.create_string_buffer(400)
        flags = [1] * (len(turns) * s.ranks) if comes is None else comes
        self.library.run_publish(
            self.emulated.sizes, (ctypes.c_void_p * s.ranks)(*memory), (ctypes.c_void_p * s.ranks)(*at),
            ctypes.c_uint64(limit), len(turns), (ctypes.c_int64 * len(values))(*values),
            (ctypes.c_uint8 * len(flags))(*flags), ctas, ctypes.c_uint64(self.seed), error,
        )  # fmt: skip
        assert not error.value, error.value.decode()
        return made, reports

    def check(self, turn, left) -> None:
        s = self.shape
        physical = [self.choose(r, turn[r][1], turn[r][3]) for r in range(s.ranks)]
        for rank, buffers in enumerate(left):
            x, _, weights, _ = turn[rank]
            count = len(x)
            rows = buffers["rows"][: s.max_tokens * s.hidden].view(s.max_tokens, s.hidden)
            assert torch.equal(rows[:count], x.bfloat16()) and rows[count:].isnan().all()
            gains = buffers["gains"][: s.max_tokens * s.top_k].view(s.max_tokens, s.top_k)
            assert torch.equal(gains[:count], weights) and gains[count:].isnan().all()
            assert torch.equal(buffers["physical"][: count * s.top_k].view(count, s.top_k), physical[rank])
            slots = buffers["slots"][: s.ranks * s.max_tokens * s.top_k].view(s.ranks, s.max_tokens, s.top_k)
            for r in range(s.ranks):
                wanted = torch.full((s.max_tokens, s.top_k), -1, dtype=torch.int32)
                here = physical[r] // s.experts == rank
                wanted[: len(here)] = torch.where(here & (physical[r] >= 0), physical[r] - rank * s.experts, -1)
                assert torch.equal(slots[r], wanted)
            assert int(buffers["received"]) == int((slots >= 0).sum())
            kept = turn[rank][1][(physical[rank] >= 0)]
            assert torch.equal(buffers["routed"], torch.bincount(kept, minlength=len(self.counts)).int())
            for name in ("rows", "gains", "slots", "physical"):
                assert (buffers[name][-16:] == 77).all(), name


def tokens_of(shape, logical, counts, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    made = []
    for n in counts:
        ids = torch.randint(-1, logical + 1, (n, shape.top_k), generator=g, dtype=torch.int32)
        made.append(((3 * torch.randn(n, shape.hidden, generator=g)).to(dtype), ids,
                     torch.rand(n, shape.top_k, generator=g), torch.rand(n, generator=g) < 0.2))  # fmt: skip
    return made


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("ranks", "experts", "logical", "top_k", "counts"), [
    (2, 4, 6, 2, [5, 0]), (3, 3, 7, 3, [1, 9, 4]), (1, 4, 4, 2, [3]), (5, 2, 6, 1, [0, 0, 0, 0, 0]),
])  # fmt: skip
def test_against_the_rule(library, seed, ranks, experts, logical, top_k, counts):
    shape = Shape(ranks, 9, 48, top_k, experts, "bfloat16")
    group = Group(library, shape, logical, seed)
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    turn = tokens_of(shape, logical, counts, seed, dtype)
    made, reports = group.run([turn], ctas=1 + seed % 3, narrow=dtype == torch.bfloat16)
    assert not any(r.state for r in reports)
    group.check(turn, made[0])


def test_turns_after_each_other_and_a_barrier_between(library):
    shape = Shape(3, 7, 16, 2, 3, "bfloat16")
    for seed in range(6):
        group = Group(library, shape, 6, seed)
        turns = [tokens_of(shape, 6, [seed, 7, 3], 10 * seed + i) for i in range(3)]
        made, _ = group.run(turns)
        group.check(turns[-1], made[-1])
        group.emulated.barrier()
        made, reports = group.run(turns[:1])
        group.check(turns[0], made[0])
        assert not any(r.state for r in reports)


def test_a_missing_rank_is_named(library):
    shape = Shape(3, 4, 16, 2, 2, "bfloat16")
    group = Group(library, shape, 5, 1)
    turn = tokens_of(shape, 5, [2, 2, 2], 3)
    _, reports = group.run([turn], comes=[1, 1, 0], limit=2000)
    assert TIMEOUT in [r.state for r in reports[:2]]
    assert all(r.missing == 4 for r in reports[:2] if r.state == TIMEOUT)
