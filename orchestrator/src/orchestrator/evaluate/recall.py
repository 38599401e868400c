"""How much of the attention that compressed rows deserve falls on the rows that the indexer selects.

The measure is exact: a softmax over the window, all visible compressed rows and the sink. Of the mass on compressed
rows, summed over heads, a selection holds a share; the rows of the largest mass hold the most that as many rows can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import mla_fp4
from kernel_core import formats
from orchestrator.evaluate.feed import CHUNK_TOKENS, Feeder, Piece
from orchestrator.evaluate.statistics import Estimate, ratio_of_sums
from orchestrator.model.record import Recorder
from orchestrator.model.transformer import Transformer

QUERIES = 64
"""Last positions of a context that are measured."""
WAYS = ("selected", "float32", "float32, all rows", "best")


@dataclass(frozen=True)
class Recall:
    """Shares of one layer at one context length, by way of selecting.

    `selected` is what the model attends to; `float32` the same rule (candidate blocks too) on index scores without
    quantisation; `float32, all rows` that without candidate blocks; `best` the rows of the largest mass. `mass` is
    the share of all attention that compressed rows have. Errors by bootstrap over queries.
    """

    layer: int
    context: int
    visible: int
    chosen: int
    queries: int
    mass: float
    shares: dict[str, Estimate]


class _Kept(Recorder):
    """Keeps what the measure needs: index values of all rows, the rest of the last queries only."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__(analysis=True)
        kinds = ("query", "index_query", "index_heads", "topk", "candidates")
        self._kinds = {f"{kind}/{layer}" for kind in kinds for layer in layers}
        self.last = False

    def add(self, key: str, rows: torch.Tensor, positions: torch.Tensor) -> None:
        if key.startswith("index_values/") or (self.last and (key in self._kinds or key.startswith("window/"))):
            super().add(key, rows, positions)


def measure_recall(
    model: Transformer, tokens: Sequence[Sequence[int]], context: int, tick: Callable[[int], None] = lambda _: None
) -> list[Recall]:
    """Every selecting layer, at the last `QUERIES` positions of each text's first `context` tokens.

    The rows, queries and window are those of the quantised run, so that ways of selecting alone differ.

    Raises:
        ValueError: a text is shorter than the context, or the context has no room for a window before the queries.
    """
    config = model.config
    least = QUERIES + config.sliding_window
    if context < least:
        raise ValueError(f"context: got {context}, allowed is at least {least}")
    layers = config.index_source_layer_ids
    found: dict[int, list[dict[str, torch.Tensor]]] = {layer: [] for layer in layers}
    for text in tokens:
        if len(text) < context:
            raise ValueError(f"tokens: got a text of {len(text)}, allowed is at least {context}")
        feeder, recorder = Feeder(model, 1, context), _Kept(layers)
        feeder.run(Piece(0, text, 0, context - QUERIES, logits="none"), CHUNK_TOKENS, recorder)
        rings = feeder.cache.rings[:, feeder.slot(0)].clone()
        recorder.last = True
        feeder.run(Piece(0, text, context - QUERIES, context, logits="none"), CHUNK_TOKENS, recorder)
        record = recorder.export()
        for layer in layers:
            found[layer].append(_shares(model, feeder, record, rings, layer, context))
        tick(context)
    return [_summary(config.index_topk, layer, context, parts) for layer, parts in found.items()]


def dense_mass(
    query: torch.Tensor,
    window: torch.Tensor,
    window_seen: torch.Tensor,
    main: torch.Tensor,
    visible: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention mass on each compressed row, heads summed, float32 [T, G], and on everything but the sink [T].

    query float32 [T, H, D]; window [W, D] with `window_seen` bool [T, W]; main [G, D], of which row t sees the first
    visible[t]; sink [H].
    """
    keys = torch.cat([window, main])
    seen = torch.cat([window_seen, torch.arange(len(main)) < visible.unsqueeze(1)], dim=1)
    mass = torch.empty(len(query), len(main))
    total = torch.empty(len(query))
    for row in range(0, len(query), 16):
        part = slice(row, row + 16)
        scores = torch.einsum("thd,kd->thk", query[part], keys) * scale
        scores = scores.masked_fill(~seen[part].unsqueeze(1), -torch.inf)
        joined = torch.cat([scores, sink.view(1, -1, 1).expand(scores.shape[0], -1, 1)], dim=2)
        weights = joined.softmax(-1)[..., :-1].sum(1)
        mass[part], total[part] = weights[:, len(window) :], weights.sum(-1)
    return mass, total


def _shares(
    model: Transformer, feeder: Feeder, record: dict[str, torch.Tensor], rings: torch.Tensor, layer: int, context: int
) -> dict[str, torch.Tensor]:
    """Mass float32 [QUERIES] on compressed rows, and of it what each way of selecting holds."""
    config = model.config
    source = config.kv_source(layer)
    assert source is not None
    ratio, attention = config.ratio(layer), model.attention[layer]
    positions = torch.arange(context - QUERIES, context)
    visible = ((positions + 1) // ratio).int()
    pool, blocks = feeder.cache.pools[source], torch.tensor(feeder.blocks(0))
    main = pool.main[blocks].flatten(0, 1)[: int(visible.max())]

    before = torch.arange(context - QUERIES - config.sliding_window, context - QUERIES)
    window = torch.cat([rings[layer, before % config.ring_rows], record[f"window/{layer}"]])
    if feeder.cache.quantised:
        main, window = formats.dequantize_main(main), formats.dequantize_window(window)
    age = positions.unsqueeze(1) - torch.cat([before, positions])
    seen = (age >= 0) & (age < config.sliding_window)
    mass, total = dense_mass(record[f"query/{layer}"], window, seen, main, visible, attention.sink, attention.scale)

    k = config.index_topk
    candidates = record[f"candidates/{config.candidate_source_layer_id}"] if config.uses_candidates(layer) else None
    chosen = {
        "selected": record[f"topk/{layer}"],
        "float32": _float_topk(model, record, layer, source, visible, candidates),
        "float32, all rows": _float_topk(model, record, layer, source, visible, None),
        "best": mass.topk(min(k, mass.shape[1]), dim=1).indices,
    }
    held = {name: _held(mass, indices) for name, indices in chosen.items()}
    return {"mass": mass.sum(1), "total": total, "visible": visible, **held}


def _float_topk(
    model: Transformer,
    record: dict[str, torch.Tensor],
    layer: int,
    source: int,
    visible: torch.Tensor,
    candidates: torch.Tensor | None,
) -> torch.Tensor:
    """The selection that index scores without any quantisation would make."""
    config = model.config
    keys = record[f"index_values/{source}"]
    cu_seqlens = torch.tensor([0, len(visible)], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    indices, _ = mla_fp4.index_topk(
        record[f"index_query/{layer}"],
        record[f"index_heads/{layer}"],
        keys.unsqueeze(0).contiguous(),
        len(keys),
        table,
        cu_seqlens,
        visible,
        config.index_topk,
        candidates=candidates,
        candidate_block=config.candidate_block_size,
    )
    return indices


def _held(mass: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    taken = mass.gather(1, indices.clamp(min=0).long())
    return (taken * (indices >= 0)).sum(1)


def _summary(k: int, layer: int, context: int, parts: list[dict[str, torch.Tensor]]) -> Recall:
    joined = {name: torch.cat([p[name] for p in parts]).double().tolist() for name in parts[0]}
    shares = {way: ratio_of_sums(joined[way], joined["mass"]) for way in WAYS}
    visible = int(max(joined["visible"]))
    queries = len(joined["mass"])
    return Recall(layer, context, visible, min(k, visible), queries, sum(joined["mass"]) / sum(joined["total"]), shares)
