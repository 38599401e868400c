"""The state that outlives a step: pools of global rows, window rings and compressor tails.

Global rows live in blocks of 128 tokens, shared and append-only. Rings and tails belong to one request and are
addressed by its slot. Block 0 and slot 0 are padding: nothing valid ever points at them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from orchestrator.model.config import BLOCK_TOKENS, ModelConfig

if TYPE_CHECKING:
    from orchestrator.model.batch import StepBatch


@dataclass(frozen=True)
class GlobalPool:
    """Rows of one source layer.

    `main` is uint8 [blocks, rows, main_row_bytes]; `index` is uint8 [blocks, rows * index_row_bytes], each page all
    codes first, then all scales. Without quantisation both are float32 [blocks, rows, dim].
    """

    ratio: int
    main: torch.Tensor
    index: torch.Tensor

    @property
    def rows_per_block(self) -> int:
        return BLOCK_TOKENS // self.ratio

    @property
    def bytes_per_block(self) -> int:
        return sum(t[0].numel() * t.element_size() for t in (self.main, self.index))


@dataclass(frozen=True)
class SlotState:
    """One request's rings and tails, copied (see `CachePools.save_slot` and `copy_slot`)."""

    rings: torch.Tensor
    tails: dict[int, torch.Tensor]


class CachePools:
    """All cache memory of one data-parallel rank.

    Attributes:
        pools: source layer -> its `GlobalPool`.
        rings: [layers, slots, ring_rows, window_row_bytes] uint8, row = position mod ring_rows (float32 and head_dim
            instead of bytes without quantisation). With `draft_stages`, those of the draft stages come last.
        tails: ratio-2 source layer -> float32 [slots, tail_rows, 2, head_dim], row = position mod tail_rows,
            gate then value.
        wrote: told of (source layer, batch) once the layer's global rows of a step are written, before the layers
            above it are computed; on a GPU that is when the work was started. None for nobody.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        num_slots: int,
        *,
        quantised: bool = True,
        draft_stages: int = 0,
        device: torch.device | None = None,
    ) -> None:
        if num_blocks < 2 or num_slots < 2:
            raise ValueError(
                f"num_blocks, num_slots: got {num_blocks}, {num_slots}, allowed are at least 2 (one is padding)"
            )
        self.config, self.num_blocks, self.num_slots, self.quantised = config, num_blocks, num_slots, quantised
        self.wrote: Callable[[int, StepBatch], None] | None = None
        self.pools: dict[int, GlobalPool] = {}
        self.tails: dict[int, torch.Tensor] = {}
        for layer in config.kv_source_layer_ids:
            ratio = config.ratio(layer)
            rows = BLOCK_TOKENS // ratio
            if quantised:
                main = torch.zeros(num_blocks, rows, config.main_row_bytes, dtype=torch.uint8, device=device)
                index = torch.zeros(num_blocks, rows * config.index_row_bytes, dtype=torch.uint8, device=device)
            else:
                main = torch.zeros(num_blocks, rows, config.head_dim, device=device)
                index = torch.zeros(num_blocks, rows, config.index_head_dim, device=device)
            self.pools[layer] = GlobalPool(ratio, main, index)
            if ratio > 1:
                self.tails[layer] = torch.zeros(num_slots, config.tail_rows, 2, config.head_dim, device=device)
        shape = (config.num_hidden_layers + draft_stages, num_slots, config.ring_rows)
        if quantised:
            self.rings = torch.zeros(*shape, config.window_row_bytes, dtype=torch.uint8, device=device)
        else:
            self.rings = torch.zeros(*shape, config.head_dim, device=device)

    @property
    def global_bytes_per_token(self) -> float:
        """Bytes of shared rows a token costs, read off the pools."""
        return sum(pool.bytes_per_block for pool in self.pools.values()) / BLOCK_TOKENS

    @property
    def slot_bytes(self) -> int:
        """Bytes of rings and tails a request costs."""
        ring = self.rings[:, 0].numel() * self.rings.element_size()
        return ring + sum(t[0].numel() * t.element_size() for t in self.tails.values())

    def save_slot(self, slot: int) -> SlotState:
        return SlotState(_kept(self.rings[:, slot]), {layer: _kept(t[slot]) for layer, t in self.tails.items()})

    def copy_slot(self, slot: int) -> SlotState:
        """As `save_slot`, on the device where the caches are."""
        return SlotState(self.rings[:, slot].clone(), {layer: t[slot].clone() for layer, t in self.tails.items()})

    def load_slot(self, slot: int, state: SlotState) -> None:
        self.rings[:, slot] = state.rings
        for layer, tail in state.tails.items():
            self.tails[layer][slot] = tail

    def save_blocks(self, blocks: list[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {layer: (p.main[blocks].cpu(), p.index[blocks].cpu()) for layer, p in self.pools.items()}

    def load_blocks(self, blocks: list[int], saved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for layer, (main, index) in saved.items():
            pool = self.pools[layer]
            pool.main[blocks], pool.index[blocks] = main.to(pool.main.device), index.to(pool.index.device)


def _kept(values: torch.Tensor) -> torch.Tensor:
    """A copy on the host."""
    return values.clone() if values.is_cpu else values.cpu()
