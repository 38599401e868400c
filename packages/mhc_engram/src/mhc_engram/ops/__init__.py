"""Public functions: checks, documentation, choice of the backend."""

from mhc_engram.ops.engram import engram_gather, engram_inject, engram_rows
from mhc_engram.ops.hyper_connection import hc_coefficients, hc_mix, hc_step, hc_update

__all__ = ["engram_gather", "engram_inject", "engram_rows", "hc_coefficients", "hc_mix", "hc_step", "hc_update"]
