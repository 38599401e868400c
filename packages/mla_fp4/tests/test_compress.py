"""Ratio-2 pooling: every parity and chunking gives the same rows, and rejected drafts leave no trace."""

import pytest
import torch

import mla_fp4
from kernel_core import limit_isa, using
from kernel_core.testing import (
    assert_bitwise,
    assert_close,
    assert_thread_invariant,
    each_isa,
    edge_sizes,
    poisoned,
    ragged_batches,
)

RING = 7  # draft length 5, one more verified token, and one row to go back to


class Stream:
    """One request: all its tokens, and a tail of its own in slot 2."""

    def __init__(self, tokens, d=64, ring=RING):
        self.kv, self.gate = torch.randn(tokens, d), torch.randn(tokens, d) * 3
        self.tail = poisoned((4, ring, 2, d))
        self.ring = ring

    def feed(self, start, end, kv=None, gate=None):
        kv = self.kv[start:end] if kv is None else kv
        gate = self.gate[start:end] if gate is None else gate
        return mla_fp4.compress(
            kv.contiguous(),
            gate.contiguous(),
            self.tail,
            torch.tensor([2], dtype=torch.int32),
            torch.tensor([0, end - start], dtype=torch.int32),
            torch.tensor([start]),
        )


def pooled(kv, gate):
    pairs = len(kv) // 2
    weights = torch.softmax(gate[: 2 * pairs].view(pairs, 2, -1).double(), 1)
    return (weights * kv[: 2 * pairs].view(pairs, 2, -1)).sum(1).float()


@each_isa()
@pytest.mark.parametrize("d", [64, 512, 33])
def test_matches_the_formula(isa, d):
    stream = Stream(20, d)
    with limit_isa(isa):
        assert_close(stream.feed(0, 20), pooled(stream.kv, stream.gate), atol=1e-6, rtol=1e-6)


@each_isa()
@pytest.mark.parametrize("batch", list(ragged_batches(window=32, max_rows=60)), ids=lambda b: str(b.lengths))
def test_matches_reference_on_ragged_batches(isa, batch):
    d = 64
    kv, gate = torch.randn(batch.rows, d), torch.randn(batch.rows, d)
    tail = torch.randn(batch.requests + 2, RING, 2, d)
    slots = (torch.randperm(batch.requests) + 1).int()
    expected_tail, tail_before = tail.clone(), tail.clone()
    with using("reference"):
        expected = mla_fp4.compress(kv, gate, expected_tail, slots, batch.cu_seqlens, batch.start_pos)
    with limit_isa(isa):
        result = mla_fp4.compress(kv, gate, tail, slots, batch.cu_seqlens, batch.start_pos)
    assert_close(result, expected, atol=1e-6, rtol=1e-6)
    assert_bitwise(tail, expected_tail)
    assert_bitwise(tail[0], tail_before[0])
    assert len(result) == int((batch.positions() % 2).sum())


@each_isa()
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 6, 7, 8, 13])
def test_chunks_equal_the_whole_bit_for_bit(isa, chunk):
    stream = Stream(41)
    with limit_isa(isa):
        whole = stream.feed(0, 41)
        stream.tail = poisoned(stream.tail.shape)  # a new slot owner has no history
        parts = [stream.feed(at, min(at + chunk, 41)) for at in range(0, 41, chunk)]
    assert_bitwise(torch.cat(parts), whole)


@each_isa()
@pytest.mark.parametrize("depth", range(1, 7))
@pytest.mark.parametrize("start", [8, 9])
def test_rejected_drafts_leave_no_trace(isa, depth, start):
    """Every step verifies `depth` tokens, keeps `accepted`, and computes the rest again with other values."""
    stream = Stream(64)
    with limit_isa(isa):
        expected = stream.feed(0, 64)
        stream.tail = poisoned(stream.tail.shape)
        rows = {at // 2: row for at, row in zip(range(1, start, 2), stream.feed(0, start), strict=True)}
        position, step = start, 0
        while position < 50:
            accepted = 1 + step % depth
            kv, gate = torch.randn(depth, 64), torch.randn(depth, 64)
            kv[:accepted] = stream.kv[position : position + accepted]
            gate[:accepted] = stream.gate[position : position + accepted]
            out = stream.feed(position, position + depth, kv, gate)
            odd = [p for p in range(position, position + depth) if p % 2]
            rows |= {p // 2: row for p, row in zip(odd, out, strict=True) if p < position + accepted}
            position += accepted
            step += 1
    for group in range(position // 2):
        assert_bitwise(rows[group], expected[group], name=f"group {group}")


@each_isa()
def test_a_request_alone_equals_it_in_a_batch(isa):
    lengths, starts = [5, 0, 9, 2, 1], [3, 4, 0, 7, 1]
    kv, gate, tail = torch.randn(17, 64), torch.randn(17, 64), torch.randn(6, RING, 2, 64)
    slots = torch.tensor([5, 1, 2, 4, 3], dtype=torch.int32)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    with limit_isa(isa):
        whole = mla_fp4.compress(kv, gate, tail.clone(), slots, cu, torch.tensor(starts))
        at = 0
        for b in range(5):
            part = slice(int(cu[b]), int(cu[b + 1]))
            alone = mla_fp4.compress(
                kv[part].contiguous(),
                gate[part].contiguous(),
                tail.clone(),
                slots[b : b + 1],
                torch.tensor([0, lengths[b]], dtype=torch.int32),
                torch.tensor([starts[b]]),
            )
            assert_bitwise(alone, whole[at : at + len(alone)])
            at += len(alone)
        assert at == len(whole)
        assert_thread_invariant(lambda: mla_fp4.compress(kv, gate, tail.clone(), slots, cu, torch.tensor(starts)))


@each_isa()
def test_extreme_gates_choose_one_token(isa):
    stream = Stream(4)
    stream.gate[0], stream.gate[1] = 1e4, -1e4
    stream.gate[2], stream.gate[3] = -3e38, 3e38
    with limit_isa(isa):
        out = stream.feed(0, 4)
    assert_bitwise(out[0], stream.kv[0])
    assert_bitwise(out[1], stream.kv[3])


@pytest.mark.parametrize("tokens", edge_sizes(20))
def test_counts(tokens):
    for start in (0, 1, 2**40, 2**40 + 1):
        stream = Stream(tokens)
        assert len(stream.feed(start, start + tokens, stream.kv, stream.gate)) == (start + tokens) // 2 - start // 2


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"gate": torch.zeros(3, 64)}, "gate"),
        ({"kv": torch.zeros(4, 64, dtype=torch.float16)}, "kv"),
        ({"tail": torch.zeros(3, 7, 64)}, "tail"),
        ({"tail": torch.zeros(3, 0, 2, 64)}, "tail"),
        ({"tail_slot": torch.tensor([3], dtype=torch.int32)}, r"tail_slot\[0\]"),
        ({"tail_slot": torch.tensor([-1], dtype=torch.int32)}, r"tail_slot\[0\]"),
        ({"tail_slot": torch.tensor([1])}, "tail_slot"),
        ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, r"cu_seqlens\[1\]"),
        ({"cu_seqlens": torch.tensor([1, 4], dtype=torch.int32)}, r"cu_seqlens\[0\]"),
        ({"start_pos": torch.tensor([-1])}, r"start_pos\[0\]"),
        ({"start_pos": torch.tensor([1], dtype=torch.int32)}, "start_pos"),
    ],
)
def test_bad_input_writes_nothing(change, argument):
    good = {
        "kv": torch.zeros(4, 64),
        "gate": torch.zeros(4, 64),
        "tail": torch.ones(3, 7, 2, 64),
        "tail_slot": torch.tensor([1], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
        "start_pos": torch.tensor([1]),
    } | change
    before = good["tail"].clone()
    with pytest.raises(ValueError, match=f"^{argument}: got .*, allowed is "):
        mla_fp4.compress(**good)
    assert_bitwise(good["tail"], before)
