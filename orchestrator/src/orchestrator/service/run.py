"""A service from its config to its end: the front's parts in this process, the workers by a launcher."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.commands.errors import UsageError
from orchestrator.model.config import ModelConfig
from orchestrator.server import create_app
from orchestrator.server.settings import ServerSettings
from orchestrator.service.config import ServiceConfig
from orchestrator.service.front.engine import ClusterEngine
from orchestrator.service.front.metrics import ClusterCollector
from orchestrator.service.front.routes import add_cluster_routes
from orchestrator.service.messages import ProcessRole, WorkerSpec
from orchestrator.service.post.post import Post
from orchestrator.service.supervise.launch.base import Launcher
from orchestrator.service.supervise.members import names_of
from orchestrator.service.supervise.signals import Signals, StoppableServer
from orchestrator.service.supervise.supervisor import Supervisor
from orchestrator.service.supervise.thread import SupervisorThread
from orchestrator.text.tokenizer import Tokenizer
from orchestrator.vision import ImageLimits, ImageReader

_LEAVE = 20.0  # seconds that workers without requests have for leaving
_LOG_LINES = 20


@dataclass
class Front:
    """The parts of the front that run before HTTP does."""

    config: ServiceConfig
    launcher: Launcher
    post: Post
    engine: ClusterEngine
    supervisor: SupervisorThread
    folder: Path

    def status(self) -> dict[str, Any]:
        return {**self.supervisor.status(), "entry": {**self.engine.status(), "post": dict(self.post.counts)}}

    def close(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Have the workers leave, at once when `hurry` says so, and end all; whether nobody had to be forced."""
        self.engine.close()
        try:
            well = self.supervisor.end(0.0, _LEAVE, hurry)
        except TimeoutError:
            well = False
        self.launcher.close()
        self.supervisor.close()
        self.post.close()
        return well


def make_launcher(config: ServiceConfig, service: str) -> Launcher:
    """Raises UsageError."""
    if config.cluster.launcher == "ray":
        from orchestrator.service.supervise.launch.ray import RayLauncher

        return RayLauncher(config, service)
    from orchestrator.service.supervise.launch.local import LocalLauncher

    return LocalLauncher(config.cluster.host)


def start_front(config: ServiceConfig, model: ModelConfig, tokenizer: Tokenizer, folder: Path) -> Front:
    """Start everything but HTTP; the workers are on their way when it returns.

    Args:
        config: `model.path` is absolute. folder: of this service on this machine.

    Raises:
        UsageError: Ray is asked for and cannot be used. ValueError: something in the config cannot be.
    """
    secret, service = secrets.token_bytes(32), secrets.token_hex(4)
    with ExitStack() as undo:
        launcher = make_launcher(config, service)
        undo.callback(launcher.close)

        def inbox(to: str, message: Any) -> None:
            if to == "entry":
                engine.loop.take(message)
            else:
                supervisor.receive(message)

        post = Post(inbox, secret=secret, host=launcher.host)
        undo.callback(post.close)
        engine = ClusterEngine(post, model, tokenizer, config)
        threads = threads_of(config)

        def spec(name: str, role: ProcessRole, life: int) -> WorkerSpec:
            number = 1 if role == "router" else threads
            return WorkerSpec(name, role, life, config, launcher.host, post.address, secret.hex(), number, str(folder))

        def make(now: float) -> Supervisor:
            return Supervisor(config, launcher, spec, send=post.send, know=post.know, address=post.address, now=now)

        def trouble(why: str | None) -> None:
            engine.failed = why

        supervisor = SupervisorThread(make, trouble)
        supervisor.start()
        engine.start()
        undo.pop_all()
    return Front(config, launcher, post, engine, supervisor, folder)


def threads_of(config: ServiceConfig) -> int:
    """Threads of a worker with an engine. On one machine they share its cores."""
    if config.engine.threads:
        return config.engine.threads
    roles = config.roles
    engines = roles.encoder + roles.prefill * roles.prefill_ep + roles.decode * roles.decode_ep
    return max(1, (os.cpu_count() or 1) // engines)


def wait_until_ready(front: Front, signals: Signals) -> None:
    """Until every role has a worker that is up. Raises UsageError that says what is in the way."""
    until = time.monotonic() + front.config.cluster.loading
    while True:
        if signals.count:
            raise UsageError("interrupted while starting", code=130)
        ready, broken = front.supervisor.ask(lambda supervisor, now: (supervisor.ready, supervisor.broken_start))
        if ready:
            return
        if broken is not None:
            log = "\n".join(broken.last_words.splitlines()[-_LOG_LINES:])
            raise UsageError(f"{broken.name} does not start: {broken.last_exit}\n{log}", code=1)
        if time.monotonic() > until:
            raise UsageError(_too_slow(front), code=1)
        time.sleep(0.05)


def _too_slow(front: Front) -> str:
    def late(supervisor: Supervisor, now: float) -> str:
        members = [member for member in supervisor.members.values() if member.state != "up"]
        tails = [(member.name, member.handle.tail(5) if member.handle else member.last_exit) for member in members]
        return "\n".join(f"{name}:\n{text}" for name, text in tails)

    limit = front.config.cluster.loading
    return f"The service was not up after {limit:g} s (cluster.loading). Not up:\n{front.supervisor.ask(late)}"


def serve_service(
    config: ServiceConfig,
    settings: ServerSettings,
    tokenizer: Tokenizer,
    listening: socket.socket,
    *,
    image_limits: ImageLimits | None = None,
    log_level: str = "info",
) -> int:
    """Serve until interrupted; the exit status, 0 where all ended well.

    Args:
        settings: of the HTTP server; its `max_context` is set here. listening: the open socket.
    """
    path = Path(config.model.path)
    model = ModelConfig.from_hf(json.loads((path / "config.json").read_text(encoding="utf-8")))
    folder = Path(tempfile.mkdtemp(prefix="fathom-"))
    began = time.monotonic()
    workers = names_of(config.roles)
    with Signals() as signals:
        print(
            f"Starting {', '.join(name for name, _ in workers)} (logs in {folder / 'logs'})",
            file=sys.stderr,
            flush=True,
        )
        front = start_front(config, model, tokenizer, folder)
        well = False
        images: ImageReader | None = None
        try:
            wait_until_ready(front, signals)
            engine = front.engine
            settings = settings.model_copy(update={"max_context": engine.context})
            if engine.takes_images:
                images = ImageReader(model, image_limits or ImageLimits())
            collectors = [ClusterCollector(front.status)]
            app = create_app(
                engine, tokenizer, settings, grammars=engine.grammars, images=images, collectors=collectors
            )
            add_cluster_routes(app, settings, status=front.status, drain=front.supervisor.drain)
            server = StoppableServer(app, settings, signals, engine.stop_taking, config.cluster.grace, log_level)
            took = time.monotonic() - began
            url = f"http://{_shown(settings.host)}:{listening.getsockname()[1]}"
            what = f"docs: {url}/docs, context {engine.context} tokens, {len(workers)} workers, up in {took:.1f} s"
            print(f"Serving {settings.model_name} on {url} ({what})", file=sys.stderr, flush=True)
            server.run(sockets=[listening])
            well = True
        finally:
            well = front.close(lambda: signals.count > 1) and well
            if images is not None:
                images.close()
            if well:
                shutil.rmtree(folder, ignore_errors=True)
    if not well:
        print(f"Some workers had to be ended; their logs are in {folder / 'logs'}", file=sys.stderr)
    return 0 if well else 1


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
