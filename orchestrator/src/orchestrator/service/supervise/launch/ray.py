"""Worker processes on the nodes of a Ray cluster: an actor for each, in a placement group. Ray is imported when asked.

An actor keeps its worker as a child, so a worker is the same process as without Ray. Ray restarts nothing: lives are
the supervisor's. The actors belong to this driver, and end with it however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.commands.errors import UsageError
from orchestrator.service.config import ServiceConfig
from orchestrator.service.messages import WorkerSpec
from orchestrator.service.supervise.launch.child import COMMAND
from orchestrator.service.supervise.launch.keeper import ACTORS
from orchestrator.service.supervise.launch.ray_handle import RayHandle

_INIT = 120.0  # seconds, on a machine that is busy
_PLACE = 60.0  # for the placement group
_MORE = 5.0  # for a bundle beyond it
_STORE = 80 << 20  # bytes of Ray's object store where it is started here: nothing of ours goes through it
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def import_ray() -> Any:
    """Raises UsageError where it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default a driver is ended when it has not reached Ray's control service for a minute. Ours goes on serving.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "1000000")
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UsageError(f'--cluster ray: Ray cannot be imported ({error}); pip install "ray>=2.58"') from None
    return ray


class RayLauncher:
    """See `Launcher`.

    Args:
        config: of the service. service: its id, in the names of actors. command: run for each worker.

    Raises:
        UsageError: there is no Ray, no cluster at that address, or no room in it.
    """

    def __init__(self, config: ServiceConfig, service: str, command: Sequence[str] = COMMAND) -> None:
        self.ray = import_ray()
        self.command = tuple(command)
        self._config, self._service = config, service
        self._lock = threading.Lock()
        self._keepers: dict[str, Any] = {}
        self._handles: list[RayHandle] = []
        self._groups: list[Any] = []
        self._made = 0
        self._remote = bool(config.cluster.address)
        self._closed = threading.Event()
        self._ours = not self.ray.is_initialized()
        where = f"the Ray cluster at {config.cluster.address}" if self._remote else "Ray on this machine"
        try:
            within(_INIT, self._begin, where, until=self._closed)
            within(_PLACE + 5, self._place, f"a placement group in {where}")
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """In a thread that is not the main one, where Ray leaves the handlers of signals alone; and one that stays,
        as what Ray starts here dies with the thread that started it."""
        cluster, ray = self._config.cluster, self.ray
        self.host = cluster.host
        if self._ours:
            options: dict[str, Any] = {"address": cluster.address or "local", "namespace": f"fathom-{self._service}"}
            if not self._remote:
                asked = math.ceil(cluster.cpus * (self._workers() + 1))
                options |= {"num_cpus": max(os.cpu_count() or 1, asked), "object_store_memory": _STORE}
                options |= {"include_dashboard": False}
            logging.getLogger("ray").setLevel(logging.ERROR)
            ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **options)
        if self._remote and cluster.host in _LOOPBACK:
            self.host = ray.util.get_node_ip_address()

    def _workers(self) -> int:
        roles = self._config.roles
        return 1 + roles.encoder + roles.prefill + roles.decode

    def _place(self) -> None:
        """One bundle a worker, the router's first."""
        bundles = [self._bundle("router"), *(self._bundle("") for _ in range(self._workers() - 1))]
        group = self.ray.util.placement_group(bundles, strategy=self._config.cluster.strategy)
        self._groups.append(group)
        if not group.wait(timeout_seconds=_PLACE):
            have = self.ray.cluster_resources()
            found = ", ".join(f"{have.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
            wanted = f"bundles {bundles} ({self._config.cluster.strategy})"
            raise UsageError(f"--cluster ray: no room for {wanted}; the cluster has {found}")

    def _bundle(self, role: str) -> dict[str, float]:
        cluster = self._config.cluster
        gpus = {"GPU": cluster.gpus} if cluster.gpus and role != "router" else {}
        return {"CPU": cluster.cpus, **gpus}

    def start(self, spec: WorkerSpec) -> RayHandle:
        handle = RayHandle(self, spec)
        with self._lock:
            self._handles = [h for h in self._handles if h.poll() is None]
            self._handles.append(handle)
        return handle

    # For handles, in their threads

    def keeper(self, spec: WorkerSpec) -> Any:
        """The actor of this name that lives, or a new one."""
        with self._lock:
            known = self._keepers.get(spec.name)
            extra = len(self._keepers) >= self._workers()
            self._made += 1
            number = self._made
        if known is not None:
            return known
        group = self._groups[0] if not extra else self._another(spec)
        bundle = self._bundle(spec.role)
        own = spec.role == "router" and not extra and bool(self._config.cluster.gpus)
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group,
            # Any bundle with room, so that one on a node that has died does not hold up a new life elsewhere.
            placement_group_bundle_index=0 if own else -1,
        )
        suffix = "" if number <= self._workers() else f"-{number}"  # Ray frees names of dead actors late
        actor = self.ray.remote(ACTORS[spec.role])
        keeper = actor.options(
            name=f"fathom-{self._service}-{spec.name}{suffix}",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            max_concurrency=8,
            scheduling_strategy=strategy,
        ).remote(self._remote)
        with self._lock:
            self._keepers[spec.name] = keeper
        return keeper

    def _another(self, spec: WorkerSpec) -> Any:
        """A bundle beyond the group, for who takes over from a worker that drains; else the group, once it has room."""
        group = self.ray.util.placement_group([self._bundle(spec.role)])
        if group.wait(timeout_seconds=_MORE):
            self._groups.append(group)
            return group
        self.ray.util.remove_placement_group(group)
        return self._groups[0]

    def forget(self, name: str, keeper: Any) -> None:
        """End an actor that is not needed any more, or not well."""
        with self._lock:
            if self._keepers.get(name) is keeper:
                del self._keepers[name]
        self.ray.kill(keeper, no_restart=True)

    def close(self) -> None:
        """End all actors and, where it was started here, Ray."""
        try:
            within(30.0, self._close, "Ray's end")
        except (UsageError, Exception) as error:
            logging.getLogger(__name__).warning("%s", error)
        self._closed.set()

    def _close(self) -> None:
        with self._lock:
            keepers, self._keepers = list(self._keepers.values()), {}
        killed = []
        for keeper in keepers:
            with contextlib.suppress(Exception):
                killed.append(keeper.kill.remote())
        with contextlib.suppress(Exception):
            self.ray.wait(killed, num_returns=len(killed), timeout=3.0) if killed else None
        for keeper in keepers:
            with contextlib.suppress(Exception):
                self.ray.kill(keeper, no_restart=True)
        groups, self._groups = self._groups, []
        for group in groups:
            with contextlib.suppress(Exception):
                self.ray.util.remove_placement_group(group)
        if self._ours and self.ray.is_initialized():
            self.ray.shutdown()


def within(seconds: float, work: Callable[[], Any], what: str, until: threading.Event | None = None) -> Any:
    """Run it in a thread of its own, that stays until an event; raises UsageError when it fails or takes too long."""
    result: list[Any] = []
    done = threading.Event()

    def run() -> None:
        try:
            result.append((work(), None))
        except BaseException as error:
            result.append((None, error))
        done.set()
        if until is not None:
            until.wait()

    threading.Thread(target=run, name=what, daemon=True).start()
    if not done.wait(seconds):
        raise UsageError(f"--cluster ray: {what} did not answer within {seconds:g} s", code=1)
    value, error = result[0]
    if isinstance(error, UsageError):
        raise error
    if error is not None:
        raise UsageError(f"--cluster ray: {what}: {type(error).__name__}: {error}", code=1) from error
    return value
