"""Windows of held-out texts, and the statistics over them."""

from __future__ import annotations

import math

import pytest

from orchestrator.evaluate.statistics import ratio_of_sums
from orchestrator.evaluate.text import JOINED_BELOW, HeldOut


def test_windows_are_disjoint_spread_and_begin_as_texts_do(heldout, tokenizer):
    windows = heldout.windows(7, 200)
    assert len(windows) == 7 and {len(w.tokens) for w in windows} == {200}
    assert [w.document for w in windows[:4]] == ["text 0", "text 1", "text 2", "text 0"]
    assert all(w.tokens[0] == tokenizer.bos_id for w in windows[:3])
    assert len({w.tokens for w in windows}) == 7
    stream = dict(heldout.streams)["text 0"]
    second = windows[3].tokens
    at = next(i for i in range(0, len(stream), 200) if tuple(stream[i : i + 200]) == second)
    assert abs(at - len(stream) // 2) <= 200, "the second window of a text is from its middle"


def test_bytes_are_those_of_the_text(tokenizer):
    text = "x = 'ä€'\n" * 1200
    heldout = HeldOut(tokenizer, [("a", text)])
    stream = heldout.streams[0][1]
    window = heldout.windows(1, len(stream))[0]
    assert sum(window.bytes) == len(text.encode()) and window.bytes[0] == 0


def test_short_texts_are_joined_with_their_beginnings_and_ends(tokenizer):
    heldout = HeldOut(tokenizer, [("a", "short"), ("b", "texts")])
    (name, stream), *rest = heldout.streams
    assert not rest and name == "short texts" and len(stream) < JOINED_BELOW
    assert stream.count(tokenizer.bos_id) == stream.count(tokenizer.eos_ids[0]) == 2


def test_too_long_a_window_names_what_is_there(heldout):
    with pytest.raises(ValueError, match="length: got 100000"):
        heldout.windows(1, 100_000)
    with pytest.raises(ValueError, match="documents"):
        HeldOut(heldout.tokenizer, [])


def test_a_ratio_of_sums_and_its_error():
    estimate = ratio_of_sums([1.0, 2.0, 3.0, 2.0] * 50, [2.0] * 200)
    assert estimate.value == 1.0
    assert estimate.stderr == pytest.approx(math.sqrt(0.5) / 2 / math.sqrt(200), rel=0.15)
    assert ratio_of_sums([3.0, 30.0, 9.0], [1.0, 10.0, 3.0]).stderr == pytest.approx(0, abs=1e-12), "pairs cancel"
    with pytest.raises(ValueError, match="numerator"):
        ratio_of_sums([], [])
    with pytest.raises(ValueError, match="denominator"):
        ratio_of_sums([1.0], [0.0])
