"""The shared block store of a service: real index, collector, leases and erasure code over disks that fail."""

from orchestrator.simulate.store.disk import Disk, DiskFull
from orchestrator.simulate.store.store import SharedStore, StoredBlock, Unavailable, make_disks

__all__ = ["Disk", "DiskFull", "SharedStore", "StoredBlock", "Unavailable", "make_disks"]
