"""The same random numbers for a test whichever others run, and in whichever order."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
