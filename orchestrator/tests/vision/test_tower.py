"""The encoder against the float64 oracle, and against itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle.vision import VisionOracle

from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_mini
from orchestrator.model.vision import PreparedImage, VisionEncoder, fit
from orchestrator.model.vision.geometry import Geometry
from orchestrator.model.vision.rope import rotate, tables
from orchestrator.model.vision.span import span_rows
from orchestrator.model.vision.tower import patch_vectors, taps


@pytest.fixture(scope="module")
def encoder(nano):
    return VisionEncoder(nano.weights)


@pytest.fixture(scope="module")
def oracle(nano_path):
    return VisionOracle(nano_path)


def canvas_of(columns: int, rows: int, seed: int = 0, ratio: int = 3) -> PreparedImage:
    """Noise of so many patches, whatever an image would be fitted into."""
    pixels = np.random.default_rng(seed).integers(0, 256, (14 * rows, 14 * columns, 3), dtype=np.uint8)
    return PreparedImage(
        pixels, Geometry(14 * columns, 14 * rows, columns, rows, -(-columns // ratio), -(-rows // ratio))
    )


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 3), (3, 3), (4, 3), (3, 5), (7, 4), (13, 2), (12, 12)])
def test_spans_are_those_of_the_oracle(encoder, oracle, size):
    """float32 before the rows are rounded to bfloat16, so both are compared."""
    image = canvas_of(*size)
    expected = oracle.span(image.pixels)
    frame = (encoder._frame[0], encoder._frame[1], encoder._frame[2])
    exact = span_rows(encoder.tower(torch.from_numpy(image.pixels), image.geometry), image.geometry, *frame)
    assert exact.dtype == torch.float32 and exact.shape == (image.geometry.tokens, encoder.width)
    scale = abs(expected).max()
    assert abs(exact.numpy() - expected).max() <= 2e-5 * scale
    rows = encoder.encode(image)
    assert rows.dtype == torch.bfloat16 and torch.equal(rows, exact.bfloat16())


def test_production_shapes_of_a_head(tmp_path):
    """Heads of 64 channels, more than two, over several layers: as published, but for the widths."""
    config = v41_mini(vision=True)
    numbers = replace(config.vision, hidden_size=256, num_attention_heads=4, num_hidden_layers=3, intermediate_size=704)
    path = make_model(replace(config, vision=numbers), tmp_path, seed=3)
    encoder, oracle = VisionEncoder(load_model(path).weights), VisionOracle(path)
    image = canvas_of(5, 4)
    expected = oracle.features(image.pixels).reshape(-1, config.hidden_size)
    found = encoder.tower(torch.from_numpy(image.pixels), image.geometry).numpy()
    assert abs(found - expected).max() <= 2e-5 * abs(expected).max()


def test_every_pixel_and_every_place_matters(encoder):
    """Attention goes both ways, and rows are told from columns."""
    image = canvas_of(6, 4)
    rows = encoder.encode(image).float()
    changed = image.pixels.copy()
    changed[-1, -1] ^= 0x80
    other = encoder.encode(PreparedImage(changed, image.geometry)).float()
    inside = [i for i in range(1, len(rows) - 1) if i % 3]  # two tokens a line, then a newline
    assert (rows[inside] != other[inside]).any(1).all()
    framing = [i for i in range(len(rows)) if i not in inside]
    assert torch.equal(rows[framing], other[framing])
    turned = PreparedImage(
        np.ascontiguousarray(image.pixels.transpose(1, 0, 2)), Geometry(56, 84, 4, 6, 2, 2)
    )  # the same patches turned: other features
    assert not torch.equal(encoder.encode(turned)[1], encoder.encode(image)[1])


def test_the_largest_image(tmp_path):
    """8,649 patches, 994 tokens, on the encoder that v41-mini has."""
    encoder = VisionEncoder(load_model(make_model(v41_mini(vision=True), tmp_path, seed=1)).weights)
    size = fit(1344, 1344, encoder.vision)
    image = PreparedImage(np.full((size.height, size.width, 3), 200, np.uint8), size)
    rows = encoder.encode(image)
    assert rows.shape == (994, 256) and bool(rows.isfinite().all())


def test_images_do_not_depend_on_each_other(encoder):
    """Alone, again, and from several threads at once."""
    images = [canvas_of(3 + n % 4, 2 + n % 3, seed=n) for n in range(8)]
    alone = [encoder.encode(image) for image in images]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(encoder.encode, images * 2))
    assert all(torch.equal(a, b) for a, b in zip(alone * 2, together, strict=True))


def test_patches_go_by_channel_line_and_column():
    pixels = torch.arange(2 * 3 * 4 * 6, dtype=torch.uint8).view(4, 12, 3) % 251
    vectors = patch_vectors(pixels, 2)
    assert vectors.shape == (12, 12)
    for token in range(12):
        y, x = 2 * (token // 6), 2 * (token % 6)
        expected = [pixels[y + dy, x + dx, c] for c in range(3) for dy in range(2) for dx in range(2)]
        assert torch.equal(vectors[token], ((torch.stack(expected).float() / 255 - 0.5) / 0.5).bfloat16().float())
    ends = patch_vectors(torch.tensor([[[0, 127, 255]]], dtype=torch.uint8), 1)
    assert ends[0, 0] == -1 and ends[0, 2] == 1 and -0.004 < ends[0, 1] < 0


@pytest.mark.parametrize(("columns", "rows"), [(3, 3), (4, 5), (1, 1), (7, 2)])
def test_taps_are_an_unfold(columns, rows):
    geometry = canvas_of(columns, rows).geometry
    x = torch.arange(columns * rows * 5, dtype=torch.float32).view(-1, 5)
    below, beside = -rows % 3, -columns % 3
    field = torch.nn.functional.pad(x.view(rows, columns, 5).permute(2, 0, 1), (0, beside, 0, below))
    assert torch.equal(taps(x, geometry, 3), torch.nn.functional.unfold(field[None], 3, stride=3)[0].t())


def test_angles():
    cos, sin = tables(2, 3, 8, 10000.0)
    x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    out = rotate(x, cos, sin)
    assert torch.equal(out[0, 0], x[0, 0]), "the corner does not turn"
    assert torch.allclose(out.norm(dim=-1), x.norm(dim=-1))
    row, column = 3, 1  # token (1, 0): only the pairs of the row turn; token (0, 1): only those of the column
    assert torch.equal(out[0, row, [2, 3, 6, 7]], x[0, row, [2, 3, 6, 7]])
    assert torch.equal(out[0, column, [0, 1, 4, 5]], x[0, column, [0, 1, 4, 5]])
    assert not torch.equal(out[0, row, [0, 4]], x[0, row, [0, 4]])


def test_span_layout():
    geometry = Geometry(84, 84, 6, 6, 2, 2)
    features = torch.arange(4.0).view(4, 1).expand(4, 3) + 10
    rows = span_rows(features, geometry, torch.full((3,), 1.0), torch.full((3,), 2.0), torch.full((3,), 3.0))
    assert rows[:, 0].tolist() == [1, 10, 11, 2, 12, 13, 2, 3]
    with pytest.raises(ValueError, match=r"features: got \(3, 3\), allowed is \(4, 3\)"):
        span_rows(features[:3], geometry, *[torch.zeros(3)] * 3)


def test_what_cannot_be_encoded(encoder, nano, kit):
    with pytest.raises(ValueError, match="image: got patches of 7 pixels, allowed is those of 14 pixels"):
        encoder.encode(PreparedImage(np.zeros((7, 7, 3), np.uint8), Geometry(7, 7, 1, 1, 1, 1)))
    text = replace(nano.weights, vision=None)
    with pytest.raises(ValueError, match="weights: got a model without vision_config"):
        VisionEncoder(text)
    for bad, message in (
        ({"hidden_size": 60}, r"vision\.hidden_size: got 60, allowed is a multiple of 4 \* num_attention_heads 8"),
        ({"patch_size": 0}, r"vision\.patch_size: got 0"),
        ({"max_image_tokens": 3}, r"vision\.max_image_tokens: got 3, allowed is 4 or more"),
        ({"max_wh_ratio": 4.0}, r"vision\.max_wh_ratio: got 4.0, allowed is None"),
    ):
        with pytest.raises(ValueError, match=message):
            kit.seeing(**bad)
