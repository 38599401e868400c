"""Batches depend on seed and step alone, and cover the text evenly. The schedule is tested here too."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from orchestrator.train.batches import SNAP, Batches
from orchestrator.train.schedule import learning_rate, phase_at


def test_rows_are_pieces_of_the_text(dataset):
    batches = Batches(dataset, 3, "cpu")
    text = torch.from_numpy(np.load(dataset / "train.npy").astype(np.int64))
    rows, starts = batches.get(5, 7, 40), batches.starts(5, 7, 40)
    assert rows.shape == (7, 41) and rows.dtype == torch.int64 and batches.tokens == 5000
    for row, start in zip(rows, starts, strict=True):
        assert torch.equal(row, text[start : start + 41])


def test_nothing_but_seed_and_step_counts(dataset):
    one, other = Batches(dataset, 3, "cpu"), Batches(dataset, 3, "cpu")
    for step in range(5):
        one.get(step, 4, 30)
    assert torch.equal(one.get(77, 4, 30), other.get(77, 4, 30))
    assert not np.array_equal(one.starts(77, 4, 30), one.starts(78, 4, 30))
    assert not np.array_equal(one.starts(77, 4, 30), Batches(dataset, 4, "cpu").starts(77, 4, 30))


def test_coverage_is_even(tmp_path):
    """Without documents to snap to, one pass over the text meets nearly every token, and none often."""
    np.save(tmp_path / "train.npy", np.zeros(100_000, np.uint16))
    np.save(tmp_path / "train_starts.npy", np.zeros(1, np.int64))
    batches = Batches(tmp_path, 0, "cpu")
    length, batch = 100, 8
    seen = np.zeros(100_000, int)
    for step in range(100_000 // (length * batch)):
        for start in batches.starts(step, batch, length):
            seen[start : start + length] += 1
    assert (seen > 0).mean() > 0.8 and seen.max() <= 4  # drawn independently: 0.63, and 6 or so
    assert seen[:1000].sum() and seen[-1000:].sum()


def test_some_rows_begin_with_their_document(dataset):
    batches = Batches(dataset, 1, "cpu")
    documents = set(np.load(dataset / "train_starts.npy").tolist())
    starts = np.concatenate([batches.starts(step, 8, 200) for step in range(200)])
    share = np.mean([start in documents for start in starts])  # documents of 130 tokens: every row could
    assert abs(share - SNAP) < 0.05
    assert starts.min() >= 0 and starts.max() + 201 <= 5000
    short = np.concatenate([batches.starts(step, 8, 13) for step in range(200)])
    assert abs(np.mean([start in documents for start in short]) - SNAP / 10) < 0.03


def test_heldout_is_fixed(dataset):
    batches, other = Batches(dataset, 1, "cpu"), Batches(dataset, 2, "cpu")
    first, again = batches.heldout(100, 5), other.heldout(100, 5)
    assert sum(len(batch) for batch in first) == 5 and all(batch.shape[1] == 101 for batch in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_refusals(dataset, tmp_path):
    batches = Batches(dataset, 0, "cpu")
    with pytest.raises(ValueError, match=r"length: got 5000, allowed is 1 to 4999 \(train\.npy has 5000 tokens\)"):
        batches.get(0, 1, 5000)
    with pytest.raises(ValueError, match=r"length: got 900, allowed is 1 to 899"):
        batches.heldout(900, 1)
    with pytest.raises(ValueError, match=r"train\.npy is missing"):
        Batches(tmp_path, 0, "cpu")
    np.save(dataset / "train.npy", np.zeros(4, np.int32))
    with pytest.raises(ValueError, match=r"train\.npy: got int32 \[4\], allowed is uint16"):
        Batches(dataset, 0, "cpu")
    (dataset / "train.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match=r"train\.npy cannot be read"):
        Batches(dataset, 0, "cpu")


def test_learning_rate():
    rates = [learning_rate(step / 2000, 2000) for step in range(2001)]
    assert 0 < rates[0] < rates[50] < rates[99] < 1 and rates[101] == rates[1000] == 1
    assert rates[1500] == pytest.approx(1 - 0.97 / 2) and rates[2000] == pytest.approx(0.03)
    assert learning_rate(0.1, 30) == 1  # a short run warms up for a tenth


def test_phases():
    phases = [SimpleNamespace(until=0.3, length=8), SimpleNamespace(until=1.0, length=16)]
    assert [phase_at(phases, p).length for p in (0, 0.29, 0.3, 0.99, 1.0)] == [8, 8, 16, 16, 16]
    for wrong in ([], phases[:1], phases[::-1]):
        with pytest.raises(ValueError, match="phases: got ends"):
            phase_at(wrong, 0.1)
