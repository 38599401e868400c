"""Expert-parallel load balancing: which rank holds which experts, planned from the counts of single steps.

`LoadWindow` counts, `plan` decides, `Coordinator` and `RankSlots` carry a plan out between the steps of a running
engine, `RoutingTable` tells dispatch where to send. Nothing here does I/O or touches weights (docs/eplb.md).
"""

from orchestrator.balance.eplb.coordinator import Coordinator
from orchestrator.balance.eplb.metric import moe_lb, rank_loads
from orchestrator.balance.eplb.placement import Placement, initial, smallest_slots
from orchestrator.balance.eplb.planner import Decision, plan
from orchestrator.balance.eplb.rank_slots import RankSlots
from orchestrator.balance.eplb.routing import RoutingTable, routing_table, routing_tables
from orchestrator.balance.eplb.settings import DECODE, PREFILL, EplbSettings
from orchestrator.balance.eplb.swaps import MoveLimits
from orchestrator.balance.eplb.window import LoadWindow, merge

__all__ = [
    "DECODE",
    "PREFILL",
    "Coordinator",
    "Decision",
    "EplbSettings",
    "LoadWindow",
    "MoveLimits",
    "Placement",
    "RankSlots",
    "RoutingTable",
    "initial",
    "merge",
    "moe_lb",
    "plan",
    "rank_loads",
    "routing_table",
    "routing_tables",
    "smallest_slots",
]
