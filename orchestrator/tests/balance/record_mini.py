"""Expert counts of v41-mini on held-out Python, planned on and judged like the synthetic loads.

`python orchestrator/tests/balance/record_mini.py [TOKENS]` prints a table; docs/eplb.md quotes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from orchestrator.balance.eplb.recorded import steps_of
from orchestrator.balance.eplb.report import Row, as_text, compare
from orchestrator.corpus.heldout import heldout_texts
from orchestrator.evaluate.feed import Feeder, Piece
from orchestrator.model.load import load_model
from orchestrator.model.record import Recorder
from orchestrator.text.tokenizer import load_tokenizer

MODEL = Path(__file__).parents[3] / "models" / "v41-mini"
TEXT, STEP = 1024, 256  # tokens taken from a text; rows of a step


def routing(tokens: int) -> tuple[dict[int, np.ndarray], int]:
    """Experts [tokens, top_k] of every layer over pieces of the held-out texts, and how many experts there are."""
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    pieces = []
    for _, text in heldout_texts():
        ids = tokenizer.encode(text)
        pieces += [ids[i : i + TEXT] for i in range(0, len(ids) - TEXT + 1, TEXT)]
    every = max(1, len(pieces) * TEXT // tokens)
    found: dict[int, list[np.ndarray]] = {}
    for ids in pieces[::every][: tokens // TEXT]:
        recorder, feed = Recorder(), Feeder(model, 1, TEXT)
        feed.run(Piece(0, ids, 0, len(ids), logits="last"), recorder=recorder)
        for key, rows in recorder.export().items():
            if key.startswith("experts/") and not key.endswith("/positions"):
                found.setdefault(int(key.split("/")[1]), []).append(rows.numpy())
    return {layer: np.concatenate(rows) for layer, rows in found.items()}, model.config.n_routed_experts


def rows_of(tokens: int) -> list[Row]:
    """Mixed rows (steps alike), then steps of one text each in a drawn order (steps differ)."""
    experts, count = routing(tokens)
    alike = steps_of(experts, count, STEP)
    by_text = steps_of(experts, count, STEP, seed=-1)
    by_text = by_text[np.random.default_rng(0).permutation(len(by_text))]
    window = min(100, len(alike) // 2)
    return [
        compare(name, loads, ranks, slots, window=window)
        for name, loads in (("rows mixed", alike), ("one text a step", by_text))
        for ranks, slots in ((4, 4), (6, 3), (5, 3))
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(as_text(rows_of(int(sys.argv[1]) if len(sys.argv) > 1 else 58_368)))
