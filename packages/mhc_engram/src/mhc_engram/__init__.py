"""Hyper-connection mixing and Engram injection."""

from mhc_engram.hashing import engram_multipliers, engram_offsets, engram_primes, engram_table_rows
from mhc_engram.ops import (
    engram_gather,
    engram_inject,
    engram_rows,
    hc_coefficients,
    hc_mix,
    hc_step,
    hc_update,
)

__all__ = [
    "engram_gather",
    "engram_inject",
    "engram_multipliers",
    "engram_offsets",
    "engram_primes",
    "engram_rows",
    "engram_table_rows",
    "hc_coefficients",
    "hc_mix",
    "hc_step",
    "hc_update",
]
__version__ = "0.1.0"
