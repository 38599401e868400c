"""Memory for a request that comes in: reserved by its offer, filled by its parts, unknown to anybody before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.engine.handoff.messages import Offer
from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.engine.handoff.rows import layer_block_bytes, state_bytes, write_blocks, write_ring, write_tail
from orchestrator.engine.scheduler import blocks_for
from orchestrator.engine.sequence import Sequence
from orchestrator.model.config import BLOCK_TOKENS

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine


class Room:
    """A slot, and blocks for the rows that were offered.

    Attributes:
        have: first full blocks that were here already and are shared, so nothing is written there.
        filled: by source layer, blocks that have their rows.
    """

    def __init__(self, engine: Engine, offer: Offer, *, share: bool) -> None:
        """`share` blocks that the prefix cache has. Raises HandoffRefused, with nothing taken."""
        self._engine, self._cache = engine, engine.cache
        scheduler, prefix, found = engine.scheduler, engine.prefix, []
        if share and prefix is not None and offer.root and offer.root == prefix.root_of(offer.params.cache_salt):
            keys = [offer.keys[at : at + 32] for at in range(0, len(offer.keys), 32)]
            found = prefix.blocks.match(keys[: offer.rows // BLOCK_TOKENS])
        live = len(found) - (prefix.blocks.idle(found) if prefix is not None else 0)
        if not scheduler.has_room(offer.rows, live):
            raise HandoffRefused(
                "room",
                f"rows: got {offer.rows} tokens, allowed is what fits into {scheduler.blocks.free} free blocks and "
                f"{scheduler.slots.free} free slots, with one block for each running request and none parked",
            )
        if prefix is not None:
            prefix.blocks.hold(found)
        self._blocks = found + scheduler.blocks.take(blocks_for(offer.rows) - len(found))
        self._slot = scheduler.slots.take(1)[0]
        self._given = {"window": set[int](), "tail": set[int]()}
        self.have = len(found)
        self.filled = dict.fromkeys(engine.cache.pools, self.have)

    def put_rows(self, name: str, layer: int, first: int, payload: bytes, count: int) -> None:
        """Layer blocks from block `first` on; `name` is for errors. Raises HandoffRefused, with nothing written."""
        if first != self.filled[layer]:
            allowed = f"{self.filled[layer]}, the next"
            raise HandoffRefused("order", f"part {name!r}: got block {first}, allowed is {allowed}")
        if first + count > len(self._blocks):
            allowed = f"the {len(self._blocks)} that were offered"
            raise HandoffRefused("size", f"part {name!r}: got block {first + count - 1}, allowed are {allowed}")
        check_size(name, payload, count * layer_block_bytes(self._cache, layer))
        write_blocks(self._cache, layer, self._blocks[first : first + count], payload)
        self.filled[layer] += count

    def put_window(self, name: str, layer: int, payload: bytes) -> None:
        """A layer's ring; that of a draft stage is left out where this engine does not draft."""
        check_size(name, payload, state_bytes(self._cache.rings[0, 0]))
        if layer < self._cache.rings.shape[0]:
            write_ring(self._cache, self._slot, layer, payload)
            self._given["window"].add(layer)

    def put_tail(self, name: str, layer: int, payload: bytes) -> None:
        """A source layer's compressor tail."""
        check_size(name, payload, state_bytes(self._cache.tails[layer][0]))
        write_tail(self._cache, self._slot, layer, payload)
        self._given["tail"].add(layer)

    def hand_to(self, sequence: Sequence, written: int) -> None:
        """Give all to a request of `written` tokens with rows; what did not come holds zeros, and spare blocks go."""
        for layer in set(range(self._cache.rings.shape[0])) - self._given["window"]:
            write_ring(self._cache, self._slot, layer, None)
        for layer in set(self._cache.tails) - self._given["tail"]:
            write_tail(self._cache, self._slot, layer, None)
        kept = blocks_for(written)
        self._engine.scheduler.blocks.give(self._blocks[kept:])
        sequence.blocks, sequence.slot, sequence.published = self._blocks[:kept], self._slot, self.have

    def give_back(self) -> None:
        """Free all of it."""
        self._engine.scheduler.blocks.give(self._blocks)
        self._engine.scheduler.slots.give([self._slot])


def check_size(name: str, payload: bytes, size: int) -> None:
    """Raise HandoffRefused unless a part has this many bytes."""
    if len(payload) != size:
        raise HandoffRefused("size", f"part {name!r}: got {len(payload)} bytes, allowed are {size}")
