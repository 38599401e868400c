"""Placements compared: what `docs/eplb.md` quotes. Planned on a window, judged on the 128 steps behind it."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from kernel_core.check import require
from orchestrator.balance.eplb.metric import STEPS, moe_lb, moe_lb_by_layer, rank_loads
from orchestrator.balance.eplb.placement import initial
from orchestrator.balance.eplb.planner import plan_full, plan_swaps, with_floor
from orchestrator.balance.eplb.published import plan_by_sums
from orchestrator.balance.eplb.swaps import MoveLimits
from orchestrator.balance.eplb.synthetic import ALIKE, BURSTY, MILD, draw

SYNTHETIC = {"alike": ALIKE, "mild topics": MILD, "bursty topics": BURSTY}
DRIFT = 0.4  # of the popularities since the stale placement was planned
_COLUMNS = ["load", "EP", "slots", "in order", "published rule", "stale", "32 moves", "full plan", "p99 of layers"]
_COLUMNS += ["slots moved, full (32 moves)", "ms a layer"]


@dataclass(frozen=True)
class Row:
    """`moe_lb` of the steps behind the window, by rule, and what the plans take.

    Attributes:
        static: experts in order.
        published: deepseek-ai/EPLB's rule on the window's sums.
        stale: planned in full before the load drifted.
        swaps: `stale` after 32 moves a layer.
        full: planned in full.
        p99: of the full plan, over layers.
        slots_moved, slots_swapped: slots of a layer whose weights move from `stale` to `full` and to `swaps`.
        seconds: planning in full, all layers.
    """

    name: str
    ranks: int
    dead: int
    slots: int
    layers: int
    static: float
    published: float
    stale: float
    swaps: float
    full: float
    p99: float
    slots_moved: float
    slots_swapped: float
    seconds: float


def compare(
    name: str,
    loads: np.ndarray,
    ranks: int,
    slots: int,
    dead: int = 0,
    window: int = 100,
    before: np.ndarray | None = None,
) -> Row:
    """Plan on the first `window` steps of `loads` [steps, layers, experts] and judge on the next, 128 at most.

    `dead` ranks, spread over all, are left out. `before` [steps, layers, experts] is what the stale placement was
    planned on; without it that is the static one.
    """
    require(len(loads) > window > 0, "window", window, f"1 to {len(loads) - 1}, below the steps of loads")
    require(0 <= dead < ranks, "dead", dead, f"0 to {ranks - 1}")
    past, future = loads[:window], loads[window : window + STEPS]
    alive = np.ones(ranks, np.bool_)
    alive[np.arange(dead) * ranks // max(dead, 1)] = False
    layers, experts = loads.shape[1:]
    static = initial(layers, experts, ranks, slots, alive)
    floored = with_floor(past, 0.01)
    stale = static if before is None else plan_full(with_floor(before, 0.01), static, alive)
    began = perf_counter()
    full = plan_full(floored, stale, alive)
    seconds = perf_counter() - began
    swaps = plan_swaps(floored, stale, alive, MoveLimits(swaps=32))
    full.check(alive)
    swaps.check(alive)
    published = plan_by_sums(past, int(alive.sum()), slots)
    received = rank_loads(full, future)
    return Row(
        name,
        ranks,
        dead,
        slots,
        layers,
        static=moe_lb(rank_loads(static, future), alive),
        published=moe_lb(rank_loads(published, future)),
        stale=moe_lb(rank_loads(stale, future), alive),
        swaps=moe_lb(rank_loads(swaps, future), alive),
        full=moe_lb(received, alive),
        p99=float(np.percentile(moe_lb_by_layer(received, alive), 99)),
        slots_moved=float((full.experts != stale.experts).sum() / layers),
        slots_swapped=float((swaps.experts != stale.experts).sum() / layers),
        seconds=seconds,
    )


def report(
    layers: int = 8,
    seed: int = 1,
    shapes: tuple[tuple[int, int, int], ...] = ((64, 0, 7), (32, 0, 13), (64, 9, 7)),
    drift: float = 0.0,
) -> list[Row]:
    """The synthetic loads over shapes (ranks, dead, slots), 384 experts; `drift` as in `draw`."""
    rows = []
    for name, load in SYNTHETIC.items():
        before = draw(load, 100, layers, 384, seed)
        loads = draw(load, 100 + STEPS, layers, 384, seed, drift)
        rows += [compare(name, loads, ranks, slots, dead, before=before) for ranks, dead, slots in shapes]
    return rows


def as_text(rows: list[Row]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    for r in rows:
        ep = str(r.ranks) if not r.dead else f"{r.ranks - r.dead} of {r.ranks}"
        values = f"{r.static:.3f} | {r.published:.3f} | {r.stale:.3f} | {r.swaps:.3f} | {r.full:.3f} | {r.p99:.3f}"
        moved = f"{r.slots_moved:.0f} ({r.slots_swapped:.0f})"
        lines.append(f"| {r.name} | {ep} | {r.slots} | {values} | {moved} | {1e3 * r.seconds / r.layers:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for drift in (0.0, DRIFT):
        print(f"drift {drift}\n{as_text(report(drift=drift))}\n")
