"""The oracle's cache formats against the published bit tables."""

import numpy as np
import pytest

from oracle.formats import E2M1, E4M3, INDEX, MAIN, WINDOW, decode_signed, nearest, ue8m0

FORMATS = [MAIN, WINDOW, INDEX]


def test_e2m1_table_and_ties_go_to_the_even_code():
    values = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 100])
    assert E2M1[nearest(E2M1, values)].tolist() == [0, 0, 1, 1, 2, 2, 4, 4, 6]
    assert decode_signed(E2M1, np.arange(16)).tolist() == [
        0,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        6,
        0,
        -0.5,
        -1,
        -1.5,
        -2,
        -3,
        -4,
        -6,
    ]


def test_e4m3_table():
    assert len(E4M3) == 127 and E4M3[-1] == 448 and E4M3[1] == 2.0**-9 and E4M3[8] == 2.0**-6 and E4M3[0x38] == 1
    assert np.all(np.diff(E4M3) > 0)
    decoded = decode_signed(E4M3, np.arange(256))
    assert np.isnan(decoded[[127, 255]]).all() and np.isfinite(np.delete(decoded, [127, 255])).all()
    middle = (E4M3[1:] + E4M3[:-1]) / 2
    assert np.all(nearest(E4M3, middle) % 2 == 0)
    assert nearest(E4M3, np.array([1e9]))[0] == 126


def test_published_checkpoint_bytes_decode():
    row = np.array([0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5])
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert (decode_signed(E4M3, row) * ue8m0(np.array(0x73))).tolist() == expected


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_zero_groups_have_the_agreed_scale_byte(form):
    rows = form.encode(np.zeros((2, 64)))
    codes, scale = form.split(rows)
    assert np.all(codes == 0) and np.all(scale == {"main": 1, "window": 105, "index": 1}[form.name])
    assert np.all(form.decode(rows) == 0)


def test_row_sizes_of_production():
    assert (MAIN.row_bytes(512), WINDOW.row_bytes(512), INDEX.row_bytes(128)) == (288, 528, 68)
    assert (MAIN.row_bytes(64), WINDOW.row_bytes(64), INDEX.row_bytes(32)) == (36, 66, 17)
    assert (MAIN.dim(288), WINDOW.dim(528), INDEX.dim(68)) == (512, 512, 128)


def test_even_elements_are_low_nibbles():
    values = np.zeros(32)
    values[0], values[1] = 6, 1
    row = INDEX.encode(values)
    assert row[0] == 7 + 16 * 2 and row[16] == 127


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_round_trip_is_idempotent_and_close(form):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(50, 128)) * np.exp(rng.normal(size=(50, 1)))
    once = form.decode(form.encode(values))
    peak = np.abs(values).reshape(50, -1, form.group).max(-1).repeat(form.group, -1)
    step = {"main": 1 / 6, "window": 1 / 14, "index": 1 / 3}[form.name]
    assert np.all(np.abs(once - values) <= peak * step * 1.07)
    if form is not MAIN:  # a main scale follows the group's own maximum, so a second round may move it
        assert np.array_equal(form.decode(form.encode(once)), once)


def test_power_of_two_scales_are_the_smallest_that_do_not_saturate():
    for form, top in ((WINDOW, 448.0), (INDEX, 6.0)):
        exact = np.full((1, 32), top * 2.0**3)
        above = np.nextafter(exact.astype(np.float32), np.float32(np.inf)).astype(np.float64)
        assert form.split(form.encode(exact))[1][0, 0] == 130
        assert form.split(form.encode(above))[1][0, 0] == 131


def test_main_scale_saturates_and_floors():
    assert MAIN.split(MAIN.encode(np.full((1, 16), 1e6)))[1][0, 0] == 126
    assert np.abs(MAIN.decode(MAIN.encode(np.full((1, 16), 1e6)))).max() == 2688
    assert MAIN.split(MAIN.encode(np.full((1, 16), 1e-9)))[1][0, 0] == 1


def test_reciprocal_rule_differs_from_division_at_the_known_ties_only():
    """All bf16-exact (value, scale) ties of a scale: only mantissa 1.875 and units 1.25, 2.5, 5 move, upwards."""
    moved = set()
    for byte in range(1, 127):
        scale = E4M3[byte]
        for unit in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
            x = np.array([unit * scale])
            got = E2M1[MAIN.codes(x[None], np.array([byte]))[0, 0] % 8]
            if got != E2M1[nearest(E2M1, np.array([unit]))[0]]:
                moved.add((float(np.frexp(scale)[0] * 2), unit, float(got)))
    assert moved == {(1.875, 1.25, 1.5), (1.875, 2.5, 3.0), (1.875, 5.0, 6.0)}
