"""Which expert lies in which slot of which rank, in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernel_core.check import require

EMPTY = -1  # a slot without an expert: of a dead rank, or of a rank that has every expert already


@dataclass(frozen=True)
class Placement:
    """Experts by slot.

    Attributes:
        experts: int32 [layers, ranks, slots], the logical expert of each slot or `EMPTY`.
        num_experts: logical experts a layer.
    """

    experts: np.ndarray
    num_experts: int

    def __post_init__(self) -> None:
        e = self.experts
        require(e.ndim == 3 and e.size > 0, "experts", list(e.shape), "[layers, ranks, slots], not empty")
        require(e.dtype == np.int32, "experts", e.dtype, "int32")
        require(
            bool(((e >= EMPTY) & (e < self.num_experts)).all()),
            "experts",
            f"ids from {e.min()} to {e.max()}",
            f"{EMPTY} to num_experts - 1 ({self.num_experts - 1})",
        )

    @property
    def layers(self) -> int:
        return int(self.experts.shape[0])

    @property
    def ranks(self) -> int:
        return int(self.experts.shape[1])

    @property
    def slots(self) -> int:
        return int(self.experts.shape[2])

    def copies(self) -> np.ndarray:
        """int64 [layers, experts], how many slots hold each expert."""
        flat = self.experts.reshape(self.layers, -1)
        counts = [np.bincount(row[row != EMPTY], minlength=self.num_experts) for row in flat]
        return np.stack(counts)

    def without(self, alive: np.ndarray) -> Placement:
        """The same with the slots of ranks that are not alive (bool [ranks]) empty."""
        check_alive(alive, self.ranks)
        return Placement(np.where(alive[None, :, None], self.experts, np.int32(EMPTY)), self.num_experts)

    def check(self, alive: np.ndarray | None = None) -> None:
        """Raise `ValueError` unless every expert lies on a rank that is alive, none twice on one rank, none on a dead.

        Args:
            alive: bool [ranks]; None for all.
        """
        missing = np.argwhere(self.copies() == 0)
        require(len(missing) == 0, "experts", f"none of (layer, expert) {missing[:3].tolist()}", "each at least once")
        ordered = np.sort(self.experts, axis=2)
        twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != EMPTY)
        require(
            not twice.any(), "experts", f"twice on (layer, rank) {np.argwhere(twice)[:3, :2].tolist()}", "once a rank"
        )
        if alive is not None:
            check_alive(alive, self.ranks)
            held = (self.experts[:, ~alive] != EMPTY).any()
            require(not held, "experts", "some on dead ranks", "ranks that are alive")


def check_alive(alive: np.ndarray, ranks: int) -> None:
    """`alive` has to be bool [ranks] with at least one rank."""
    fits = alive.dtype == np.bool_ and alive.shape == (ranks,) and bool(alive.any())
    require(
        fits, "alive", f"{alive.dtype} {list(alive.shape)}, {int(alive.sum())} alive", f"bool [{ranks}], one or more"
    )


def check_capacity(num_experts: int, ranks: int, slots: int) -> None:
    """Every expert needs a slot; nothing has to divide anything."""
    require(min(num_experts, ranks, slots) > 0, "num_experts, ranks, slots", (num_experts, ranks, slots), "1 or more")
    require(
        ranks * slots >= num_experts, "slots", f"{slots} on {ranks} ranks", f"slots x ranks >= {num_experts} experts"
    )


def smallest_slots(num_experts: int, ranks: int) -> int:
    """Slots a rank that `ranks` ranks need to hold every expert once."""
    return -(-num_experts // ranks)


def initial(layers: int, num_experts: int, ranks: int, slots: int, alive: np.ndarray | None = None) -> Placement:
    """Before anything was counted: slot i of all slots in order holds expert i mod experts, on the ranks alive."""
    alive = np.ones(ranks, np.bool_) if alive is None else alive
    check_alive(alive, ranks)
    living = int(alive.sum())
    check_capacity(num_experts, living, slots)
    used = min(slots, num_experts)  # consecutive ids, so none comes twice on a rank
    table = np.full((ranks, slots), EMPTY, np.int32)
    table[np.ix_(alive, np.arange(slots) < used)] = (
        np.arange(living * used, dtype=np.int32).reshape(living, used) % num_experts
    )
    return Placement(np.repeat(table[None], layers, 0), num_experts)
