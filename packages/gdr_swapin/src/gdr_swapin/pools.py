"""The paged pools that blocks land in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gdr_swapin.layout import BlockLayout
from kernel_core import check


@dataclass(frozen=True)
class PagedPools:
    """For each source layer `main: uint8[num_blocks, rows, 288]` and `index: uint8[num_blocks, rows * 68]`, contiguous.

    All have the same number of blocks and lie on one device. Block 0 is reserved for padding and never loaded.
    """

    layout: BlockLayout
    main: tuple[torch.Tensor, ...]
    index: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        layers = self.layout.layers
        for name, tensors in (("main", self.main), ("index", self.index)):
            check.require(len(tensors) == len(layers), name, f"{len(tensors)} tensors", f"{len(layers)}, one a layer")
        blocks, device = self.main[0].shape[0], self.main[0].device
        check.require(blocks >= 2, "main[0]", f"{blocks} blocks", "at least 2, the first being reserved")
        for i, source in enumerate(layers):
            shapes = {"main": (blocks, source.rows, source.main_row_bytes), "index": (blocks, source.index_bytes)}
            for name, shape in shapes.items():
                value = getattr(self, name)[i]
                check.tensor(f"{name}[{i}]", value, dtype=torch.uint8, shape=shape)
                check.require(value.device == device, f"{name}[{i}]", value.device, str(device))
                check.require(value.data_ptr() % 16 == 0, f"{name}[{i}]", "an address that is no multiple of 16",
                              "16-byte aligned memory")  # fmt: skip

    @staticmethod
    def allocate(layout: BlockLayout, num_blocks: int, device: torch.device | str = "cpu") -> PagedPools:
        """New pools filled with zeros."""
        check.require(num_blocks >= 2, "num_blocks", num_blocks, "at least 2, the first being reserved")

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.uint8, device=device)

        return PagedPools(
            layout,
            tuple(zeros(num_blocks, s.rows, s.main_row_bytes) for s in layout.layers),
            tuple(zeros(num_blocks, s.index_bytes) for s in layout.layers),
        )

    @property
    def num_blocks(self) -> int:
        return int(self.main[0].shape[0])

    @property
    def device(self) -> torch.device:
        return self.main[0].device

    def gather(self, blocks: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Blocks as they are at rest: `uint8[n, block_bytes]` on the pools' device. For tests and stores."""
        ids = torch.as_tensor(blocks, dtype=torch.int64, device=self.device)
        parts = []
        for index, main in zip(self.index, self.main, strict=True):
            parts += [index[ids], main[ids].flatten(1)]
        return torch.cat(parts, dim=1)
