"""A rank as a process: its engine, and the port that the role's commands go through."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from orchestrator.cluster.options import EpOptions
from orchestrator.cluster.process import Load
from orchestrator.cluster.worker import Worker, failure
from orchestrator.service.ep.rank_desk import RankDesk
from orchestrator.service.messages import WorkerSpec
from orchestrator.service.process.parent import die_with_parent

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine
    from orchestrator.service.ep.rank_port import RankPort


class MakePort(Protocol):
    """Called in the rank's process, which it is sent to, with the engine. What it opens, `closers` closes."""

    def __call__(self, engine: Engine, closers: ExitStack) -> RankPort: ...


@dataclass(frozen=True)
class StreamingRank:
    """A port as a role over one engine has it: states by ticket from this very process, the store of all workers."""

    spec: WorkerSpec

    def __call__(self, engine: Engine, closers: ExitStack) -> RankPort:
        from orchestrator.service.ep.rank_port import RankPort

        spec, folder = self.spec, Path(self.spec.folder)
        if spec.config.store.kind != "none":
            from orchestrator.service.store.shared import shared_store

            closers.enter_context(shared_store(spec.config, engine, Path(spec.config.model.path), folder))
        node = spec.node or spec.host
        port = RankPort(engine, host=spec.host, node=node, settings=spec.config.transfer, folder=folder)
        closers.callback(port.close)
        return port


@dataclass(frozen=True)
class RankSetup:
    """`load` reads the model, `port` stands before its engine."""

    load: Load
    port: MakePort


def main(place: int, options: EpOptions, setup: RankSetup, mailbox: Connection) -> None:
    """Serve until told to leave, or until the role's process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the role's process decides what an interrupt means
    _leave_the_forking_to_the_role()
    die_with_parent()
    torch.set_num_threads(options.threads)
    try:
        if options.engine.device == "cuda":
            torch.cuda.set_device(place)
        model, tokenizer, source = setup.load(options)
        with ExitStack() as closers:
            desk = lambda engine, mailbox: RankDesk(setup.port(engine, closers), mailbox)  # noqa: E731
            Worker(place, options, model, tokenizer, source, mailbox, desk=desk).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # nobody is left to serve
    except Exception as error:
        mailbox.send(failure(error))
        raise


def _leave_the_forking_to_the_role() -> None:
    """The process that forks ranks, their parent, lives while anybody could ask it to: now the role's process only.

    So the kernel ends all ranks once that is gone, those too that are stopped or wait for each other.
    """
    server: Any = forkserver._forkserver
    descriptor, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    if descriptor is not None:
        os.close(descriptor)
