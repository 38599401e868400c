"""From counts and the present placement to the next one, or to the reason why nothing moves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kernel_core.check import require
from orchestrator.balance.eplb.domains import Domain, several
from orchestrator.balance.eplb.metric import moe_lb, rank_loads
from orchestrator.balance.eplb.pack import pack
from orchestrator.balance.eplb.placement import EMPTY, Placement, check_alive, check_capacity
from orchestrator.balance.eplb.relabel import relabel
from orchestrator.balance.eplb.repair import repair
from orchestrator.balance.eplb.replicate import replicate
from orchestrator.balance.eplb.settings import EplbSettings
from orchestrator.balance.eplb.swaps import MoveLimits, improve


@dataclass(frozen=True)
class Decision:
    """What a planning round came to.

    Attributes:
        placement: the next placement, or the present one.
        moves: whether the two differ.
        reason: "gain", "repair", "too few tokens" or "too little gain".
        before, after: `moe_lb` over the window, present and predicted.
    """

    placement: Placement
    moves: bool
    reason: str
    before: float
    after: float


def plan(
    loads: np.ndarray, current: Placement, settings: EplbSettings, alive: np.ndarray | None = None, domain: Domain = 0
) -> Decision:
    """Plan anew: in full where all ranks share fast links and nothing else is asked for, else by a few exchanges.

    Args:
        loads: [steps, layers, experts], summed over ranks; padding excluded.
        current: what the ranks hold; slots of dead ranks count as empty.
        alive: bool [ranks]; None for all.
        domain: ranks that share fast links, as in `MoveLimits`; 0 for all.

    An expert without a copy is given one whatever the traffic and the gain are; then only what that needs is moved if
    traffic is too low to plan on.
    """
    alive = np.ones(current.ranks, np.bool_) if alive is None else alive
    held = current.without(alive)
    check_loads(loads, held)
    lost = bool((held.copies() == 0).any())
    floored = with_floor(grouped(loads, settings.most_steps), settings.floor)
    if len(loads) == 0 or float(loads.sum(-1).mean()) < settings.least_tokens:
        if not lost:
            return Decision(held, False, "too few tokens", 1.0, 1.0)
        return Decision(plan_swaps(floored, held, alive, MoveLimits(swaps=0)), True, "repair", 1.0, 1.0)
    if not (settings.incremental or several(domain, current.ranks)):
        target = plan_full(floored, current, alive, settings.refine)
    else:
        target = plan_swaps(floored, held, alive, replace(settings.limits, domain=domain))
    after = moe_lb(rank_loads(target, loads), alive)
    if lost:
        return Decision(target, True, "repair", float("inf"), after)
    before = moe_lb(rank_loads(held, loads), alive)
    if before - after < settings.least_gain * before:
        return Decision(held, False, "too little gain", before, after)
    return Decision(target, True, "gain", before, after)


def plan_full(loads: np.ndarray, current: Placement, alive: np.ndarray, refine: int = 64) -> Placement:
    """The best placement found for these loads (float32, above 0), its ranks and slots named so that least moves."""
    check_alive(alive, current.ranks)
    living = int(alive.sum())
    check_capacity(current.num_experts, living, current.slots)
    used = min(current.slots, current.num_experts)
    everyone = np.ones(living, np.bool_)
    result = np.full_like(current.experts, EMPTY)
    for layer in range(current.layers):
        mine = np.ascontiguousarray(loads[:, layer])
        table = pack(mine, replicate(mine, living * used, living), living, used)
        table = improve(table, mine, everyone, MoveLimits(swaps=refine, replace=False))
        padded = np.full((living, current.slots), EMPTY, np.int32)
        padded[:, :used] = table
        result[layer, alive] = relabel(padded, current.experts[layer, alive], current.num_experts)
    return Placement(result, current.num_experts)


def plan_swaps(loads: np.ndarray, current: Placement, alive: np.ndarray, limits: MoveLimits) -> Placement:
    """The present placement with lost experts placed again, then at most `limits.swaps` exchanges a layer."""
    held = current.without(alive)
    check_capacity(current.num_experts, int(alive.sum()), current.slots)
    result = held.experts.copy()
    loads = np.ones((1, *loads.shape[1:]), np.float32) if len(loads) == 0 else loads
    for layer in range(held.layers):
        mine = np.ascontiguousarray(loads[:, layer])
        result[layer] = improve(repair(result[layer], mine, alive), mine, alive, limits)
    return Placement(result, held.num_experts)


def grouped(loads: np.ndarray, most: int) -> np.ndarray:
    """At most `most` steps, each the sum of as many neighbours as that takes; the last may have fewer.

    Planning takes time by the step. Neighbours are summed since decode steps, whose windows are long, have the same
    requests for many steps, and few tokens each: a sum of them has less noise than one of them.
    """
    size = -(-len(loads) // most)
    return loads if size <= 1 else np.add.reduceat(loads, np.arange(0, len(loads), size), axis=0)


def with_floor(loads: np.ndarray, floor: float) -> np.ndarray:
    """float32 loads of at least `floor` times the mean expert's: an expert not seen yet is not free."""
    mean = loads.mean(-1, keepdims=True)
    return np.maximum(loads, np.maximum(mean, 1.0) * floor).astype(np.float32)


def check_loads(loads: np.ndarray, placement: Placement) -> None:
    """Loads have to fit the placement, finite and not negative."""
    shape = (placement.layers, placement.num_experts)
    require(
        loads.ndim == 3 and loads.shape[1:] == shape, "loads", list(loads.shape), f"[steps, {shape[0]}, {shape[1]}]"
    )
    require(bool(np.isfinite(loads).all()), "loads", "NaN or infinity", "finite counts")
    require(loads.size == 0 or float(loads.min()) >= 0, "loads", "negative counts", "0 or more")
