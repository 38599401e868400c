"""Cores and engines of each role, as the service builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.balance.admission import Limits
from orchestrator.balance.prefill import BinSettings, PrefillCost, Quota
from orchestrator.balance.scaling import ScalePolicy
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.roles.decode import Decode, DecodeOptions
from orchestrator.roles.encoder import Encoder
from orchestrator.roles.entry import Entry
from orchestrator.roles.messages import Role
from orchestrator.roles.prefill import Prefill, PrefillOptions
from orchestrator.roles.router.core import Router
from orchestrator.roles.router.policy import RouterPolicy
from orchestrator.roles.rules import Rules
from orchestrator.roles.scaler import Scaler, ScalerOptions
from orchestrator.roles.settings import Settings
from orchestrator.simulate.machine import Core
from orchestrator.simulate.scenario import Shape
from orchestrator.simulate.toy.decode import DecodeEngine
from orchestrator.simulate.toy.encoder import SECONDS_A_PATCH, EncoderEngine
from orchestrator.simulate.toy.engine import EngineShape, Site, ToyEngine
from orchestrator.simulate.toy.prefill import LAYOUT, PrefillEngine

ROLES = ("entry", "router", "scaler", "encoder", "prefill", "decode")


def make_engine(role: str, name: str, shape: Shape, site: Site, emit: Callable[[Any], None]) -> ToyEngine | None:
    """A new engine for a worker, None for a party without one."""
    if role == "prefill":
        return PrefillEngine(name, shape.prefill, site, emit)
    if role == "decode":
        return DecodeEngine(name, shape.decode, site, emit)
    if role == "encoder":
        return EncoderEngine(name, EngineShape(ranks=1), site, emit)
    return None


def make_core(role: str, name: str, incarnation: int, settings: Settings, rules: Rules, shape: Shape) -> Core:
    """A new core. Raises ValueError for an unknown role."""
    if role == "entry":
        return Entry(name, settings, rules)
    if role == "router":
        return Router(incarnation, router_policy(shape), settings, rules)
    if role == "prefill":
        return Prefill(name, incarnation, prefill_options(shape.prefill), settings, rules)
    if role == "decode":
        return Decode(name, decode_options(shape.decode), incarnation, settings, rules)
    if role == "encoder":
        return Encoder(name, incarnation, None, settings, rules)
    if role == "scaler":
        return Scaler(scaler_options(shape), settings, rules)
    raise ValueError(f"role: got {role!r}, allowed are {', '.join(ROLES)}")


def pool_tokens(shape: Shape) -> int:
    """Tokens that the smallest engine holds."""
    return min(shape.prefill.blocks, shape.decode.blocks) * BLOCK_TOKENS


def router_policy(shape: Shape) -> RouterPolicy:
    """The router's policy for engines of this shape; bins are cut where the workload's prompts lie."""
    pool = pool_tokens(shape)
    return RouterPolicy(
        limits=Limits(context=pool, pool=pool, target=20.0, most_waiting=200),
        cost=_cost(shape.prefill),
        bins=BinSettings(edges=(256, 768, 1536)),
        drafts=shape.decode.drafts,
    )


def prefill_options(shape: EngineShape) -> PrefillOptions:
    """Options of a prefill worker over an engine of this shape."""
    return PrefillOptions(cost=_cost(shape), quota=Quota(tokens=shape.chunk), ranks=shape.ranks)


def decode_options(shape: EngineShape) -> DecodeOptions:
    """Options of a decode worker over an engine of this shape."""
    return DecodeOptions(tokens=shape.blocks * BLOCK_TOKENS, rows=shape.rows, layout=LAYOUT, ranks=shape.ranks)


def scaler_options(shape: Shape) -> ScalerOptions:
    """A scaler that decides often and goes up and down by one worker around what is there at the start."""
    counts: dict[Role, int] = {"encoder": shape.encoders, "prefill": shape.prefills, "decode": shape.decodes}
    policies: dict[Role, ScalePolicy] = {
        role: ScalePolicy(least=1, most=count + 1, up_periods=1, down_periods=2, cool=1)
        for role, count in counts.items()
    }
    return ScalerOptions(
        tokens_s=1 / shape.prefill.token,
        patches_s=1 / SECONDS_A_PATCH,
        rows=shape.decode.rows,
        pool=shape.decode.blocks * BLOCK_TOKENS,
        policies=policies,
        period=15.0,
        spares=1,
    )


def _cost(shape: EngineShape) -> PrefillCost:
    return PrefillCost(launch=shape.launch, token=shape.token)
