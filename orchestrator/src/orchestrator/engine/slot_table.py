"""What a decode step reads of its requests, on the device: the newest tokens and drafts, by slot.

A step writes it and the next one reads it in the order of the device's stream, so the next step can be started before
the host knows what the last one decided.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import torch

import dspark_kernels
from orchestrator.engine.image_spans import mask
from orchestrator.engine.sequence import Sequence
from orchestrator.model.batch import LOOK_BACK, NO_TOKEN


class SlotTable:
    """Rows of slots, kept by the request that holds the slot.

    Attributes:
        tokens: int64 [slots, 1 + G], the newest token (the anchor) and the drafts behind it.
        starts: int64 [slots], position of the anchor.
        history: int64 [slots, 3], tokens before the anchor, the nearest first; -1 for none.
        confidence: float32 [slots, G], of each draft.
    """

    def __init__(self, slots: int, drafts: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, 1 + drafts, dtype=torch.int64, device=device)
        self.starts = torch.zeros(slots, dtype=torch.int64, device=device)
        self.history = torch.full((slots, LOOK_BACK), NO_TOKEN, dtype=torch.int64, device=device)
        self.confidence = torch.zeros(slots, drafts, device=device)

    def load(self, sequences: Items[Sequence], there: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take over requests as the host knows them; `there` brings a host tensor to the device."""
        drafts = self.confidence.shape[1]
        slots = there(torch.tensor([s.slot for s in sequences], dtype=torch.int64))
        rows = [(s.tokens[-1:] + s.drafts + [0] * drafts)[: 1 + drafts] for s in sequences]
        before = [_before(s) for s in sequences]
        confidence = [((s.confidence if s.drafts else []) + [0.0] * drafts)[:drafts] for s in sequences]
        self.tokens[slots] = there(torch.tensor(rows, dtype=torch.int64))
        self.history[slots] = there(torch.tensor(before, dtype=torch.int64))
        self.confidence[slots] = there(torch.tensor(confidence, dtype=torch.float32).view(-1, drafts))
        self.starts[slots] = there(torch.tensor([len(s.tokens) - 1 for s in sequences], dtype=torch.int64))

    def commit(self, slots: torch.Tensor, result: dspark_kernels.Verified, last: torch.Tensor) -> None:
        """Append what was decided. `slots` int64 [R]; `last` int64 [R] is where a request's last token may stand.

        A request at its last place stands still: it has ended, and the host may not know yet.
        """
        starts = self.starts.index_select(0, slots)
        moved = torch.minimum(starts + result.counts, last).sub_(starts).clamp_(min=0)
        line = torch.cat([
            self.history.index_select(0, slots).flip(1),
            self.tokens.index_select(0, slots)[:, :1],
            result.tokens,
        ], dim=1)  # fmt: skip
        newest = moved + LOOK_BACK
        back = torch.arange(1, LOOK_BACK + 1, device=slots.device)
        self.history[slots] = line.gather(1, newest.unsqueeze(1) - back)
        self.tokens[slots, 0] = line.gather(1, newest.unsqueeze(1)).squeeze(1)
        self.starts[slots] = starts + moved

    def put(self, slots: torch.Tensor, drafts: torch.Tensor, confidence: torch.Tensor) -> None:
        """New drafts int64 [R, G] and their confidences float32 [R, G]."""
        self.tokens[slots, 1:] = drafts
        self.confidence[slots] = confidence


def _before(sequence: Sequence) -> list[int]:
    """The tokens before a request's last one, the nearest first; inside an image there is none."""
    last = len(sequence.tokens) - 1
    first = max(0, last - LOOK_BACK)
    images = mask(sequence.images, first, last) or [False] * (last - first)
    ids = [NO_TOKEN if inside else token for token, inside in zip(sequence.tokens[first:last], images, strict=True)]
    return (ids[::-1] + [NO_TOKEN] * LOOK_BACK)[:LOOK_BACK]
