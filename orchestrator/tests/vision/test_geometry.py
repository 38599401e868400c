"""Canvases: published examples, invariants, agreement with deepseek-recipe."""

from __future__ import annotations

from dataclasses import asdict, replace

import deepseek_recipe as recipe
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import vision as oracle
from PIL import Image

from orchestrator.model.presets import v41_flash
from orchestrator.model.vision import fit, prepare

FLASH = v41_flash().vision
SIDES = st.one_of(st.integers(1, 60), st.integers(1, 9000))

# Width and height, then patches, grid rows, grid columns and tokens (model specification, Vision).
EXAMPLES = [
    (224, 224, 1521, 13, 13, 184),
    (640, 480, 1610, 12, 16, 206),
    (1344, 1344, 8649, 31, 31, 994),
    (1920, 1080, 8418, 23, 41, 968),
    (4000, 3000, 8748, 27, 36, 1001),
]


@pytest.mark.parametrize(("width", "height", "patches", "rows", "columns", "tokens"), EXAMPLES)
def test_examples(width, height, patches, rows, columns, tokens):
    found = fit(width, height, FLASH)
    assert (found.patches, found.grid_rows, found.grid_columns, found.tokens) == (patches, rows, columns, tokens)


def test_the_longest_spans():
    """An image one pixel wide becomes a column of 511 cells, one a pixel high a line of up to 1021."""
    column, line = fit(1, 8192, FLASH), fit(100_000, 1, FLASH)
    assert (column.width, column.height, column.tokens) == (42, 511 * 42, 1024)
    assert (line.width, line.height, line.tokens) == (1021 * 42, 42, 1024)


@given(SIDES, SIDES)
def test_every_size_fits(width, height):
    found = fit(width, height, FLASH)
    assert 4 <= found.tokens <= FLASH.max_image_tokens
    assert found.width == 14 * found.columns and found.height == 14 * found.rows
    assert 3 * (found.grid_columns - 1) < found.columns <= 3 * found.grid_columns
    assert 3 * (found.grid_rows - 1) < found.rows <= 3 * found.grid_rows
    assert (found.width, found.height) == oracle.canvas(width, height, asdict(FLASH))
    assert fit(found.width, found.height, FLASH) == found or found.width * found.height < FLASH.min_pixels


@given(SIDES, SIDES, st.integers(1, 3), st.integers(1, 16), st.integers(4, 80))
def test_every_size_fits_other_encoders(width, height, ratio, patch, tokens):
    numbers = replace(FLASH, downsample_ratio=ratio, patch_size=patch, max_image_tokens=tokens, min_pixels=1000)
    found = fit(width, height, numbers)
    assert found.rows >= 1 and found.columns >= 1 and 4 <= found.tokens <= tokens
    assert (found.width, found.height) == oracle.canvas(width, height, asdict(numbers))


@given(st.integers(40, 4000), st.integers(40, 4000))
def test_aspect_is_kept(width, height):
    """Up to what whole patches and the growing of small images allow."""
    found = fit(width, height, FLASH)
    scale = found.width / width
    assert abs(found.height - height * scale) <= 15 * (1 + max(width / height, height / width))


SIZES = [(640, 480), (800, 600), (1, 1), (20, 30), (3000, 1400), (1024, 1024), (1920, 1080), (333, 777), (2000, 301)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("detail", ["high", "low"])
def test_sizes_and_tokens_are_those_of_the_recipe(kit, size, detail):
    """Within its own limit of 16,380 pixels a side, which its encoding as WebP imposes."""
    image = Image.new("RGB", size)
    resolver = recipe.ImageResolver(recipe.ReqwestImageFetcher(), recipe.OpenCvImagePreprocessor())
    data = resolver.resolve([recipe.BytesImageSource(kit.encoded(image), detail)], recipe.ImageQuota())
    mine = prepare(image, FLASH, longest=512 if detail == "low" else None).geometry
    theirs = data.images[0]
    assert (mine.width, mine.height) == (theirs.width, theirs.height)
    assert mine.tokens == data.image_token_adjustment() + 1


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 5)])
def test_no_size(width, height):
    with pytest.raises(ValueError, match=r"(width|height): got (0|-1), allowed is 1 or more pixels"):
        fit(width, height, FLASH)
