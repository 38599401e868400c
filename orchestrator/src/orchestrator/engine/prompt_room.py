"""Whether an engine can compute a prompt while it holds others that wait to be fetched."""

from __future__ import annotations

from orchestrator.engine.engine import Engine
from orchestrator.engine.scheduler import blocks_for


def has_room(engine: Engine, tokens: int) -> bool:
    """A prompt that was computed keeps its slot and blocks until its state has left. One that is taken in beyond them
    would wait for that, and a step that asks for both would not end.

    `tokens` of a prompt with its output so far. An engine without requests has room for any that it takes at all.
    """
    queues = engine.scheduler
    held = [*queues.waiting, *queues.parked, *queues.running, *queues.leaving]
    if not held:
        return True
    blocks = sum(blocks_for(len(sequence.tokens) + 1) for sequence in held)
    return len(held) < engine.config.max_num_seqs and blocks + blocks_for(tokens + 1) <= engine.config.num_blocks
