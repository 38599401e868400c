"""Options of `fathom serve` about images."""

from __future__ import annotations

import pytest

from orchestrator.commands.errors import UsageError
from orchestrator.commands.images import image_limits_of
from orchestrator.commands.serve import ServeOptions
from orchestrator.vision import ImageLimits


def test_defaults_are_those_of_the_settings():
    assert image_limits_of(ServeOptions()) == ImageLimits()


def test_options_reach_the_settings():
    options = ServeOptions(
        max_images=3,
        max_image_mb=100,
        max_image_mpixels=0.5,
        image_urls=False,
        image_network=("10.0.0.0/8", "fd00::/8"),
    )
    found = image_limits_of(options)
    assert (found.max_images, found.max_pixels, found.fetch) == (3, 2**19, False)
    assert found.max_image_bytes == found.max_total_bytes == 100 * 2**20
    assert found.networks == ("10.0.0.0/8", "fd00::/8")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image_network": ("10.0.0.1/8",)}, r"--image-network: .*10\.0\.0\.1/8"),
        ({"max_images": 0}, "--max-images: "),
        ({"max_image_mb": 0.0}, "--max-image-mb: "),
        ({"max_image_mpixels": 200.0}, "--max-image-mpixels: "),
    ],
)
def test_wrong_options_are_named(given, message):
    with pytest.raises(UsageError, match=message):
        image_limits_of(ServeOptions(**given))
