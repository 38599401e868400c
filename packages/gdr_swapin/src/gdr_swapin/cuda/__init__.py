"""Ways to load blocks into pools on an NVIDIA GPU. Importing this needs no GPU."""

from __future__ import annotations

from gdr_swapin.arena import HostArena
from gdr_swapin.cuda.base import CudaEngine
from gdr_swapin.cuda.device import Device, TorchDevice
from gdr_swapin.options import Options
from gdr_swapin.pools import PagedPools


def make_engine(
    method: str, arena: HostArena, pools: PagedPools, options: Options, device: Device | None = None
) -> CudaEngine:
    """The engine of one of the methods for a GPU; `device` stands in for it in tests."""
    from gdr_swapin.cuda.copying import CopyEngine
    from gdr_swapin.cuda.gathering import GatherEngine
    from gdr_swapin.cuda.mixing import MixedEngine
    from gdr_swapin.cuda.staging import StageEngine

    device = device or TorchDevice(pools.device)
    if method == "copy":
        return CopyEngine(arena, pools, options, device)
    if method == "mixed":
        return MixedEngine(arena, pools, options, device)
    if method == "stage":
        return StageEngine(arena, pools, options, device)
    return GatherEngine(arena, pools, options, device, plain=method == "gather_plain")
