"""Weights with known properties, shared by the tests of this package."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mega_moe import SharedExpert


@dataclass
class Weights:
    """Random packed weights from one seed."""

    generator: torch.Generator

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def mxfp4(self, *shape: int, low: int = 113, high: int = 118) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of every kind; scales around the 2^-12 of real checkpoints."""
        *lead, columns = shape
        return self.bytes(*lead, columns // 2), self.bytes(*lead, columns // 32, low=low, high=high)

    def fp8(self, rows: int, columns: int, *, low: int = 113, high: int = 121) -> tuple[torch.Tensor, torch.Tensor]:
        """Every E4M3 code but NaN, subnormal ones included."""
        codes = self.bytes(rows, columns)
        codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
        scale = self.bytes((rows + 31) // 32, (columns + 31) // 32, low=low, high=high)
        return codes.view(torch.float8_e4m3fn), scale

    def dense(self, kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A weight for `linear` of kind fp8, bf16 or f32."""
        if kind == "fp8":
            return self.fp8(rows, columns)
        value = self.normal(rows, columns)
        return (value.bfloat16() if kind == "bf16" else value), None

    def shared(self, d: int, inter: int) -> SharedExpert:
        return SharedExpert(*self.fp8(2 * inter, d, low=113, high=117), *self.fp8(d, inter, low=113, high=117))

    def routing(self, tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct experts for each token, and weights."""
        ids = [torch.randperm(experts, generator=self.generator)[:top_k] for _ in range(tokens)]
        stacked = torch.stack(ids) if ids else torch.empty(0, top_k)
        return stacked.to(torch.int32), torch.rand(tokens, top_k, generator=self.generator)


@pytest.fixture
def weights() -> Weights:
    return Weights(torch.Generator().manual_seed(1234))


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers for a test whichever others run, and in whichever order."""
    torch.manual_seed(0)
