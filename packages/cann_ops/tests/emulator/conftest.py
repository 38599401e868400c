"""Sources of the tests, compiled once a session into a folder of the session."""

from __future__ import annotations

import functools

import pytest

from cann_ops import emulate


@pytest.fixture(scope="session")
def program():
    """Compile a source, or skip where that is impossible."""
    there, why = emulate.available()
    if not there:
        pytest.skip(why)
    return functools.cache(emulate.Program)
