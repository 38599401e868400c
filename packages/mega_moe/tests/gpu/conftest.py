"""References on a GPU multiply in float32, not in TF32."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
