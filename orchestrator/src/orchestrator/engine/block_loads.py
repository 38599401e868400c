"""Fetched blocks from the host tier into the engine's pools, by `gdr_swapin`."""

from __future__ import annotations

from collections.abc import Sequence

import gdr_swapin
from orchestrator.cache.block_object import HEADER_BYTES, WrongBytes
from orchestrator.cache.host.arena import PAGE, HostArena
from orchestrator.model.cache import CachePools

_PATIENCE_S = 30.0  # for memory copies of milliseconds: beyond it a device or a thread is gone


class BlockLoads:
    """Loads slots of one host arena into one engine's pools, layer after layer in the order of a forward pass.

    The arena's file is mapped once more, since the loader keeps its mapping as long as it lives.
    """

    def __init__(self, arena: HostArena, cache: CachePools) -> None:
        """Raises ValueError for caches that gdr_swapin has no form for, such as float32 rows."""
        layout = swapin_layout(cache)
        self.source, self._arena = arena, HostArena.attach(arena.path)
        self._foreign = gdr_swapin.HostArena.foreign(
            layout, self._arena.view, arena.slots, offset=PAGE + HEADER_BYTES, stride=arena.stride
        )
        pools = [cache.pools[number] for number in layout.numbers]
        paged = gdr_swapin.PagedPools(layout, tuple(p.main for p in pools), tuple(p.index for p in pools))
        if cache.rings.is_cuda:
            self._foreign.register()
        self._loader = gdr_swapin.Loader(self._foreign, paged)

    @property
    def method(self) -> str:
        """How bytes move."""
        return self._loader.method

    def load(self, slots: Sequence[tuple[int, int]], keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Bring slots (number, generation) into blocks, and wait. Returns how many of the first are right.

        Bytes are verified after they were copied, so that a slot whose writer died, or that changed meanwhile, does not
        count. On a GPU pages are written behind all that the current stream has queued.
        """
        if not slots:
            return 0
        try:
            transfer = self._loader.start([slot for slot, _ in slots], list(blocks))
            transfer.wait(_PATIENCE_S)
        except (gdr_swapin.SwapInError, gdr_swapin.Busy):
            return 0
        for number, ((slot, generation), key) in enumerate(zip(slots, keys, strict=True)):
            try:
                self._arena.read(slot, key, generation)
            except WrongBytes:
                return number
        return len(slots)

    def close(self) -> None:
        """Wait for what is under way and let go of the arena."""
        self._loader.close()
        self._foreign.unregister()


def swapin_layout(cache: CachePools) -> gdr_swapin.BlockLayout:
    """The loader's name for the blocks of these pools. Raises ValueError for rows that are not quantised."""
    if not cache.quantised:
        raise ValueError("cache: got float32 rows, allowed are quantised ones")
    config = cache.config
    return gdr_swapin.BlockLayout(
        tuple(
            gdr_swapin.SourceLayer(layer, config.rows_per_block(layer), config.main_row_bytes, config.index_row_bytes)
            for layer in config.kv_source_layer_ids
        )
    )
