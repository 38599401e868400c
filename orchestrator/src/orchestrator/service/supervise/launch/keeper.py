"""What runs in an actor of Ray: it starts a worker process on its node, keeps its standard input, and tells of its end.

Methods come from several threads. The process is started by a thread that stays until it has ended, as the kernel
may end a child with the thread that started it. When the actor dies, the child's standard input ends, and so does it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import msgspec

from orchestrator.service.messages import WorkerSpec
from orchestrator.service.supervise.launch.child import Child


class _Life:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.status, self.tail = 0, ""


class Keeper:
    """One child at a time. `remote`: workers listen at the address of their node, not at the one of their spec."""

    def __init__(self, remote: bool) -> None:
        self._remote = remote
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._lives: dict[int, _Life] = {}

    def start(self, line: bytes, command: Sequence[str]) -> tuple[int, str]:
        """Start the process of this spec (JSON), after the end of the one before; (pid, node).

        Raises OSError where that is not possible.
        """
        from ray.util import get_node_ip_address

        spec = msgspec.json.decode(line, type=WorkerSpec)
        node = get_node_ip_address()
        spec = msgspec.structs.replace(spec, node=spec.node or node, host=node if self._remote else spec.host)
        with self._lock:
            if self._child is not None:
                self._child.end()
            life = self._lives[spec.life] = _Life()
            for old in sorted(self._lives)[:-4]:
                del self._lives[old]
            started: SimpleQueue[Child | Exception] = SimpleQueue()
            threading.Thread(target=self._run, args=(spec, command, life, started), daemon=True).start()
            child = started.get(timeout=30)
            if isinstance(child, Exception):
                raise child
            self._child = child
            return child.pid, spec.node

    def _run(
        self, spec: WorkerSpec, command: Sequence[str], life: _Life, started: SimpleQueue[Child | Exception]
    ) -> None:
        try:
            child = Child(spec, command)
        except Exception as error:
            started.put(error)
            return
        started.put(child)
        life.status = child.process.wait()
        life.tail = child.tail()
        life.ended.set()

    def watch(self, life: int) -> tuple[int, str]:
        """Wait for the end of a process: (its return code, the last lines of its log)."""
        found = self._lives[life]
        found.ended.wait()
        return found.status, found.tail

    def terminate(self) -> None:
        child = self._child
        if child is not None:
            child.terminate()

    def kill(self) -> None:
        child = self._child
        if child is not None:
            child.kill()

    def tail(self, lines: int) -> str:
        child = self._child
        return "" if child is None else child.tail(lines)


class RouterActor(Keeper):
    """Ray's tools show actors by their class: one a role."""


class EncoderActor(Keeper):
    """See `RouterActor`."""


class PrefillActor(Keeper):
    """See `RouterActor`."""


class DecodeActor(Keeper):
    """See `RouterActor`."""


ACTORS: dict[str, type[Keeper]] = {
    "router": RouterActor,
    "encoder": EncoderActor,
    "prefill": PrefillActor,
    "decode": DecodeActor,
}
