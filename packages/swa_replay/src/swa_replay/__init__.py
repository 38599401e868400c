"""Sliding-window attention, window rings and bounded replay."""

from swa_replay.ops import store_window, window_attention
from swa_replay.replay import (
    DecoderTailPlan,
    EncoderReplayPlan,
    exact_tail_rows,
    kept_rows,
    plan_decoder_tail,
    plan_encoder_replay,
    ring_rows,
    tail_rows,
    usable_hit,
)

__all__ = [
    "DecoderTailPlan",
    "EncoderReplayPlan",
    "exact_tail_rows",
    "kept_rows",
    "plan_decoder_tail",
    "plan_encoder_replay",
    "ring_rows",
    "store_window",
    "tail_rows",
    "usable_hit",
    "window_attention",
]
__version__ = "0.1.0"
