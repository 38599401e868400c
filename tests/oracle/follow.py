"""Follow mode: judge an implementation's discrete choices one by one, and continue with them.

Free-running logits say little with quantised caches, since one flipped code or expert changes all that comes after it.
Here each choice is judged where it was made, against values that rest on the implementation's own earlier choices, and
then taken over, unless nothing can be computed with it, as with a NaN or a key of the future. What remains is
arithmetic error, so logits compare tightly (docs/model.md, Judging an implementation).

The record is a dict of arrays:

    tokens            int64[N]
    window/{layer}    uint8[N', row] or float32[N', D], with window/{layer}/positions int64[N']
    main/{layer}      uint8[G, row] or float32[G, D]: all N // ratio groups of a source layer, or those for which
                      main/{layer}/positions int64[G] gives the position of the first token
    index/{layer}     the same for its index keys, codes then scales in each row
    topk/{layer}      int32[N', up to index_topk], ascending, -1 fills; with topk/{layer}/positions
    candidates/{layer} int32[N', up to candidate_topk_blocks], likewise
    experts/{layer}   int32[N', experts a token], in any order; with experts/{layer}/positions
    logits            float32[M, V], with logits/positions int64[M]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import indexer, judge
from .choices import Own
from .formats import INDEX, MAIN, WINDOW, Format
from .forward import Oracle
from .judge import Tolerances
from .trace import Replay, Trace

Record = Mapping[str, np.ndarray]


@dataclass
class Tally:
    """Items of one kind: how many were judged, how many differ from the oracle's own, and the worst ratio of the
    error that explains an item to the error allowed."""

    judged: int = 0
    differing: int = 0
    worst: float = 0.0
    where: str = ""


@dataclass
class Report:
    """Outcome of a follow run. `failures` lists the items whose ratio is above 1, the first twenty of each kind."""

    kinds: dict[str, Tally] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    logit_error: float = 0.0  # largest absolute difference at the exported positions
    logit_where: str = ""
    logit_tolerance: float = 1e-3

    @property
    def passed(self) -> bool:
        return self.failed == 0 and self.logit_error <= self.logit_tolerance

    def add(self, kind: str, layer: int, positions: np.ndarray, ratio: np.ndarray, differing: np.ndarray) -> None:
        """Counts items [T, ...] whose first axis stands at `positions`."""
        tally = self.kinds.setdefault(kind, Tally())
        tally.judged += ratio.size
        tally.differing += int(differing.sum())
        if not ratio.size:
            return

        def name(flat: int) -> str:
            at = np.unravel_index(flat, ratio.shape)
            return f"{kind} layer {layer} row {positions[at[0]]}" + (f" item {at[1]}" if len(at) > 1 else "")

        worst = int(ratio.argmax())
        if ratio.flat[worst] > tally.worst:
            tally.worst, tally.where = float(ratio.flat[worst]), name(worst)
        wrong = np.nonzero(~(ratio.ravel() <= 1))[0]
        self.failed += len(wrong)
        room = max(0, 20 - sum(line.startswith(kind + " ") for line in self.failures))
        self.failures += [f"{name(i)}: {ratio.flat[i]:.3g} times the allowed error" for i in wrong[:room]]

    def __str__(self) -> str:
        lines = [
            f"follow: {'passed' if self.passed else 'FAILED'}; logits within {self.logit_error:.3g}{self.logit_where}"
        ]
        for kind, t in sorted(self.kinds.items()):
            lines.append(f"  {kind}: {t.judged} judged, {t.differing} differ, worst ratio {t.worst:.3g} {t.where}")
        return "\n".join([*lines, *(f"  wrong: {line}" for line in self.failures)])


class Followed(Own):
    """Another's choices out of a record, each judged on the way."""

    def __init__(self, oracle: Oracle, record: Record, report: Report, tolerances: Tolerances):
        dtype = entry(record, f"window/{0}").dtype
        super().__init__(oracle.config, "quantised" if dtype == np.uint8 else "float")
        self.record, self.report, self.tolerances = record, report, tolerances

    def at(self, name: str, positions: np.ndarray) -> np.ndarray:
        return rows_at(self.record, name, positions)

    def judged_rows(
        self, kind: str, form: Format, layer: int, positions: np.ndarray, theirs: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        quantised = theirs.dtype == np.uint8
        expected = (len(values), form.row_bytes(values.shape[-1]) if quantised else values.shape[-1])
        if quantised != self.quantised or theirs.shape != expected:
            raise ValueError(
                f"{kind}/{layer} is {theirs.dtype}{list(theirs.shape)}, expected {list(expected)} a row kind"
            )
        if not quantised:
            allowed = self.tolerances.row * np.abs(values).max(-1, keepdims=True) + 1e-30
            ratio = np.nan_to_num(np.abs(theirs - values) / allowed, nan=np.inf)
            self.report.add(kind, layer, positions, ratio, ratio > 1)
            return np.where(np.isfinite(theirs), theirs, values)
        codes, scales = judge.rows(form, theirs, values, self.tolerances.row)
        own = form.encode(values)
        self.report.add(f"{kind} code", layer, positions, codes, ~judge.same_codes(form, theirs, own))
        self.report.add(f"{kind} scale", layer, positions, scales, form.split(theirs)[1] != form.split(own)[1])
        return np.where(np.isfinite(form.decode(theirs)).all(-1, keepdims=True), theirs, own)

    def window_rows(self, layer: int, positions: np.ndarray, values: np.ndarray) -> np.ndarray:
        theirs = self.at(f"window/{layer}", positions)
        return self.judged_rows("window", WINDOW, layer, positions, theirs, values)

    def groups(self, kind: str, layer: int, groups: np.ndarray) -> np.ndarray:
        return groups_at(self.record, f"{kind}/{layer}", self.config.compress_ratios[layer], groups)

    def main_rows(self, layer: int, groups: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self.judged_rows("main", MAIN, layer, groups, self.groups("main", layer, groups), values)

    def index_rows(self, layer: int, groups: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self.judged_rows("index", INDEX, layer, groups, self.groups("index", layer, groups), values)

    def judged_sets(
        self, kind: str, layer: int, positions: np.ndarray, own: np.ndarray, scores: np.ndarray, radius: Any
    ) -> np.ndarray:
        """Compares ascending, filled id lists; `radius(row)` gives the errors of one row's scores when sets differ."""
        theirs = self.at(f"{kind}/{layer}", positions).astype(np.int64)
        if theirs.shape[1] > own.shape[1]:
            raise ValueError(f"{kind}/{layer} has {theirs.shape[1]} columns, expected at most {own.shape[1]}")
        theirs = np.pad(theirs, ((0, 0), (0, own.shape[1] - theirs.shape[1])), constant_values=-1)
        differing, usable = np.any(theirs != own, axis=1), np.ones(len(own), bool)
        ratio = np.zeros(len(own))
        for row in np.nonzero(differing)[0]:
            mine = own[row][own[row] >= 0]
            ids, fill = theirs[row, : len(mine)], theirs[row, len(mine) :]
            usable[row] = np.all(fill == -1) and judge.well_formed(ids, len(mine), scores[row])
            ratio[row] = judge.selection(ids, mine, scores[row], radius(row)) if usable[row] else np.inf
        self.report.add(kind, layer, positions, ratio, differing)
        return np.where(usable[:, None], theirs, own)

    def topk(self, layer: int, positions: np.ndarray, scoring: indexer.Scoring) -> np.ndarray:
        def radius(row: int) -> np.ndarray:
            return judge.score_radius(scoring, row, self.tolerances, self.quantised)

        own = super().topk(layer, positions, scoring)
        return self.judged_sets("topk", layer, positions, own, scoring.scores, radius)

    def candidates(self, layer: int, positions: np.ndarray, scoring: indexer.Scoring) -> np.ndarray:
        block = self.config.candidate_block_size
        scores = indexer.block_scores(scoring.scores, scoring.visible, block)

        def radius(row: int) -> np.ndarray:
            single = judge.score_radius(scoring, row, self.tolerances, self.quantised)
            one, visible = scoring.scores[row : row + 1], scoring.visible[row : row + 1]
            low, high = (indexer.block_scores(one + s * single, visible, block)[0] for s in (-1, 1))
            with np.errstate(invalid="ignore"):
                return np.nan_to_num((high - low) / 2)  # 0 for the forced block and for those out of reach

        own = super().candidates(layer, positions, scoring)
        return self.judged_sets("candidates", layer, positions, own, scores, radius)

    def experts(self, layer: int, positions: np.ndarray, biased: np.ndarray, k: int) -> np.ndarray:
        theirs = self.at(f"experts/{layer}", positions).astype(np.int64)
        own = super().experts(layer, positions, biased, k)
        if theirs.shape != own.shape:
            raise ValueError(f"experts/{layer} has {theirs.shape[-1]} columns, expected {k}")
        ids, mine = np.sort(theirs, -1), np.sort(own, -1)
        differing, usable = np.any(ids != mine, axis=1), np.ones(len(own), bool)
        ratio = np.zeros(len(own))
        for row in np.nonzero(differing)[0]:
            radius = np.full(biased.shape[1], self.tolerances.router * max(1.0, np.abs(biased[row]).max()))
            usable[row] = judge.well_formed(ids[row], k, biased[row])
            ratio[row] = judge.selection(ids[row], mine[row], biased[row], radius) if usable[row] else np.inf
        self.report.add("experts", layer, positions, ratio, differing)
        return np.where(usable[:, None], theirs, own)


def entry(record: Record, name: str) -> np.ndarray:
    if name not in record:
        raise ValueError(f"the record lacks {name}")
    return np.asarray(record[name])


def rows_at(record: Record, name: str, positions: np.ndarray, unit: int = 1) -> np.ndarray:
    """Rows of an entry at given positions, exported as position * unit; a later export replaces an earlier one."""
    rows, held = entry(record, name), entry(record, f"{name}/positions") // unit
    if len(rows) != len(held):
        raise ValueError(f"{name} has {len(rows)} rows and {len(held)} positions")
    place = {int(p): i for i, p in enumerate(held)}
    missing = [int(p) for p in positions if int(p) not in place]
    if missing:
        raise ValueError(f"{name} lacks position {missing[0] * unit}; {len(missing)} of {len(positions)} are missing")
    return rows[[place[int(p)] for p in positions]]


def groups_at(record: Record, name: str, ratio: int, groups: np.ndarray) -> np.ndarray:
    """Global rows of given groups, with or without positions beside them."""
    if f"{name}/positions" in record:
        return rows_at(record, name, groups, ratio)
    rows = entry(record, name)
    if len(groups) and len(rows) <= groups[-1]:
        raise ValueError(f"{name} has {len(rows)} rows, expected {groups[-1] + 1}")
    return rows[groups]


def follow(
    oracle: Oracle,
    record: Record,
    *,
    hit: int | None = None,
    cached: Record | None = None,
    decoder_start: int | None = None,
    image_mask: np.ndarray | None = None,
    embeddings: np.ndarray | None = None,
    tolerances: Tolerances | None = None,
    logit_tolerance: float = 1e-3,
) -> tuple[Trace, Report]:
    """Runs the oracle along an implementation's record; returns its trace (logits included) and the report.

    hit: length of a prefix hit that was resumed by encoder replay; global rows before it are taken as given, out of
    `cached` (the record of the run that made them) or this record. decoder_start: first row that the decoder ran; by
    default the first with exported experts in the decoder.
    A record that is incomplete or of wrong shape is a ValueError; a wrong choice is a failure in the report.
    """
    config = oracle.config
    tokens = entry(record, "tokens").astype(np.int64)
    report = Report(logit_tolerance=logit_tolerance)
    choices = Followed(oracle, record, report, tolerances or Tolerances())
    start, replay = 0, None
    if hit is not None:
        start = hit - config.sliding_window
        given = {}
        for kind in ("main", "index"):
            for source in config.kv_source_layer_ids:
                ratio, name = config.compress_ratios[source], f"{kind}/{source}"
                given[kind, source] = groups_at(cached or record, name, ratio, np.arange(hit // ratio))
        replay = Replay(hit, *({s: given[k, s] for s in config.kv_source_layer_ids} for k in ("main", "index")))
    if decoder_start is None:
        decoder_start = int(entry(record, f"experts/{config.decoder_start_layer}/positions").min())
    trace = oracle.run(tokens, choices, start, max(start, decoder_start), replay, image_mask, embeddings)
    compare_logits(trace, record, report)
    return trace, report


def compare_logits(trace: Trace, record: Record, report: Report) -> None:
    theirs, positions = entry(record, "logits"), entry(record, "logits/positions").astype(np.int64)
    first = int(trace.logits_positions[0])
    if len(theirs) != len(positions) or np.any(positions < first) or np.any(positions >= len(trace.tokens)):
        raise ValueError(f"logits/positions: one a row, allowed is {first}..{len(trace.tokens) - 1}")
    if len(theirs):
        error = np.nan_to_num(np.abs(theirs - trace.logits[positions - first]), nan=np.inf)
        worst = np.unravel_index(error.argmax(), error.shape)
        report.logit_error = float(error[worst])
        report.logit_where = f" (worst at position {positions[worst[0]]}, token {worst[1]})"
