"""Hash constants and table rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_core
import mhc_engram
from kernel_core.testing import assert_bitwise, ragged_batches
from mhc_engram import reference

ORDERS, HEADS, PAD = 3, 8, 17
PRIMES = mhc_engram.engram_primes(2, ORDERS, HEADS, 16_000_000)
CONSTANTS = (mhc_engram.engram_multipliers(1, 99_092), PRIMES[0], mhc_engram.engram_offsets(PRIMES[0]))


def by_hand(ids: list[int], dead: list[bool]) -> list[list[int]]:
    """A whole sequence, token by token, in Python integers."""
    multipliers, primes, offsets = (c.tolist() for c in CONSTANTS)
    rows = []
    for p in range(len(ids)):
        if dead[p]:
            rows.append([-1] * ORDERS * HEADS)
            continue
        rolling, blocked, row = ids[p] * multipliers[0], False, []
        for s in range(1, ORDERS + 1):
            blocked = blocked or p < s or dead[p - s]
            rolling ^= (PAD if blocked else ids[p - s]) * multipliers[s]
            for h in range(HEADS):
                c = (s - 1) * HEADS + h
                row.append(rolling % primes[c] + offsets[c])
        rows.append(row)
    return rows


def in_chunks(ids: list[int], dead: list[bool], cuts: list[int]) -> torch.Tensor:
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        history = [-1 if p < 0 or dead[p] else ids[p] for p in range(start - 1, start - 1 - ORDERS, -1)]
        cu = torch.tensor([0, end - start], dtype=torch.int32)
        mapped, flags = torch.tensor(ids[start:end], dtype=torch.int64), torch.tensor(dead[start:end], dtype=torch.bool)
        parts.append(mhc_engram.engram_rows(mapped, flags, torch.tensor([history]), cu, *CONSTANTS, PAD))
    return torch.cat(parts)


def test_constants_of_the_released_model():
    assert mhc_engram.engram_multipliers(1, 99_092).tolist() == [
        76632096046245, 4839876093313, 35959672319349, 73987337458391,
    ]  # fmt: skip
    assert mhc_engram.engram_multipliers(14, 99_092).tolist() == [
        67716810739261, 51510806800915, 30921347202721, 82619226485591,
    ]  # fmt: skip
    beyond = (PRIMES - 16_000_000).tolist()
    assert beyond[0] == [
        57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321, 339, 381, 393, 399, 403, 409, 447,
        463,
    ]  # fmt: skip
    assert beyond[1] == [
        477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769, 781, 799, 813, 819, 841, 877,
        879, 889,
    ]  # fmt: skip
    assert mhc_engram.engram_table_rows(PRIMES) == [384_006_168, 384_016_682]


def test_offsets_are_exclusive_sums():
    offsets = mhc_engram.engram_offsets(PRIMES)
    assert offsets[:, 0].tolist() == [0, 0]
    assert_bitwise(offsets[:, 1:], PRIMES.cumsum(-1)[:, :-1])


def test_small_bases_start_at_a_prime_base():
    assert mhc_engram.engram_primes(1, 2, 2, 521).tolist() == [[521, 523, 541, 547]]
    assert mhc_engram.engram_primes(1, 1, 4, 2).tolist() == [[2, 3, 5, 7]]


def test_a_sequence_with_an_image():
    ids = [5, 99_091, 3, 3, 8, 8, 8, 1, 2, 0, 7, 9]
    dead = [i in (4, 5) for i in range(len(ids))]
    assert in_chunks(ids, dead, []).tolist() == by_hand(ids, dead)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_chunks_change_nothing(data):
    n = data.draw(st.integers(1, 24))
    ids = data.draw(st.lists(st.integers(0, 99_091), min_size=n, max_size=n))
    dead = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=6))) if n > 1 else []
    assert in_chunks(ids, dead, cuts).tolist() == by_hand(ids, dead)


def test_ragged_batches_match_the_reference():
    for seed, batch in enumerate(ragged_batches(max_rows=200)):
        g = torch.Generator().manual_seed(seed)
        T, B = batch.rows, batch.requests
        mapped = torch.randint(0, 99_092, (T,), generator=g)
        dead = torch.rand(T, generator=g) < 0.2
        mapped[dead] = -1  # ignored there
        history = torch.randint(0, 99_092, (B, ORDERS), generator=g)
        history[torch.rand(B, ORDERS, generator=g) < 0.3] = -1
        arguments = (mapped, dead, history, batch.cu_seqlens, *CONSTANTS, PAD)
        actual = mhc_engram.engram_rows(*arguments)
        assert_bitwise(actual, reference.engram_rows(*arguments))
        assert_bitwise(actual, torch.ops.mhc_engram.engram_rows(*arguments))
        with kernel_core.using("reference"):
            assert_bitwise(actual, mhc_engram.engram_rows(*arguments))
        assert bool(((actual >= -1) & (actual < PRIMES[0].sum())).all())


def test_products_wrap_alike():
    """Ids beyond the bound of the multipliers are defined too: 64-bit wrapping, remainders not negative."""
    mapped = torch.tensor([2**40, 2**62, 123, 2**33])
    arguments = (
        mapped,
        torch.zeros(4, dtype=torch.bool),
        torch.full((1, 3), -1),
        torch.tensor([0, 4], dtype=torch.int32),
    )
    actual = mhc_engram.engram_rows(*arguments, *CONSTANTS, PAD)
    assert_bitwise(actual, reference.engram_rows(*arguments, *CONSTANTS, PAD))
    assert bool((actual >= 0).all())


def arguments_for_two() -> dict:
    multipliers, primes, offsets = CONSTANTS
    return {
        "mapped": torch.tensor([1, 2]), "dead": torch.zeros(2, dtype=torch.bool), "history": torch.full((1, 3), -1),
        "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32), "multipliers": multipliers, "primes": primes,
        "offsets": offsets, "pad_mapped": PAD,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mapped", torch.tensor([1, 2], dtype=torch.int32)),
        ("dead", torch.zeros(3, dtype=torch.bool)),
        ("history", torch.full((1, 2), -1)),
        ("history", torch.full((2, 3), -1)),
        ("cu_seqlens", torch.tensor([0, 3], dtype=torch.int32)),
        ("cu_seqlens", torch.tensor([1, 2], dtype=torch.int32)),
        ("cu_seqlens", torch.tensor([], dtype=torch.int32)),
        ("primes", torch.tensor([3, 5])),
        ("primes", torch.zeros(24, dtype=torch.int64)),
        ("offsets", torch.zeros(23, dtype=torch.int64)),
        ("multipliers", torch.tensor([3])),
    ],
)
def test_bad_input(name, value):
    with pytest.raises(ValueError, match=name):
        mhc_engram.engram_rows(**{**arguments_for_two(), name: value})


def test_bad_requests_for_constants():
    for call in (
        lambda: mhc_engram.engram_primes(1, 0, 8, 100),
        lambda: mhc_engram.engram_primes(1, 3, 8, 1),
        lambda: mhc_engram.engram_multipliers(-1, 5),
        lambda: mhc_engram.engram_multipliers(1, 0),
    ):
        with pytest.raises(ValueError, match="allowed"):
            call()
