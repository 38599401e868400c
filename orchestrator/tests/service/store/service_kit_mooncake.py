"""A master of Mooncake Store that tests start, kill and start again."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import subprocess
import time
from pathlib import Path


def why_no_mooncake() -> str:
    """Why it cannot run here, "" where it can."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        return "mooncake is not installed: pip install mooncake-transfer-engine-non-cuda"
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake's wheel cannot be loaded here ({error}); Debian: apt-get install libibverbs1"
    return ""


class Master:
    """Nothing in it survives its end: it knows where blocks are, machines lend the memory."""

    def __init__(self, log: Path) -> None:
        self.log, self.rpc, self.metrics = log, _free_port(), _free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> dict[str, object]:
        """For `StoreSettings.options`."""
        return {"master": f"127.0.0.1:{self.rpc}", "segment_bytes": 32 << 20, "buffer_bytes": 16 << 20}

    def start(self) -> str:
        """Returns why it does not run, "" where it does."""
        found = importlib.util.find_spec("mooncake")
        assert found is not None and found.submodule_search_locations
        command = [
            Path(found.submodule_search_locations[0]) / "mooncake_master", f"-rpc_port={self.rpc}",
            "-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1", f"-metrics_port={self.metrics}", "-logtostderr",
            "-default_kv_lease_ttl=300",
        ]  # fmt: skip
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        end = time.monotonic() + 60
        while not self._listens():
            if self.process.poll() is not None:
                return f"mooncake_master does not run here: {self.log.read_text(errors='replace')[-300:]}"
            assert time.monotonic() < end, self.log.read_text(errors="replace")[-2000:]
            time.sleep(0.02)
        return ""

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.process.wait(60)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.rpc)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
