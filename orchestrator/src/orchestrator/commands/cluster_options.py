"""The options of `fathom serve` that make it a service of several processes, and the config that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.commands.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.commands.serve import ServeOptions
    from orchestrator.service.config import ServiceConfig

_LAUNCHERS = ("local", "ray")
_STORES = ("none", "embedded", "directory", "mooncake")
# Fields of the config's [engine] by options that mean the same.
_ENGINE = {
    "max_context": "max_model_len",
    "max_requests": "max_waiting",
    "max_num_seqs": "max_num_seqs",
    "num_blocks": "num_blocks",
    "device": "device",
    "threads": "threads",
}
_NOT_HERE = {
    "cache_folder": "give --store embedded:FOLDER, which all workers share",
    "cache_key_gb": "budgets of API keys are those of a single process",
    "window_listen": "the workers share their store instead",
    "window_peer": "the workers share their store instead",
}


@dataclass(frozen=True)
class ClusterOptions:
    """The options as given, None where they are not."""

    cluster: str | None = None
    prefill: int | None = None
    decode: int | None = None
    encoder: int | None = None
    prefill_ep: int | None = None
    decode_ep: int | None = None
    cluster_config: Path | None = None
    cluster_address: str | None = None
    store: str | None = None
    print_config: bool = False

    @property
    def wanted(self) -> bool:
        """Whether there is to be a service of several processes."""
        return self.cluster is not None or self.cluster_config is not None

    def refuse(self) -> None:
        """Raise UsageError for what means nothing without such a service."""
        for field in fields(self):
            if getattr(self, field.name) not in (None, False):
                raise UsageError(
                    f"{_option(field.name)}: means nothing in one process; give --cluster local or ray too"
                )


def config_of(options: ServeOptions, roles: ClusterOptions, given: frozenset[str]) -> ServiceConfig:
    """Options over the file over defaults.

    Args:
        given: names of the fields of `options` that were given.

    Raises:
        UsageError: something cannot be, or means nothing with a service of several processes.
    """
    from orchestrator.commands.prefix import prefix_mode_of
    from orchestrator.service.config import describe, from_values, load

    for name, instead in _NOT_HERE.items():
        if name in given:
            raise UsageError(f"{_option(name)}: cannot be used with --cluster; {instead}")
    try:
        values: dict[str, Any] = {} if roles.cluster_config is None else describe(load(roles.cluster_config))
        file = bool(values)
        engine = values.setdefault("engine", {})
        engine |= {to: getattr(options, name) for name, to in _ENGINE.items() if name in given}
        if "max_num_seqs" in given:
            engine["max_step_tokens"] = max(engine.get("max_step_tokens", 512), 8 * options.max_num_seqs)
        if "reproducible" in given:
            engine["dense"] = "fixed" if options.reproducible else "library"
        if "speculation" in given:
            from orchestrator.commands.speculation import speculation_of

            engine["speculation"] = speculation_of(options.speculation)
        if "image_cache_gb" in given:
            engine["image_bytes"] = int(options.image_cache_gb * 2**30)
        _set_roles(values, roles)
        _set_store(values, options, roles, given)
        if "prefix_cache" in given or not file:
            stored = values.get("store", {}).get("kind", "none") != "none"
            reproducible = engine.get("dense", "fixed") == "fixed"
            engine["prefix_cache"] = prefix_mode_of(options.prefix_cache, reproducible, stored)
        config = from_values(values, str(roles.cluster_config or "options"))
    except ValueError as error:
        raise UsageError(str(error)) from None
    _check(config)
    return config


def _set_roles(values: dict[str, Any], roles: ClusterOptions) -> None:
    counts = {name: getattr(roles, name) for name in ("prefill", "decode", "encoder", "prefill_ep", "decode_ep")}
    values.setdefault("roles", {}).update({name: count for name, count in counts.items() if count is not None})
    cluster = values.setdefault("cluster", {})
    if roles.cluster is not None:
        if roles.cluster not in _LAUNCHERS:
            raise UsageError(f"--cluster: got {roles.cluster!r}, allowed are {' and '.join(_LAUNCHERS)}")
        cluster["launcher"] = roles.cluster
    if roles.cluster_address is not None:
        cluster["address"] = roles.cluster_address
    if cluster.get("address") and cluster.get("launcher", "local") != "ray":
        raise UsageError("--cluster-address: means nothing on one machine; give --cluster ray too")


def _set_store(values: dict[str, Any], options: ServeOptions, roles: ClusterOptions, given: frozenset[str]) -> None:
    store = values.setdefault("store", {})
    if roles.store is not None:
        kind, _, folder = roles.store.partition(":")
        if kind not in _STORES:
            raise UsageError(f"--store: got {roles.store!r}, allowed are {', '.join(_STORES)}, or such a KIND:FOLDER")
        store["kind"] = kind
        if folder:
            store["folder"] = str(Path(folder).expanduser().resolve())
    if "cache_gb" in given:
        if store.get("kind", "none") == "none":
            raise UsageError("--cache-gb: got a size and no store, allowed only with --store")
        store["capacity_gb"] = options.cache_gb
    if store.get("kind", "none") == "directory" and not store.get("folder"):
        raise UsageError("--store: got directory without a folder, allowed is directory:FOLDER")


def _check(config: ServiceConfig) -> None:
    from orchestrator.roles.settings import Settings

    times: Mapping[str, Any] = config.times
    unknown = sorted(set(times) - {field.name for field in fields(Settings) if field.type != "str"})
    if unknown:
        raise UsageError(f"times: got {', '.join(unknown)}, which no role knows; docs/service.md lists them")
    try:
        Settings(**times)
    except ValueError as error:
        raise UsageError(f"times.{error}") from None
    if config.store.kind != "none" and config.engine.prefix_cache == "off":
        raise UsageError("--store: got a store and --prefix-cache off, allowed is one of them")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
