"""A worker process of a service: `python -m orchestrator.service.process`.

The first line of its standard input is a `WorkerSpec` as JSON; the end of its standard input ends it at once. SIGTERM
drains it, a second one ends it. Exit status: 0 it has left, 1 it failed, 2 its spec or config cannot be used, 3 its
parent is gone. What is to be said of a failure goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from typing import Any

from orchestrator.service.process.parent import die_with_parent, on_terminate, watch_parent

CANNOT_START = 2
_LAST = 30.0  # seconds that leaving may take once nothing is held any more
_log = logging.getLogger("orchestrator.service.process")


class _Terminator:
    """Ends the process at once until there is a shell, which is drained instead."""

    def __init__(self) -> None:
        self.shell: Any = None
        self.grace = 0.0

    def __call__(self) -> None:
        if self.shell is None:
            _end(0)
        self.shell.leave(self.grace)


def main() -> None:
    """Does not return: the process ends with its status, whatever threads there still are."""
    die_with_parent()
    terminator = _Terminator()
    on_terminate(terminator)
    status = 1
    try:
        line = sys.stdin.buffer.readline()
        watch_parent(sys.stdin.buffer)
        status = run(line, terminator)
    except BaseException as error:  # also an exit that something in a library asks for
        _log.critical("ended by %s", type(error).__name__, exc_info=True)
    _end(status)


def run(line: bytes, terminator: _Terminator) -> int:
    """Run the worker that a spec describes until it has left; the exit status."""
    try:
        values = json.loads(line)
        threads = max(1, int(values["threads"]))
    except (ValueError, TypeError, KeyError) as error:
        print(f"process: standard input begins with no spec ({error!r})", file=sys.stderr)
        return CANNOT_START
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before PyTorch is imported: the engine's thread takes it from there
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {values.get('name', '')} %(levelname)s %(name)s: %(message)s"
    )
    import msgspec

    from orchestrator.service.messages import WantPixels, WorkerSpec
    from orchestrator.service.post.post import Post
    from orchestrator.service.process.build import build
    from orchestrator.service.process.events import ShellEvents
    from orchestrator.service.process.shell import Shell

    try:
        spec = msgspec.json.decode(line, type=WorkerSpec)
        secret = bytes.fromhex(spec.secret)
    except ValueError as error:
        _log.error("spec: %s", error)
        return CANNOT_START
    _use(threads, spec.role != "router")
    terminator.grace = spec.config.cluster.grace
    names = (spec.name, "router") if spec.role == "router" else (spec.name,)
    events = ShellEvents()

    def inbox(to: str, message: Any) -> None:
        if to in names:
            events.message(message)

    def ask(entry: str, digest: str) -> None:
        post.send(entry, WantPixels(digest, spec.name))

    try:
        post = Post(inbox, secret=secret, host=spec.host)
        built = build(spec, ask)
    except (ValueError, OSError) as error:
        _log.error("cannot start: %s", error, exc_info=True)
        return CANNOT_START
    with built.closers:
        shell = terminator.shell = Shell(built.core, post, built.port, spec, events=events, numbers=built.numbers)
        _log.info("life %d works at %s", spec.life, post.address)
        try:
            status = shell.run()
        finally:
            watchdog = threading.Timer(_LAST, os._exit, (1,))
            watchdog.daemon = True
            watchdog.start()
            shell.close()
    return status


def _use(threads: int, engine: bool) -> None:
    sys.setswitchinterval(0.001)  # the post and the shell answer while the engine's thread runs Python
    if engine:
        from orchestrator.commands.threads import use_threads

        use_threads(threads)


def _end(status: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
