"""The order of prompts that wait for prefill: first come, first served, except that long ones give way a little."""

from __future__ import annotations

import math

from kernel_core.check import require


def turn(arrived: float, cost: float, yields: float) -> float:
    """What a queue of prompts sorts by, ascending.

    Args:
        arrived: seconds. cost: seconds that the prompt's missed tokens take.
        yields: seconds of arrival for which a prompt gives way, for each second that it takes; 0 is first come, first
            served.

    A prompt is passed only by those that come within `yields * cost` seconds after it, so none waits for ever. Where
    few prompts hold much of the work, as with coding agents, the others no longer queue behind them.
    """
    require(math.isfinite(cost) and cost >= 0, "cost", cost, "finite, 0 or more, seconds")
    require(math.isfinite(yields) and yields >= 0, "yields", yields, "finite, 0 or more")
    return arrived + yields * cost
