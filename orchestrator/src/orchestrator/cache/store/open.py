"""A store from a description, so that another process can open it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import Store


def open_store(spec: dict[str, Any], layout: bytes) -> Store:
    """Open what `spec` describes.

    Args:
        spec: `kind` is "embedded", "directory", "mooncake" or "erasure"; `policy` holds fields of `RetentionPolicy`,
            `ttl` by the classes' names; the rest are the arguments of that store, paths as text.
    """
    values = dict(spec)
    kind = values.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join(sorted(_KINDS))}")
    return _KINDS[kind](values, layout, read_policy(values.pop("policy", {})))


def read_policy(values: dict[str, Any]) -> RetentionPolicy:
    """A policy from plain values. Raises ValueError for fields that there are not."""
    known = {field.name for field in fields(RetentionPolicy)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"policy: got {', '.join(unknown)}, allowed are {', '.join(sorted(known))}")
    given = dict(values)
    if "ttl" in given:
        given["ttl"] = {Retention[name.upper()]: float(seconds) for name, seconds in given["ttl"].items()}
    return RetentionPolicy(**given)


def _embedded(values: dict[str, Any], layout: bytes, policy: RetentionPolicy) -> Store:
    from orchestrator.cache.store.embedded import EmbeddedStore

    return EmbeddedStore(Path(values.pop("folder")), layout, values.pop("capacity"), policy, **values)


def _directory(values: dict[str, Any], layout: bytes, policy: RetentionPolicy) -> Store:
    from orchestrator.cache.store.directory import DirectoryStore

    return DirectoryStore(Path(values.pop("folder")), layout, values.pop("capacity"), policy, **values)


def _mooncake(values: dict[str, Any], layout: bytes, policy: RetentionPolicy) -> Store:
    from orchestrator.cache.store.mooncake import MooncakeStore, connect

    capacity = values.pop("capacity")
    return MooncakeStore(connect(**values), layout, capacity, policy)


def _erasure(values: dict[str, Any], layout: bytes, policy: RetentionPolicy) -> Store:
    from orchestrator.cache.erasure.store import ErasureStore
    from orchestrator.cache.erasure.target_pool import TargetPool
    from orchestrator.cache.erasure.targets import DirectoryTarget, Target

    targets: list[Target] = []
    for target in values.pop("targets"):
        if "mooncake" in target:
            from orchestrator.cache.erasure.mooncake_target import MooncakeTarget
            from orchestrator.cache.store.mooncake import connect

            targets.append(MooncakeTarget(connect(**target["mooncake"]), target["name"], target.get("domain")))
        else:
            targets.append(DirectoryTarget(Path(target["folder"]), target.get("name"), target.get("domain")))
    pool = TargetPool(targets, **{name: values.pop(name) for name in ("ask", "timeout_s") if name in values})
    return ErasureStore(Path(values.pop("folder")), layout, pool, values.pop("capacity"), policy, **values)


_KINDS: dict[str, Callable[[dict[str, Any], bytes, RetentionPolicy], Store]] = {
    "directory": _directory,
    "embedded": _embedded,
    "erasure": _erasure,
    "mooncake": _mooncake,
}
