"""The toy model: every kind of state counts, and the plain reference agrees with cutting the work up in any way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.simulate.toy import model
from orchestrator.simulate.toy.reference import Reference

PROMPT = tuple(range(100, 300))  # even and longer than the window


def state(tokens, *, seed=3, salt=5, grammar="json", outputs=0):
    rows = model.rows(tokens, 0, salt)
    return rows, model.absorb(model.begin(seed, grammar), rows, tokens, outputs)


@pytest.mark.parametrize("kind", model.KINDS[1:])
@pytest.mark.parametrize("tokens", [PROMPT, PROMPT[:-1]])
def test_a_missing_kind_changes_the_next_token(kind, tokens):
    rows, small = state(tokens, outputs=3)
    changed = model.without(small, kind)
    if kind == "tail" and len(tokens) % 2 == 0:
        assert changed == small  # all pairs are complete
    else:
        assert model.next_token(rows, changed) != model.next_token(rows, small)


@pytest.mark.parametrize("position", [0, 1, 71, 72, 199])
def test_a_lost_or_foreign_row_anywhere_changes_the_next_token(position):
    rows, small = state(PROMPT)
    right = model.next_token(rows, small)
    other = model.rows(PROMPT, 0, 6)  # the same text of another tenant
    at = slice(position * model.ROW, (position + 1) * model.ROW)
    for bad in (b"\0" * model.ROW, other[at], rows[-model.ROW :] if position != 199 else rows[: model.ROW]):
        assert model.next_token(rows[: at.start] + bad + rows[at.stop :], small) != right
    assert model.next_token(rows[model.ROW :], small) != right
    assert model.next_token(rows + rows[-model.ROW :], small) != right


def test_seed_and_grammar_are_part_of_the_text():
    tokens = {model.next_token(*state(PROMPT, seed=s, grammar=g)) for s in range(4) for g in ("", "json", "regex")}
    assert len(tokens) == 12


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=0, max_size=6), st.integers(1, 260), st.sampled_from(["", "json"]))
def test_work_in_pieces_gives_the_reference(cuts, length, grammar):
    prompt = tuple((7 * n) % 1000 + 2 for n in range(length))
    reference = Reference(prompt, seed=9, salt=1, grammar=grammar, most=8)
    small, rows, start = model.begin(9, grammar), b"", 0
    for size in [*cuts, length]:
        piece = prompt[start : start + size]
        new = model.rows(piece, start, 1, small.tail)
        rows, small, start = rows + new, model.absorb(small, new, piece, 0), start + len(piece)
    outputs = []
    for index in range(8):
        outputs.append(model.next_token(rows, small))
        assert outputs[-1] == reference.token(index)
        new = model.rows(outputs[-1:], small.length, 1, small.tail)
        rows, small = rows + new, model.absorb(small, new, outputs[-1:], 1)
    assert model.obeys(grammar, outputs)


def test_a_grammar_that_begins_anew_is_noticed():
    reference = Reference(PROMPT, seed=1, salt=0, grammar="json", most=30)
    outputs = [reference.token(n) for n in range(30)]
    assert model.obeys("json", outputs)
    assert sum(model.obeys("json", outputs[cut:]) for cut in range(1, 17)) < 12  # one in eight by chance
    assert model.obeys("", outputs[5:])
    assert all(1 < token < model.VOCAB for token in outputs)


def test_the_answer_ends():
    reference = Reference(PROMPT, seed=1, salt=0, grammar="", most=10, stop_after=3)
    assert reference.length == 4
    assert [reference.token(n) for n in range(4)][3] == model.END
    for index in (-1, 4):
        with pytest.raises(IndexError):
            reference.token(index)
    assert Reference(PROMPT, seed=1, salt=0, grammar="", most=3, stop_after=3).length == 3
    with pytest.raises(ValueError, match="prompt"):
        Reference((), seed=1, salt=0, grammar="", most=1)


def test_unlike_rows_and_tokens_are_refused():
    with pytest.raises(ValueError, match="new_rows"):
        model.absorb(model.begin(0, ""), b"\0" * 4, (1, 2), 0)
    with pytest.raises(ValueError, match="kind"):
        model.without(model.begin(0, ""), "global")


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 257])
@pytest.mark.parametrize("start", [0, 2, 1, 129])
def test_rows_of_long_pieces_are_those_of_single_tokens(length, start):
    tokens = tuple(49_999 - 7 * n for n in range(length + start))
    whole = b""
    for position, token in enumerate(tokens):
        whole += model.rows((token,), position, 2**32 - 1, whole[-model.ROW :] if position % 2 else b"")
    at = start * model.ROW
    assert model.rows(tokens[start:], start, 2**32 - 1, whole[at - model.ROW : at] if start % 2 else b"") == whole[at:]
