"""One visible block in the index, and its place among its siblings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Entry:
    """A visible block.

    `atime` and `expiry` are those of uses that ended at this block; a use also counts for every block before it, which
    `BlockIndex` settles when the block becomes the last of its chain. `place` is whatever the owner of the bytes needs
    to find them.
    """

    __slots__ = (
        "_first", "_next", "_previous", "atime", "depth", "expiry", "generation", "key", "leases", "parent",
        "parent_key", "place", "size", "tenant", "visible",
    )  # fmt: skip

    def __init__(
        self, key: bytes, parent_key: bytes, parent: Entry | None, size: int, generation: int, place: Any, tenant: str
    ) -> None:
        self.key, self.parent, self.size, self.place, self.tenant = key, parent, size, place, tenant
        self.parent_key = parent_key if parent is None else parent.key
        self.generation = generation
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.atime = self.expiry = float("-inf")
        self.leases = 0
        self.visible = True
        self._first: Entry | None = None
        self._next: Entry | None = None
        self._previous: Entry | None = None
        if parent is not None:
            head = parent._first
            self._next = head
            if head is not None:
                head._previous = self
            parent._first = self

    @property
    def is_leaf(self) -> bool:
        """No visible block follows."""
        return self._first is None

    def children(self) -> Iterator[Entry]:
        """Visible blocks that follow directly."""
        child = self._first
        while child is not None:
            yield child
            child = child._next

    def unlink(self) -> None:
        """Leave the parent's list of children."""
        if self._previous is not None:
            self._previous._next = self._next
        elif self.parent is not None and self.parent._first is self:
            self.parent._first = self._next
        if self._next is not None:
            self._next._previous = self._previous
        self._next = self._previous = None
