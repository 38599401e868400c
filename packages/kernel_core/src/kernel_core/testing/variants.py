"""Running one test at every instruction set of this CPU."""

from __future__ import annotations

from typing import Any

from kernel_core.backend import available_isas


def each_isa() -> Any:
    """A pytest mark that gives a test the argument `isa`; the test enters `kernel_core.limit_isa(isa)` itself."""
    import pytest

    return pytest.mark.parametrize("isa", available_isas())
