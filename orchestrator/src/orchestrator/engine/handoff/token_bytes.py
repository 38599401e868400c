"""Token ids as bytes: four each, little-endian."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.engine.handoff.parts import HandoffRefused


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def unpack_tokens(data: bytes, vocab: int) -> list[int]:
    """Raises HandoffRefused for bytes that are not ids below `vocab`."""
    if len(data) % 4:
        raise HandoffRefused("size", f"tokens: got {len(data)} bytes, allowed are 4 an id")
    ids = np.frombuffer(data, dtype="<u4")
    if ids.size and int(ids.max()) >= vocab:
        raise HandoffRefused("state", f"tokens: got id {ids.max()}, allowed are 0 to {vocab - 1}")
    return [int(i) for i in ids]
