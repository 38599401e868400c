"""The test kit itself: it has to fail where it should."""

import math

import pytest
import torch

from kernel_core import testing as kit


def test_assert_close_names_the_worst_coordinate():
    expected = torch.ones(3, 4)
    actual = expected.clone()
    actual[1, 2] = 1.5
    actual[0, 1] = 1.01
    with pytest.raises(AssertionError, match=r"first at \[0, 1\].*worst at \[1, 2\]: got 1.5, expected 1"):
        kit.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
    assert kit.assert_close(actual, expected, atol=1, rtol=0).worst == (1, 2)


def test_assert_close_needs_nan_and_infinity_in_place():
    expected = torch.tensor([1.0, math.nan, math.inf])
    kit.assert_close(expected.clone(), expected, atol=0, rtol=0)
    for wrong in ([math.nan, math.nan, math.inf], [1.0, 0.0, math.inf], [1.0, math.nan, -math.inf]):
        with pytest.raises(AssertionError, match="misplaced: 1"):
            kit.assert_close(torch.tensor(wrong), expected, atol=1e9, rtol=1e9)


def test_a_bad_row_shows_although_the_scalar_is_small():
    expected = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    actual = expected.clone()
    actual[17] *= -1
    assert kit.calc_diff(actual, expected) < 1e-2
    with pytest.raises(AssertionError, match="row 17"):
        kit.assert_close(actual, expected, atol=99, rtol=0, max_row_diff=1e-2)


def test_calc_diff_of_equal_opposite_and_zero():
    x = torch.randn(9)
    assert kit.calc_diff(x, x) == pytest.approx(0, abs=1e-12)
    assert kit.calc_diff(x, -x) == pytest.approx(2)
    assert kit.calc_diff(x * 0, x * 0) == 0


def test_bitwise_sees_the_sign_of_zero():
    with pytest.raises(AssertionError, match=r"first at \[1\]"):
        kit.assert_bitwise(torch.tensor([0.0, -0.0]), torch.tensor([0.0, 0.0]))
    kit.assert_bitwise(torch.tensor([math.nan]), torch.tensor([math.nan]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_poison_of_floats_is_nan(dtype):
    assert kit.poisoned((3, 2), dtype).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_poison_of_integers_is_minus_one(dtype):
    assert (kit.poisoned(5, dtype) == -1).all()


def test_guarded_finds_a_write_on_either_side():
    guarded = kit.Guarded((2, 3), torch.float32)
    guarded.check()
    guarded.tensor.fill_(1)
    guarded.check()
    guarded._buffer[guarded._guard - 1] = 0
    with pytest.raises(AssertionError, match="1 bytes before"):
        guarded.check("out")
    guarded._buffer[guarded._guard - 1] = 0xA5
    guarded._buffer[guarded._guard + 24] = 0
    with pytest.raises(AssertionError, match="0 bytes behind"):
        guarded.check("out")


def test_guarded_of_nothing():
    guarded = kit.Guarded((0, 4))
    assert guarded.tensor.shape == (0, 4)
    guarded.check()


def test_page_end_copies_the_values():
    x = torch.arange(1000, dtype=torch.int64).view(10, 100)
    copy = kit.at_page_end(x)
    assert torch.equal(copy, x)
    assert (copy.data_ptr() + 8000) % 4096 == 0


def test_row_invariance_catches_dependence_on_neighbours():
    x = torch.randn(6, 5)
    kit.assert_row_invariant(lambda r: r * 2, x)
    with pytest.raises(AssertionError, match="differ in their bits"):
        kit.assert_row_invariant(lambda r: r - r.mean(), x)
    with pytest.raises(AssertionError, match="reversed"):
        kit.assert_row_invariant(lambda r: r + torch.arange(len(r))[:, None], x)


def test_repeatable_catches_state():
    state = [0]

    def counting():
        state[0] += 1
        return torch.tensor([state[0]])

    with pytest.raises(AssertionError, match="run 1"):
        kit.assert_repeatable(counting, times=3)


def test_thread_invariance_restores_the_count():
    before = torch.get_num_threads()
    with pytest.raises(AssertionError, match="with 2 threads"):
        kit.assert_thread_invariant(lambda: torch.tensor([torch.get_num_threads()]), counts=(1, 2))
    assert torch.get_num_threads() == before


def test_edge_sizes():
    assert kit.edge_sizes(0) == [0]
    assert kit.edge_sizes(1) == [0, 1]
    sizes = kit.edge_sizes(100)
    assert sizes[0] == 0 and sizes[-2:] == [99, 100] and {1, 15, 16, 17, 63, 64, 65} <= set(sizes)
    assert all(size % 32 == 0 for size in kit.edge_sizes(4096, step=32))


def test_ragged_batches_cover_the_hard_shapes():
    batches = list(kit.ragged_batches(window=32))
    assert any(0 in b.lengths for b in batches)
    assert any(max(b.lengths) > 32 for b in batches)
    for b in batches:
        positions, owner = b.positions(), b.request_of_row()
        assert len(positions) == len(owner) == b.rows
        for row in range(b.rows):
            request = int(owner[row])
            assert positions[row] == b.start_pos[request] + row - b.cu_seqlens[request]


@kit.each_isa()
def test_each_isa_gives_names(isa):
    import kernel_core

    with kernel_core.limit_isa(isa):
        assert kernel_core._native.isa() == isa
