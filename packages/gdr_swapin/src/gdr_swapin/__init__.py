"""Layer-wise swap-in of KV cache blocks from host memory into paged pools."""

from gdr_swapin.arena import HostArena
from gdr_swapin.layout import V41, BlockLayout, SourceLayer
from gdr_swapin.loader import Loader
from gdr_swapin.options import METHODS, Options
from gdr_swapin.pools import PagedPools
from gdr_swapin.region import region_bytes
from gdr_swapin.transfer import Busy, SwapInError, Transfer

__all__ = [
    "METHODS",
    "V41",
    "BlockLayout",
    "Busy",
    "HostArena",
    "Loader",
    "Options",
    "PagedPools",
    "SourceLayer",
    "SwapInError",
    "Transfer",
    "region_bytes",
]
__version__ = "0.1.0"
