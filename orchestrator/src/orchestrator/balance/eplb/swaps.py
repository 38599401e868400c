"""Better placements by few moves: exchange two slots, or make a spare copy of one expert one of another.

A move is judged by the sum over the window's steps of the peak rank's tokens. Only moves that take load off a rank that
often sets the peak are looked at: no other can lower it much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernel_core.check import require
from orchestrator.balance.eplb.domains import Domain, check_domain, domains
from orchestrator.balance.eplb.layer_state import LayerState

_HOTTEST = 8  # ranks that set the peak most, tried in this order before giving up
_PARTNERS = 16  # ranks to exchange with: those with the least load in the steps whose peak the hot rank sets
_HEAVIEST, _SPARE = 2, 12  # experts of a hot rank that may get a copy, and lightest spare copies that may make room


@dataclass(frozen=True)
class MoveLimits:
    """What an incremental plan may move in a layer.

    Attributes:
        swaps: exchanges of two slots and replacements of one.
        per_rank: slots of one rank that may change; what its spare buffers hold.
        domain: ranks that share fast links: so many in a row, or each rank's domain by number; 0 where all do.
        across: most of the swaps that may cross between domains.
        gain: relative gain, of the objective, that a swap needs.
        gain_across: what one across domains needs.
        replace: whether numbers of copies may change.
    """

    swaps: int = 32
    per_rank: int = 1 << 30
    domain: Domain = 0
    across: int = 8
    gain: float = 1e-4
    gain_across: float = 2e-3
    replace: bool = True

    def __post_init__(self) -> None:
        for name in ("swaps", "per_rank", "across"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        check_domain("domain", self.domain)
        for name in ("gain", "gain_across"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "0 to below 1")


@dataclass(frozen=True)
class _Swap:
    peaks: float  # the objective afterwards
    rank: int
    slot: int
    other: int  # the hot rank; -1 for a replacement
    there: int  # its slot, or the expert that comes
    far: bool


def improve(table: np.ndarray, loads: np.ndarray, alive: np.ndarray, limits: MoveLimits) -> np.ndarray:
    """A layer's table after at most `limits.swaps` moves, each the best that the first of the hot ranks has.

    Args:
        table: int32 [ranks, slots] with every expert; slots of ranks that are not alive are empty.
        loads: float32 [steps, experts].
        alive: bool [ranks].

    Returns: int32 [ranks, slots], every expert at least once and none twice on a rank.
    """
    state = LayerState(table, loads)
    ranks = len(table)
    changed = np.zeros(ranks, np.int64)
    group = domains(limits.domain, ranks)
    across = 0
    for _ in range(limits.swaps):
        swap = _next(state, alive & (changed < limits.per_rank), group, limits, across < limits.across)
        if swap is None:
            break
        if swap.other < 0:
            state.replace(swap.rank, swap.slot, swap.there)
        else:
            state.exchange(swap.other, swap.there, swap.rank, swap.slot)
            changed[swap.other] += 1
        changed[swap.rank] += 1
        across += int(swap.far)
    return state.table


def _next(state: LayerState, free: np.ndarray, group: np.ndarray, limits: MoveLimits, far: bool) -> _Swap | None:
    """The best move of the first hot rank that has one; `free` bool [ranks] may change, `far` allows other domains."""
    now = state.peaks()
    setter = state.received.argmax(0)
    times = np.bincount(setter, minlength=len(state.table))
    top = np.argpartition(-state.received, min(2, len(state.table) - 1), axis=0)[:3]
    for hot in np.argsort(-times, kind="stable")[:_HOTTEST].tolist():
        if times[hot] == 0:
            break
        partners = np.flatnonzero(free & (far | (group == group[hot])) & (np.arange(len(free)) != hot))
        mine = setter == hot
        meets = state.received[partners][:, mine].sum(1)
        partners = partners[np.argsort(meets, kind="stable")[:_PARTNERS]]
        found = _exchanges(state, top, hot, partners, group) if free[hot] and len(partners) else []
        if limits.replace:
            found += _replacements(state, hot, mine, free, group, far)
        paying = [s for s in found if now - s.peaks > (limits.gain_across if s.far else limits.gain) * now]
        if paying:
            return min(paying, key=lambda s: s.peaks)
    return None


def _exchanges(state: LayerState, top: np.ndarray, hot: int, others: np.ndarray, group: np.ndarray) -> list[_Swap]:
    """The best exchange of a slot of `hot` with each of the other ranks. `top` [3, steps] are the highest ranks."""
    mine, theirs = state.table[hot], state.table[others]
    heights = np.take_along_axis(state.received, top, 0)
    # What the peak is without the two ranks: the highest of the three highest that is neither.
    rest = np.where((top != hot)[:, None] & (top[:, None] != others[None, :, None]), heights[:, None], 0.0).max(0)
    delta = state.shares[theirs][None] - state.shares[mine][:, None, None]  # [mine, others, theirs, steps]
    after = np.maximum(state.received[hot] + delta, state.received[others][:, None] - delta)
    value = np.maximum(after, rest[:, None], out=after).sum(-1)
    illegal = state.has[hot][theirs][None] | state.has[others][:, mine].T[:, :, None] | (mine == -1)[:, None, None]
    value[illegal] = np.inf
    flat = value.transpose(1, 0, 2).reshape(len(others), -1)
    at = flat.argmin(1)
    slots = state.table.shape[1]
    return [
        _Swap(float(flat[i, j]), rank, j % slots, hot, j // slots, bool(group[rank] != group[hot]))
        for i, (rank, j) in enumerate(zip(others.tolist(), at.tolist(), strict=True))
        if np.isfinite(flat[i, j])
    ]


def _replacements(
    state: LayerState, hot: int, mine: np.ndarray, free: np.ndarray, group: np.ndarray, far: bool
) -> list[_Swap]:
    """Copies of the heaviest experts of `hot`, in its steps `mine`, in place of the lightest spare copies elsewhere."""
    held = state.table[hot][state.table[hot] >= 0]
    weight = state.shares[held][:, mine].sum(1)
    spare = np.append(state.counts > 1, True)[state.table] & free[:, None]
    found = []
    for expert in held[np.argsort(-weight, kind="stable")[:_HEAVIEST]].tolist():
        near = np.isin(group, group[state.has[:, expert]])
        ranks, slots = np.nonzero(spare & ~state.has[:, expert][:, None] & (far | near)[:, None])
        gone = state.table[ranks, slots]
        light = np.argsort(state.shares[gone].sum(1) + state.received[ranks][:, mine].sum(1), kind="stable")[:_SPARE]
        for rank, slot in zip(ranks[light].tolist(), slots[light].tolist(), strict=True):
            peaks = state.peaks_if_replaced(rank, slot, expert)
            found.append(_Swap(peaks, rank, slot, -1, expert, not near[rank]))
    return found
