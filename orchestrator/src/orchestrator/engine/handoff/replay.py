"""Where a request starts whose global rows came without windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_core.check import require
from orchestrator.engine.sequence import Sequence
from orchestrator.model.config import ModelConfig
from swa_replay import EncoderReplayPlan, plan_decoder_tail

if TYPE_CHECKING:
    from orchestrator.engine.prefix_cache import PrefixCache


def plan_replay(written: int, length: int, window: int, draft_length: int) -> EncoderReplayPlan:
    """Feed the last tokens of `length` again, of which the first `written` have their global rows.

    The decoder layers run as many tokens as they keep of a prompt (140 for the model), and the layers below them at
    least a window before what is missing, so the position behind the last one sees whole windows. Up to 140 tokens the
    replay is exact, beyond that it is the approximation of docs/model.md, Bounded replay.
    """
    require(length > 0, "length", length, "1 or more")
    require(0 <= written <= length, "written", written, f"0 to {length}")
    tail = plan_decoder_tail(length, window, draft_length).start
    return EncoderReplayPlan(written, length, window, max(0, min(written - window, tail)), write_floor=written)


def begin_replay(sequence: Sequence, written: int, config: ModelConfig, prefix: PrefixCache | None) -> None:
    """Have a request compute its windows again; its first `written` tokens have their global rows.

    What follows may differ a little from what a prompt gives by itself, so others may share it in "bounded" mode only.
    """
    plan = plan_replay(written, len(sequence.tokens), config.sliding_window, config.draft_length)
    sequence.computed = sequence.encoder_lower = plan.start
    sequence.global_floor = plan.write_floor
    sequence.decoder_lower = max(sequence.decoder_lower, plan.lower)
    sequence.stops = []
    sequence.shares = sequence.shares and prefix is not None and (prefix.mode == "bounded" or plan.start == 0)
