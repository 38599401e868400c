"""The core of a worker process and the port to its engine, from what the process was started with."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.balance.admission import Limits
from orchestrator.balance.prefill.cost import PUBLISHED, PrefillCost
from orchestrator.balance.prefill.quota import Quota
from orchestrator.model.config import BLOCK_TOKENS, ModelConfig
from orchestrator.roles import (
    Decode,
    DecodeOptions,
    Encoder,
    EncoderOptions,
    Prefill,
    PrefillOptions,
    Router,
    RouterPolicy,
    Settings,
)
from orchestrator.roles.core import Core
from orchestrator.service.config import EngineSettings, ServiceConfig
from orchestrator.service.messages import WorkerSpec
from orchestrator.service.times import role_settings

if TYPE_CHECKING:
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine

# The small models on one to two cores of a server CPU read 2,000 to 4,000 tokens of prompt a second.
CPU_COST = PrefillCost(launch=20e-3, token=0.35e-3)
CPU_QUOTA = Quota(tokens=2048)  # at 200 tokens a second a step still takes only half of `Settings.answer`
_PATIENCE = 5.0

Ask = Callable[[str, str], None]


@dataclass
class Built:
    """`port` is None for a router. `numbers`: what its engine counts. Close `closers` when the core has left."""

    core: Core
    port: Any
    numbers: Callable[[], dict[str, float]]
    closers: ExitStack


def build(spec: WorkerSpec, ask: Ask) -> Built:
    """Load what this role needs. `ask(entry, digest)` asks a front for an image's pixels.

    Raises:
        ValueError: the service's config does not fit the model, this machine or this build.
        OSError: the model cannot be read.
    """
    settings = role_settings(spec.config)
    if spec.role == "router":
        return Built(Router(spec.life, policy_of(spec.config), settings), None, dict, ExitStack())
    with ExitStack() as stack:
        made = _encoder(spec, settings, ask, stack) if spec.role == "encoder" else _engine(spec, settings, stack)
        gc.collect()
        gc.freeze()  # the model lives as long as the process: no collection needs to walk it between steps
        return Built(*made, stack.pop_all())


def settings_of(engine: EngineSettings) -> EngineConfig:
    """Raises ValueError."""
    from orchestrator.engine.config import EngineConfig

    names = set(EngineConfig.__dataclass_fields__) & set(EngineSettings.__struct_fields__)
    values = {name: getattr(engine, name) for name in names}
    values["max_step_tokens"] = max(engine.max_step_tokens, engine.max_num_seqs)
    return EngineConfig(**values)


def policy_of(config: ServiceConfig) -> RouterPolicy:
    """The router's limits, without an engine: what the engines of this config hold.

    A request is refused as late where its first token would not come in half of the time that its entry has for it.
    """
    engine, times = config.engine, role_settings(config)
    return RouterPolicy(
        limits=Limits(
            context=_context(config),
            pool=engine.num_blocks * BLOCK_TOKENS,
            target=times.first_token / 2 / _PATIENCE,
            patience=_PATIENCE,
            most_waiting=engine.max_waiting,
        ),
        cost=cost_of(engine.device),
    )


def cost_of(device: str) -> PrefillCost:
    """Of prefill steps, the same at the router and at the workers, since rooms are told in its seconds."""
    return CPU_COST if device == "cpu" else PUBLISHED


def _context(config: ServiceConfig) -> int:
    """As `EngineConfig.context`, without PyTorch. Raises ValueError and OSError."""
    file = Path(config.model.path) / "config.json"
    model = ModelConfig.from_hf(json.loads(file.read_text(encoding="utf-8")))
    most = min(model.max_position_embeddings, config.engine.num_blocks * BLOCK_TOKENS)
    given = config.engine.max_model_len
    if given is not None and not 0 < given <= most:
        raise ValueError(f"engine.max_model_len: got {given}, allowed is 1 to {most} with this model and cache")
    return given or most


# Workers with an engine


def _engine(spec: WorkerSpec, settings: Settings, stack: ExitStack) -> tuple[Core, Any, Callable[[], dict[str, float]]]:
    config, prefill = spec.config, spec.role == "prefill"
    ranks = config.roles.prefill_ep if prefill else config.roles.decode_ep
    if ranks > 1:
        from orchestrator.service.ep.port import EpPort

        port: Any = EpPort(spec, ranks=ranks)
        numbers = port.numbers
    else:
        engine = _load(spec)
        folder, store = Path(spec.folder), None
        if config.store.kind != "none":
            from orchestrator.service.store.shared import shared_store

            store = stack.enter_context(shared_store(config, engine, Path(config.model.path), folder, host=spec.host))
        from orchestrator.service.ports.streaming import StreamingPort

        room = config.engine.num_blocks * BLOCK_TOKENS
        port = StreamingPort(
            engine,
            host=spec.host,
            node=spec.node or spec.host,
            settings=config.transfer,
            folder=folder,
            room=0 if prefill else room,
        )

        def numbers() -> dict[str, float]:
            return _counted(engine) | port.numbers() | ({} if store is None else store.numbers())

    stack.callback(port.close)
    return _core(spec, settings, port, ranks), port, numbers


def _core(spec: WorkerSpec, settings: Settings, port: Any, ranks: int) -> Core:
    engine, node = spec.config.engine, spec.node or spec.host
    if spec.role == "prefill":
        quota = CPU_QUOTA if engine.device == "cpu" else Quota()
        options = PrefillOptions(
            cost=cost_of(engine.device), quota=quota, most=2 * ranks * engine.max_num_seqs, ranks=ranks
        )
        return Prefill(spec.name, spec.life, options, settings, node=node)
    tokens, rows = ranks * engine.num_blocks * BLOCK_TOKENS, ranks * engine.max_num_seqs
    return Decode(spec.name, DecodeOptions(tokens, rows, port.layout, ranks), spec.life, settings, node=node)


def _load(spec: WorkerSpec) -> Engine:
    from orchestrator.commands.device import check_device
    from orchestrator.commands.errors import UsageError
    from orchestrator.engine.curve_cache import use_curve
    from orchestrator.engine.engine import Engine
    from orchestrator.model.load import load_model
    from orchestrator.text import load_tokenizer

    config, folder = settings_of(spec.config.engine), Path(spec.config.model.path)
    try:
        check_device(config.device)
    except UsageError as error:
        raise ValueError(str(error)) from None
    model = load_model(folder, dense=config.dense, device=config.device, vision=False)  # encoders are elsewhere
    config.context(model.config)
    engine = Engine(model, load_tokenizer(folder), config)
    if spec.role == "decode":
        use_curve(engine, Path(spec.folder) / "curves")
    return engine


def _counted(engine: Engine) -> dict[str, float]:
    stats = engine.stats
    return {
        "engine steps": float(stats.steps),
        "prompt tokens": float(stats.prompt_tokens),
        "cached tokens": float(stats.cached_tokens),
        "output tokens": float(stats.output_tokens),
        "preemptions": float(stats.preemptions),
        "step seconds": stats.step_seconds,
    }


# Encoders


def _encoder(
    spec: WorkerSpec, settings: Settings, ask: Ask, stack: ExitStack
) -> tuple[Core, Any, Callable[[], dict[str, float]]]:
    from orchestrator.service.ports.encoder import EncoderPort

    port: Any = EncoderPort(Path(spec.config.model.path), ask, device=spec.config.engine.device)
    stack.callback(port.close)
    options = EncoderOptions(kept=spec.config.engine.image_bytes)
    core = Encoder(spec.name, spec.life, options, settings, node=spec.node or spec.host)
    return core, port, port.numbers
