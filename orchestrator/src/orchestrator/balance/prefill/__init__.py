"""Prefill: what a step costs, which engine takes which prompt, what goes into a step. No I/O, no clock."""

from orchestrator.balance.prefill.bins import BinSettings, PrefillBins, Prompt, key_function, shares
from orchestrator.balance.prefill.cost import BLOCK, PUBLISHED, Chunk, PrefillCost
from orchestrator.balance.prefill.fit import CostFit
from orchestrator.balance.prefill.order import turn
from orchestrator.balance.prefill.quota import Quota, Waiting, agree, fill, plan

__all__ = [
    "BLOCK",
    "PUBLISHED",
    "BinSettings",
    "Chunk",
    "CostFit",
    "PrefillBins",
    "PrefillCost",
    "Prompt",
    "Quota",
    "Waiting",
    "agree",
    "fill",
    "key_function",
    "plan",
    "shares",
    "turn",
]
