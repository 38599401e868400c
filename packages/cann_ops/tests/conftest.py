"""Shared problems, and what tests of kernels need: TileLang to lower them, g++ to run the text."""

from __future__ import annotations

import pytest
import torch

import cann_ops
from cann_ops import emulate, lowering


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lowers():
    """Skip where programs cannot be lowered."""
    there, why = lowering.available()
    if not there:
        pytest.skip(why)


@pytest.fixture
def emulated(lowers):
    """Ops run their kernels in host emulation."""
    there, why = emulate.available()
    if not there:
        pytest.skip(why)
    with cann_ops.host_emulation():
        yield
