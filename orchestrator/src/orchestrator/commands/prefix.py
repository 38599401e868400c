"""The `--prefix-cache` and `--cache-folder` options."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine
    from orchestrator.engine.prefix_plan import PrefixMode

_HOST_BLOCKS = 2048  # 233 MB with production rows
_SHARED_MEMORY = Path("/dev/shm")


def prefix_mode_of(text: str | None, device: str, reproducible: bool, stored: bool = False) -> PrefixMode:
    """A mode as `EngineConfig.prefix_cache` takes it; `stored` says that blocks outlive the server.

    Where none is named: no tokens may change with what is cached in reproducible mode, which "exact" keeps, and
    "canonical" for blocks whose windows are gone. On a GPU prefix reuse has not been run yet, so it is left off there.
    """
    from orchestrator.engine.prefix_plan import PREFIX_MODES

    if text is None:
        if device != "cpu":
            return "off"
        return "bounded" if not reproducible else "canonical" if stored else "exact"
    for mode in PREFIX_MODES:
        if text == mode:
            return mode
    raise UsageError(f"--prefix-cache: got {text!r}, allowed are {', '.join(PREFIX_MODES)}")


@contextmanager
def stored_prefixes(engine: Engine, folder: Path | None, gigabytes: float, model: Path) -> Iterator[None]:
    """Blocks of this engine's prefix cache are kept in `folder` and come back from there, by an I/O process."""
    if folder is None or engine.prefix is None:
        yield
        return
    from kernel_core.backend import available_isas
    from orchestrator.cache.client import CacheClient
    from orchestrator.cache.io.process import IoProcess
    from orchestrator.cache.layout import BlockLayout
    from orchestrator.engine.prefix_tier import PrefixTier
    from orchestrator.evaluate.results import checkpoint_digest

    layout = BlockLayout.of(engine.model.config, quantised=engine.cache.quantised)
    prefix = engine.prefix
    machine = f"{engine.config.dense} {engine.config.device} {available_isas()[-1]}"
    prefix.name_model(bytes.fromhex(checkpoint_digest(model)), machine)
    work = Path(tempfile.mkdtemp(prefix="fathom-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
    store = {"kind": "embedded", "folder": str(folder), "capacity": int(gigabytes * 2**30)}
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
            prefix.tier.client.close()
    finally:
        process.stop()
        shutil.rmtree(work, ignore_errors=True)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: object) -> None:
    """The server raises SIGTERM again once it has closed; that must not end this process before the I/O process."""
    raise SystemExit(0)
