"""What a judge needs to see of a forward pass: cache bytes and every discrete choice.

Keys are `kind/layer`, `tokens` and `logits`; each comes with its positions as `key/positions`. Rows of several steps
are joined by `export`. One recorder follows one request.
"""

from __future__ import annotations

import torch


class Recorder:
    """Collects rows of one request over the steps of a run.

    Kinds: `tokens` and, by layer, `window`, `topk`, `candidates`, `experts` (per computed row), `main`, `index` (per
    written group, at the position of its first token), and `logits`.

    With `analysis` also what no judge needs: `query` (rotated heads), `index_query` and `index_heads` (per computed
    row of a selecting layer), and `index_values` (index keys of written groups before they are quantised).
    """

    def __init__(self, *, analysis: bool = False) -> None:
        self.analysis = analysis
        self._rows: dict[str, list[torch.Tensor]] = {}

    def add(self, key: str, rows: torch.Tensor, positions: torch.Tensor) -> None:
        if rows.shape[0]:
            self._rows.setdefault(key, []).append(rows.clone().cpu())
            self._rows.setdefault(f"{key}/positions", []).append(positions.clone().cpu())

    def export(self) -> dict[str, torch.Tensor]:
        """Everything recorded so far, joined, in position order."""
        joined = {}
        for key, rows in self._rows.items():
            if key.endswith("/positions"):
                continue
            positions = torch.cat(self._rows[f"{key}/positions"])
            order = torch.argsort(positions, stable=True)
            joined[key] = torch.cat(rows)[order]
            joined[f"{key}/positions"] = positions[order]
        return joined


class StepRecorder:
    """Deals the rows of a mixed step out to the recorders of the requests that asked for one."""

    def __init__(self, recorders: dict[int, Recorder]) -> None:
        self._recorders = recorders  # chunk index -> recorder
        self.analysis = any(recorder.analysis for recorder in recorders.values())

    def add(self, key: str, rows: torch.Tensor, positions: torch.Tensor, owner: torch.Tensor) -> None:
        """`owner` int64 [T] is the chunk that each row belongs to."""
        for chunk, recorder in self._recorders.items():
            mine = owner == chunk
            recorder.add(key, rows[mine], positions[mine])
