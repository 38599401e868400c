"""Scaling: what each role wants, and what is started and stopped for it. No I/O, no clock."""

from orchestrator.balance.scaling.scaler import Change, ScalePolicy, Scaler, trade
from orchestrator.balance.scaling.want import Rate, decode_want, encoder_want, prefill_want

__all__ = ["Change", "Rate", "ScalePolicy", "Scaler", "decode_want", "encoder_want", "prefill_want", "trade"]
