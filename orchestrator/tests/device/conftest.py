"""Small models and what their steps are made of."""

from __future__ import annotations

import random
import traceback
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_nano

BLOCK = 128


@pytest.fixture(scope="session")
def nano(tmp_path_factory):
    return load_model(make_model(v41_nano(), tmp_path_factory.mktemp("nano"), seed=20))


@pytest.fixture(scope="session")
def mini():
    """The trained model of the checkout."""
    folder = Path(__file__).parents[3] / "models" / "v41-mini"
    if not folder.is_dir():
        pytest.skip("models/v41-mini is not there")
    return load_model(folder)


class Requests:
    """Requests of random tokens, each with its slot and blocks in pools of its own."""

    def __init__(self, model, lengths: list[int], *, quantised: bool = True, room: int = 300) -> None:
        self.model = model
        each = -(-room // BLOCK)
        self.cache = CachePools(
            model.config, 1 + each * len(lengths), 1 + len(lengths), quantised=quantised, device=model.device
        )
        rng = random.Random(5)
        self.tokens = [[rng.randrange(model.config.vocab_size) for _ in range(room)] for _ in lengths]
        self.blocks = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(len(lengths))]
        self.lengths = list(lengths)

    def chunk(self, request: int, start: int, end: int) -> Chunk:
        tokens = self.tokens[request]
        return Chunk(
            tokens=tokens[start:end],
            start=start,
            slot=1 + request,
            blocks=self.blocks[request][: -(-end // BLOCK)],
            history=tokens[max(0, start - 3) : start],
        )

    @torch.inference_mode()
    def prefill(self) -> torch.Tensor:
        chunks = [self.chunk(i, 0, n) for i, n in enumerate(self.lengths)]
        return self.model.forward(StepBatch.build(chunks, self.model.ratios), self.cache)

    def next_chunks(self) -> list[Chunk]:
        """One more token of every request."""
        chunks = [self.chunk(i, n, n + 1) for i, n in enumerate(self.lengths)]
        self.lengths = [n + 1 for n in self.lengths]
        return chunks


@pytest.fixture
def requests():
    return Requests


READS = {
    "_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "item", "unique", "_unique2", "unique_dim",
    "is_nonzero", "equal", "bincount", "repeat_interleave", "lift_fresh", "lift", "_to_cpu",
}  # fmt: skip
"""Operators that read a value back from the device, make a shape of one, or copy from the host."""


class Reads(TorchDispatchMode):
    """Notes operators that would make a GPU's host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        self.count += 1
        if name in READS and func is not torch.ops.aten.repeat_interleave.self_int:  # its shape is known
            frames = [f for f in traceback.extract_stack()[:-1] if "torch" not in f.filename]
            where = frames[-1]
            self.found.add(f"{func} at {where.filename}:{where.lineno}")
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                self.found.add(f"{func} with a mask")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def watch():
    return Reads
