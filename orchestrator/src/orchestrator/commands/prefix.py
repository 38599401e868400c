"""The options of the prefix cache: its mode, the folder behind it, and other servers' windows."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from orchestrator.commands.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine
    from orchestrator.engine.prefix_plan import PrefixMode

_HOST_BLOCKS = 2048  # 233 MB with production rows
_SHARED_MEMORY = Path("/dev/shm")
NO_BUDGETS: Mapping[str, float] = MappingProxyType({})


def prefix_mode_of(text: str | None, reproducible: bool, stored: bool = False) -> PrefixMode:
    """A mode as `EngineConfig.prefix_cache` takes it; `stored` says that blocks outlive the server.

    Where none is named: no tokens may change with what is cached in reproducible mode, which "exact" keeps, and
    "canonical" for blocks whose windows are gone.
    """
    from orchestrator.engine.prefix_plan import PREFIX_MODES

    if text is None:
        return "bounded" if not reproducible else "canonical" if stored else "exact"
    for mode in PREFIX_MODES:
        if text == mode:
            return mode
    raise UsageError(f"--prefix-cache: got {text!r}, allowed are {', '.join(PREFIX_MODES)}")


@contextmanager
def stored_prefixes(
    engine: Engine, folder: Path | None, gigabytes: float, model: Path, budgets: Mapping[str, float] = NO_BUDGETS
) -> Iterator[None]:
    """Blocks of this engine's prefix cache are kept in `folder` and come back from there, by an I/O process.

    `budgets` are GiB that a tenant (`SamplingParams.cache_salt`) may take of the folder's `gigabytes`.
    """
    if folder is None or engine.prefix is None:
        yield
        return
    from orchestrator.cache.client import CacheClient
    from orchestrator.cache.io.process import IoProcess
    from orchestrator.cache.layout import BlockLayout
    from orchestrator.engine.prefix_tier import PrefixTier

    layout = BlockLayout.of(engine.model.config, quantised=engine.cache.quantised)
    prefix = engine.prefix
    name_model(engine, model)
    work = Path(tempfile.mkdtemp(prefix="fathom-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
    policy = {"budgets": {tenant: int(share * 2**30) for tenant, share in budgets.items()}}
    store = {"kind": "embedded", "folder": str(folder), "capacity": int(gigabytes * 2**30), "policy": policy}
    process = IoProcess(work, store, layout.tag, layout.block_bytes, _HOST_BLOCKS, tied=True)
    before = signal.signal(signal.SIGTERM, _leave) if threading.current_thread() is threading.main_thread() else None
    try:
        try:
            process.start()
        except (RuntimeError, OSError) as error:
            raise UsageError(f"--cache-folder: {folder} cannot be used ({error})", code=1) from None
        prefix.tier = PrefixTier(CacheClient(process.socket_path, process.arena_path, prefix.scope))
        try:
            yield
        finally:
            prefix.tier.close()
    finally:
        process.stop()
        shutil.rmtree(work, ignore_errors=True)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def shared_windows(engine: Engine, listen: str | None, peers: tuple[str, ...], model: Path) -> Iterator[None]:
    """Window snapshots of this engine are given to other servers at `listen`, and asked of those at `peers`.

    Addresses are HOST:PORT. Whoever reaches `listen` can read.
    """
    if engine.prefix is None or (listen is None and not peers):
        yield
        return
    from orchestrator.cache.window_peer import TcpPeer, WindowServer

    name_model(engine, model)
    server = None
    if listen is not None:
        try:
            server = WindowServer(engine.prefix.windows, *address_of("--window-listen", listen))
        except OSError as error:
            raise UsageError(f"--window-listen: {listen} cannot be used ({error})", code=1) from None
    if peers:
        engine.prefix.ask([TcpPeer(*address_of("--window-peer", peer)) for peer in peers])
    try:
        yield
    finally:
        if server is not None:
            server.close()
        if engine.prefix.pulls is not None:
            engine.prefix.pulls.close()


def address_of(option: str, text: str) -> tuple[str, int]:
    """HOST:PORT, an IPv6 host in brackets. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{option}: got {text!r}, allowed is HOST:PORT with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def name_model(engine: Engine, model: Path) -> None:
    """Have keys say which checkpoint and machine rows are of, once for an engine."""
    from kernel_core.backend import available_isas
    from orchestrator.evaluate.results import checkpoint_digest

    prefix = engine.prefix
    if prefix is not None and not prefix.scope.model:
        machine = f"{engine.config.dense} {engine.config.device} {available_isas()[-1]}"
        prefix.name_model(bytes.fromhex(checkpoint_digest(model)), machine)


def _leave(number: int, frame: object) -> None:
    """The server raises SIGTERM again once it has closed; that must not end this process before the I/O process."""
    raise SystemExit(0)
