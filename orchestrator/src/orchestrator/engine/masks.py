"""Which tokens may come at every place of a step: grammars and minimum lengths, also behind each draft.

Masks are laid out by request and place, whether or not the scheduler cuts drafts: which rows the places have is looked
up when the masks are applied.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from orchestrator.engine.sequence import Sequence

_WORD = 32


@dataclass
class Masks:
    """`bits` int32 [M, ceil(vocab / 32)] (bit set: allowed) for `places` (request row, place behind so many drafts).

    `errors` (request row, place) -> why the grammar gave up there.
    """

    bits: np.ndarray
    places: list[tuple[int, int]] = field(default_factory=list)
    errors: dict[tuple[int, int], str] = field(default_factory=dict)


def masks_for(
    sequences: Items[Sequence], drafts: Items[Items[int]], eos: tuple[int, ...], vocab_size: int
) -> Masks | None:
    """Masks of the places that need one, each request's with its `drafts` so far taken; None if no place does.

    Matchers are back where they were afterwards. A draft that its grammar forbids ends the request's masks: no place
    behind it can be reached.
    """
    width = -(-vocab_size // _WORD)
    rows: list[np.ndarray] = []
    masks = Masks(np.empty((0, width), dtype=np.int32))
    for index, (sequence, proposed) in enumerate(zip(sequences, drafts, strict=True)):
        if sequence.matcher is None and sequence.output_len >= sequence.params.min_tokens:
            continue
        taken = 0
        try:
            for place in range(len(proposed) + 1):
                row = _row(sequence, place, eos, width)
                if row is None:
                    break
                masks.places.append((index, place))
                rows.append(row)
                if sequence.matcher is not None and place < len(proposed):
                    if not sequence.matcher.advance(proposed[place]):
                        break
                    taken += 1
                    if sequence.matcher.stopped:
                        break
        except RuntimeError as error:
            masks.errors[index, place] = str(error)
        if taken:
            sequence.matcher.rollback(taken)
    if not rows and not masks.errors:
        return None
    masks.bits = np.stack(rows) if rows else masks.bits
    return masks


def _row(sequence: Sequence, place: int, eos: tuple[int, ...], width: int) -> np.ndarray | None:
    """One mask, or None where everything is allowed from here on."""
    params = sequence.params
    held = sequence.output_len + place < params.min_tokens
    if sequence.matcher is None and not held:
        return None
    row = np.full(width, -1, dtype=np.int32)
    if sequence.matcher is not None:
        sequence.matcher.fill_mask(row)
    if held:
        ends = params.stop_token_ids if params.ignore_eos else eos + params.stop_token_ids
        without = row.copy()
        words = without.view(np.uint32)
        for token in ends:
            words[token // _WORD] &= ~np.uint32(1 << (token % _WORD))
        if sequence.matcher is None or without.any():  # a grammar at its end goes before `min_tokens`
            row = without
    return row
