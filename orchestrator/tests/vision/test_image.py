"""Fitting pixels into a canvas."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import vision as oracle
from PIL import Image

from orchestrator.model.presets import v41_flash
from orchestrator.model.vision import PreparedImage, prepare

FLASH = v41_flash().vision


def test_an_image_of_the_right_size_is_left_alone(kit):
    image = kit.noise(14 * 45, 14 * 40)
    made = prepare(image, FLASH)
    assert (made.pixels == np.asarray(image)).all() and made.geometry.columns == 45


@pytest.mark.parametrize("size", [(600, 900), (300, 200), (101, 33), (1500, 1500), (37, 90)])
def test_scaling_is_cubic(kit, size):
    """Against plain loops; the library works with weights of few bits, so a byte may differ by one."""
    image = kit.noise(*size, seed=3)
    numbers = kit.seeing(max_image_tokens=200).vision
    made = prepare(image, numbers)
    width, height = made.geometry.width, made.geometry.height
    if size[0] * height > size[1] * width:
        inner = width, round(size[1] / size[0] * width)
    else:
        inner = round(size[0] / size[1] * height), height
    left, top = round((width - inner[0]) / 2), round((height - inner[1]) / 2)
    expected = oracle.resampled(np.asarray(image), *inner).astype(int)
    got = made.pixels[top : top + inner[1], left : left + inner[0]].astype(int)
    assert abs(got - expected).max() <= 1
    around = made.pixels.astype(int).copy()
    around[top : top + inner[1], left : left + inner[0]] = 127
    assert (around == 127).all()


@pytest.mark.parametrize(("gap", "left"), [(1, 0), (2, 1), (3, 2), (5, 2), (7, 4)])
def test_an_odd_gap_is_halved_to_the_even_number(gap, left):
    """White on a canvas of grey. The height already fits, so nothing is scaled."""
    canvas = 14 * 45
    made = prepare(Image.new("RGB", (canvas - gap, 14 * 40), "white"), FLASH)
    assert made.geometry.width == canvas
    columns = np.flatnonzero((made.pixels == 255).all((0, 2)))
    assert columns[0] == left and len(columns) == canvas - gap


@pytest.mark.parametrize("size", [(1, 1), (1, 8192), (8192, 1), (2, 8191), (4096, 4096)])
def test_extreme_sizes(size):
    made = prepare(Image.new("RGB", size, "white"), FLASH)
    assert made.geometry.tokens <= 1024 and (made.pixels == 255).any()


def test_low_detail_bounds_the_longer_side():
    image = Image.new("RGB", (3000, 1500))
    assert prepare(image, FLASH, longest=512).geometry == prepare(Image.new("RGB", (512, 256)), FLASH).geometry
    small = Image.new("RGB", (300, 200))
    assert prepare(small, FLASH, longest=512).geometry == prepare(small, FLASH).geometry


def test_digests_tell_pixels_and_shapes_apart(kit, picture):
    one, same, other = picture(seed=1), picture(seed=1), picture(seed=2)
    assert one.digest == same.digest != other.digest and len(one.digest) == 32
    flat = np.zeros((28, 56, 3), np.uint8)
    numbers = kit.seeing(min_pixels=1).vision
    wide, high = (prepare(Image.fromarray(a), numbers) for a in (flat, flat.reshape(56, 28, 3)))
    assert wide.pixels.tobytes() == high.pixels.tobytes() and wide.digest != high.digest
    changed = one.pixels.copy()
    changed[-1, -1, 2] ^= 1
    assert PreparedImage(changed, one.geometry).digest != one.digest


def test_what_is_no_image(picture):
    with pytest.raises(ValueError, match="image: got mode L, allowed is RGB"):
        prepare(Image.new("L", (20, 20)), FLASH)
    made = picture()
    with pytest.raises(ValueError, match=r"pixels: got float32 .*, allowed is uint8"):
        PreparedImage(made.pixels.astype(np.float32), made.geometry)
    with pytest.raises(ValueError, match="pixels: got uint8"):
        PreparedImage(made.pixels[:-1], made.geometry)
