"""The one file that describes a service: roles, engines, store, transfer, launcher. TOML or JSON.

Everything has a default; unknown names are refused. `describe` gives what `load` reads.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from kernel_core.check import require

LauncherKind = Literal["local", "ray"]
StoreKind = Literal["none", "embedded", "directory", "mooncake"]
LinkKind = Literal["auto", "local", "shared", "tcp", "mooncake"]


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """`path`: folder of the checkpoint, the same on every machine."""

    path: str = ""


class Roles(Struct, frozen=True, forbid_unknown_fields=True):
    """How many workers of each role, and how many ranks an expert-parallel group of such a worker has (1: none)."""

    prefill: int = 1
    decode: int = 1
    encoder: int = 0
    prefill_ep: int = 1
    decode_ep: int = 1

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "prefill_ep", "decode_ep"):
            require(getattr(self, name) >= 1, f"roles.{name}", getattr(self, name), "1 or more")
        require(self.encoder >= 0, "roles.encoder", self.encoder, "0 or more")


class EngineSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of `EngineConfig` by their names, for every worker. `threads` of torch a worker; 0 shares the cores."""

    max_num_seqs: int = 16
    max_waiting: int = 256
    num_blocks: int = 512
    max_model_len: int | None = None
    max_step_tokens: int = 512
    chunk_tokens: int = 512
    dense: str = "fixed"
    device: str = "cpu"
    speculation: str | int = "scheduled"
    prefix_cache: str = "exact"
    window_bytes: int = 1 << 28
    image_bytes: int = 1 << 28
    threads: int = 0


class StoreSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The store of cache blocks that all workers share.

    Attributes:
        kind: "none"; "embedded": one process a machine, for its workers; "directory": a folder that is mounted
            everywhere; "mooncake": a Mooncake Store.
        folder: of "embedded" and "directory". capacity_gb: of the store. host_blocks: of the tier in host memory.
        options: further arguments of that store, as `cache.store.open` takes them (for Mooncake its addresses).
    """

    kind: StoreKind = "none"
    folder: str = ""
    capacity_gb: float = 4.0
    host_blocks: int = 512
    options: dict[str, Any] = field(default_factory=dict)


class TransferSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`kind`: "auto" takes shared memory on one machine and TCP between two. `overlap`: parts go ahead while the prompt
    is computed."""

    kind: LinkKind = "auto"
    overlap: bool = True


class ClusterSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    launcher: plain processes of this machine, or actors of Ray. address: of a Ray cluster; empty starts one here.
    host: at which the front's parties listen for workers. strategy: of Ray's placement group.
    cpus, gpus: that a worker's actor asks Ray for. silent, stalled: seconds without a word, or without progress
        while there is work, after which a worker is ended and started anew. loading: seconds that a start may take.
    grace: seconds that a drained worker's requests have before they move. restarts: of one worker within an hour.
    """

    launcher: LauncherKind = "local"
    address: str = ""
    host: str = "127.0.0.1"
    strategy: str = "PACK"
    cpus: float = 0.1
    gpus: float = 0.0
    silent: float = 10.0
    stalled: float = 60.0
    loading: float = 300.0
    grace: float = 60.0
    restarts: int = 100

    def __post_init__(self) -> None:
        for name in ("silent", "stalled", "loading"):
            require(getattr(self, name) > 0, f"cluster.{name}", getattr(self, name), "above 0")
        require(self.grace >= 0, "cluster.grace", self.grace, "0 or more")
        allowed = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
        require(self.strategy in allowed, "cluster.strategy", self.strategy, ", ".join(allowed))


class ServiceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`times`: fields of `roles.Settings` by name, where the defaults do not do."""

    model: Model = Model()
    roles: Roles = Roles()
    engine: EngineSettings = EngineSettings()
    store: StoreSettings = StoreSettings()
    transfer: TransferSettings = TransferSettings()
    cluster: ClusterSettings = ClusterSettings()
    times: dict[str, float] = field(default_factory=dict)


def load(path: Path) -> ServiceConfig:
    """Read a file that ends in .toml or .json. Raises ValueError that names what is wrong and where."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    return from_values(values, str(path))


def from_values(values: dict[str, Any], where: str = "config") -> ServiceConfig:
    """Raises ValueError."""
    try:
        return msgspec.convert(values, ServiceConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


def describe(config: ServiceConfig) -> dict[str, Any]:
    """Plain values, defaults included."""
    return msgspec.to_builtins(config)
