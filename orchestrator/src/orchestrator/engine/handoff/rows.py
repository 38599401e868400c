"""Rows of one request as bytes, and back: layer blocks, window rings, compressor tails.

Only rows that the request may still read leave the engine; all others of a ring or a page are zero, whatever a slot's
or a block's earlier owner left there.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

import torch

from orchestrator.engine.sequence import Sequence
from orchestrator.model.cache import CachePools, GlobalPool


def layer_block_bytes(cache: CachePools, layer: int) -> int:
    """Bytes of one source layer's rows of one block: its index page, then its main rows."""
    return cache.pools[layer].bytes_per_block


def read_blocks(cache: CachePools, sequence: Sequence, layer: int, first: int, count: int, tokens: int) -> bytes:
    """Layer blocks `first` to `first + count` - 1 of a running or parked request, one behind the other.

    Its first `tokens` have their rows; those of others are zero.
    """
    pool = cache.pools[layer]
    if sequence.parked is None:
        blocks = sequence.blocks[first : first + count]
        main, index = pool.main[blocks].cpu(), pool.index[blocks].cpu()  # indexing copies
    else:
        main, index = (saved[first : first + count].clone() for saved in sequence.parked[0][layer])
    for number in range(count):
        valid = tokens // pool.ratio - (first + number) * pool.rows_per_block
        if valid < pool.rows_per_block:
            _blank(cache, pool, main[number], index[number], max(0, valid))
    pages = [index.view(torch.uint8).view(count, -1), main.view(torch.uint8).view(count, -1)]
    return bytes(torch.cat(pages, dim=1).numpy())


def write_blocks(cache: CachePools, layer: int, blocks: Items[int], data: bytes) -> None:
    """The inverse of `read_blocks`, into these blocks of the pool."""
    pool, ids, count = cache.pools[layer], list(blocks), len(blocks)
    pages = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, -1)
    index_bytes = pool.index[0].numel() * pool.index.element_size()
    for to, page in ((pool.index, pages[:, :index_bytes]), (pool.main, pages[:, index_bytes:])):
        to[ids] = page.contiguous().view(to.dtype).view(count, *to.shape[1:]).to(to.device)


def read_rings(cache: CachePools, sequence: Sequence) -> Iterator[bytes]:
    """The window ring of each layer: rows of the last window, those of the decoder's from its first position on.

    They come from a GPU in one copy: one a layer would wait for the GPU as often.
    """
    config = cache.config
    rings = cache.rings[:, sequence.slot] if sequence.parked is None else sequence.parked[1].rings
    for layer, ring in enumerate(rings.cpu()):
        lower = sequence.encoder_lower
        if layer >= config.encoder_layers:
            lower = max(lower, sequence.decoder_lower)
        first = max(lower, sequence.computed - config.sliding_window)
        yield _some(ring, torch.arange(first, max(first, sequence.computed)) % config.ring_rows)


def read_tail(cache: CachePools, sequence: Sequence, layer: int) -> bytes:
    """One source layer's compressor tail: the row of a token whose group is not complete."""
    tail = cache.tails[layer][sequence.slot] if sequence.parked is None else sequence.parked[1].tails[layer]
    done = sequence.computed // cache.pools[layer].ratio * cache.pools[layer].ratio
    return _some(tail, torch.arange(done, sequence.computed) % tail.shape[0])


def write_ring(cache: CachePools, slot: int, layer: int, data: bytes | None) -> None:
    """The inverse of one of `read_rings`; None is a ring of zeros."""
    _put(cache.rings[layer, slot], data)


def write_tail(cache: CachePools, slot: int, layer: int, data: bytes | None) -> None:
    """The inverse of `read_tail`; None is a tail of zeros."""
    _put(cache.tails[layer][slot], data)


def state_bytes(values: torch.Tensor) -> int:
    """Bytes of one slot's ring or tail."""
    return values.numel() * values.element_size()


def _some(values: torch.Tensor, rows: torch.Tensor) -> bytes:
    kept, values = torch.zeros_like(values, device="cpu"), values.cpu()
    kept[rows] = values[rows]
    return bytes(kept.view(torch.uint8).numpy())


def _put(to: torch.Tensor, data: bytes | None) -> None:
    if data is None:
        to.zero_()
    else:
        to.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(to.dtype).view(to.shape))


def _blank(cache: CachePools, pool: GlobalPool, main: torch.Tensor, index: torch.Tensor, valid: int) -> None:
    """Zero the rows of one page from row `valid` on."""
    main[valid:] = 0
    if not cache.quantised:
        index[valid:] = 0
        return
    config, rows = cache.config, pool.rows_per_block
    codes = config.index_head_dim // 2
    index[valid * codes : rows * codes] = 0
    index[rows * codes + valid * (config.index_row_bytes - codes) :] = 0
