"""An expert-parallel group of processes as the engine of one prefill or decode role.

The role's core gives commands as to one engine; a request's go to the rank that has it. docs/expert_parallel.md, Inside
a role.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from orchestrator.cluster.messages import Did, Do
from orchestrator.cluster.process import FromFolder
from orchestrator.model.checkpoint.reader import Checkpoint
from orchestrator.roles.engine_port import (
    Began,
    Begin,
    DecodeDone,
    Drop,
    Dropped,
    EngineEvent,
    Expect,
    Export,
    Exported,
    Load,
    PrefillDone,
    RankDied,
    Reform,
    Reformed,
    Rename,
    RunDecode,
    RunPrefill,
    Thaw,
    Withdraw,
)
from orchestrator.service.ep.group import Group
from orchestrator.service.ep.options import ep_options, tokens_of
from orchestrator.service.ep.process import MakePort, RankSetup, StreamingRank
from orchestrator.service.ep.ranks import RankProcesses
from orchestrator.service.ep.routes import Routes
from orchestrator.service.ep.runs import Runs
from orchestrator.service.messages import WorkerSpec
from orchestrator.service.store.shared import check_store
from orchestrator.service.times import role_settings

_log = logging.getLogger(__name__)
_TICK = 0.05  # seconds
_OF_ANSWER = 0.6
_GRACE = 10.0  # seconds that ranks have to leave, and to write to the store what they owe it


class EpPort:
    """`EnginePort` over ranks that are processes of this machine. `do` and `answers` from any thread; neither waits.

    Attributes:
        layout: tag of the states that it makes and takes. ranks: of a whole group.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        ranks: int,
        timeout: float | None = None,
        plan: str = "off",
        port: MakePort | None = None,
    ) -> None:
        """Start the ranks, and wait until they serve, no longer than twice `cluster.loading`.

        Args:
            spec: of the role's process, whose threads the ranks share.
            timeout: seconds that a rank waits for another; by default so long that the core still waits for the group,
                since that starts all of its ranks anew when it gives up. plan: when experts are planned anew.
            port: makes each rank's port.

        Raises:
            ValueError: settings that cannot be, ranks that cannot hold the model's experts, or no model.
            RuntimeError: the ranks do not serve.
        """
        config, model_folder = spec.config, spec.config.model.path
        if timeout is None:
            timeout = _OF_ANSWER * role_settings(config).answer
        model = Checkpoint(model_folder).config
        threads = max(1, spec.threads // ranks)
        options = ep_options(config.engine, ranks, threads=threads, timeout=timeout, plan=plan).resolved(model)
        options.engine.context(model)
        if config.store.kind != "none":
            check_store(config.store)
        self.ranks, self._engine = ranks, options.engine
        setup = RankSetup(FromFolder(model_folder, vision=False), port or StreamingRank(spec))
        self._processes = RankProcesses(options, model, setup)
        self._lock = threading.Lock()
        self._answers: list[EngineEvent] = []
        self._routes, self._runs = Routes(), Runs()
        self._reform: Reform | None = None
        self._ready, self._closing, self._failed = threading.Event(), False, False
        self._listener: Callable[[], None] = lambda: None
        loading = config.cluster.loading
        self._group = Group(self._processes, options, model.n_routed_experts, loading, self._died, self._formed)
        self._thread = threading.Thread(target=self._serve, name="expert-parallel group", daemon=True)
        self._thread.start()
        self._ready.wait(2 * loading + timeout)
        if self._group.phase != "serving":
            why = self._group.why or f"no group after {2 * loading:g} s"
            self.close()
            raise RuntimeError(f"expert-parallel group of {ranks}: {why}")
        self.layout = self._group.layout

    @property
    def room(self) -> int:
        """Tokens of cache of all ranks that live."""
        return self._group.ranks * tokens_of(self._engine)

    @property
    def rows(self) -> int:
        """Requests that run at once, over all ranks that live."""
        return self._group.ranks * self._engine.max_num_seqs

    def listen(self, listener: Callable[[], None]) -> None:
        """Have it called, from any thread, when there are answers."""
        self._listener = listener

    def do(self, command: Any) -> None:
        """Commands but `Reform` are ignored while no group serves: nobody waits for their answers."""
        with self._lock:
            if isinstance(command, Reform):
                self._answers.clear()
                self._reform = command
                if self._failed:
                    self._answers.append(Reformed(command.number, 0, 0.0, 0, self._group.why))
                return
            if self._reform is not None or self._group.phase != "serving":
                return
            handler = _HANDLERS.get(type(command))
            if handler is None:
                raise TypeError(f"command: got {type(command).__name__}, which a group of ranks has no use for")
            before = len(self._answers)
            handler(self, command)
            answered = len(self._answers) > before
        if answered:
            self._listener()

    def answers(self) -> list[EngineEvent]:
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def numbers(self) -> dict[str, float]:
        """Of the group, and of each rank: its process, and requests and blocks that it held when it answered last."""
        group = self._group
        found = {"ranks": group.ranks, "group": group.number, "epoch": group.epoch, "steps": 0}
        for rank, (process, pid) in enumerate(zip(group.members, group.pids(), strict=True)):
            said = group.said.get(process)
            found[f"rank{rank}_pid"] = pid
            found[f"rank{rank}_requests"] = 0 if said is None else said.requests
            found[f"rank{rank}_blocks"] = 0 if said is None else said.blocks
            found["steps"] = max(found["steps"], 0 if said is None else said.steps)
        return {name: float(value) for name, value in found.items()}

    def close(self) -> None:
        """End all ranks; what they offer or fetch comes to nothing. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._thread.join()
        self._processes.close(_GRACE if self._group.phase == "serving" else 0.0)

    # Commands

    def _send(self, process: int, command: Any) -> None:
        self._processes.send(process, Do(self._group.number, command))

    def _begin(self, c: Begin) -> None:
        self._send(self._routes.give((c.request, c.epoch), len(c.spec.prompt) + len(c.output)), c)

    def _expect(self, c: Expect) -> None:
        self._send(self._routes.give((c.request, c.epoch), 0), c)

    def _load(self, c: Load) -> None:
        self._send(self._routes.give((c.request, c.epoch), len(c.spec.prompt) + c.spec.max_tokens), c)

    def _rename(self, c: Rename) -> None:
        process = self._routes.rename((c.request, c.epoch), (c.request, c.new_epoch))
        if process is not None:
            self._send(process, c)

    def _thaw(self, c: Thaw) -> None:
        process = self._routes.find((c.request, c.epoch))
        if process is not None:
            self._send(process, c)

    def _export(self, c: Export) -> None:
        process = self._routes.find((c.request, c.epoch))
        if process is None:
            self._answers.append(Exported(c.request, c.epoch, None, (), "not in the engine"))
        else:
            self._send(process, c)

    def _drop(self, c: Drop) -> None:
        process = self._routes.forget((c.request, c.epoch))
        if process is None:
            self._answers.append(Dropped(c.request, c.epoch))
        else:
            self._send(process, c)

    def _withdraw(self, c: Withdraw) -> None:
        for process in self._group.members:  # it was dropped before, so nobody knows any more where it was
            self._send(process, c)

    def _run_prefill(self, c: RunPrefill) -> None:
        chunks = {(chunk.request, chunk.epoch): chunk for chunk in c.chunks}
        shares = self._routes.split(chunks)
        self._run(c, {p: RunPrefill(c.step, tuple(chunks[key] for key in keys)) for p, keys in shares.items()})

    def _run_decode(self, c: RunDecode) -> None:
        shares = self._routes.split(c.requests)
        self._run(c, {process: RunDecode(c.step, tuple(keys)) for process, keys in shares.items()})

    def _run(self, run: RunPrefill | RunDecode, shares: dict[int, Any]) -> None:
        answer = self._runs.begin(run, shares, time.monotonic())
        if answer is not None:
            self._answers.append(answer)
        for process, share in shares.items():
            self._send(process, share)

    # Ranks, in the thread

    def _serve(self) -> None:
        try:
            self._group.start()
            while not self._closing:
                messages = self._processes.messages(_TICK)
                with self._lock:
                    self._turn(messages)
                    answered = bool(self._answers)
                if answered:
                    self._listener()
        except Exception:
            _log.critical("the expert-parallel group cannot go on", exc_info=True)
            with self._lock:
                self._failed = True
                self._group.phase, self._group.why = "useless", "the thread of the group failed"
                self._died(-1)
        finally:
            self._ready.set()

    def _turn(self, messages: list[tuple[int, Any]]) -> None:
        for process, message in messages:
            did = self._group.take(process, message)
            if did is not None and self._reform is None:
                self._take(process, did)
        if self._reform is not None:
            reform, self._reform = self._reform, None
            self._answers.clear()
            self._forget()
            self._group.reform(reform.number)
        self._group.tick()

    def _take(self, process: int, did: Did) -> None:
        for answer in did.answers:
            if isinstance(answer, PrefillDone | DecodeDone):
                answer = self._runs.take(process, answer, time.monotonic())
            elif isinstance(answer, Began) and answer.why:
                self._routes.forget((answer.request, answer.epoch))  # it is begun again wherever there is room
            if answer is not None and not isinstance(answer, Reformed):
                self._answers.append(answer)

    def _died(self, rank: int) -> None:
        self._forget()
        if self._ready.is_set():
            self._answers.append(RankDied(rank))
        self._ready.set()

    def _formed(self) -> None:
        group = self._group
        self._forget()
        if self._ready.is_set():
            why = group.why if group.phase == "useless" else ""
            self._answers.append(Reformed(group.number, group.ranks, float(self.room), self.rows, why))
        self._ready.set()

    def _forget(self) -> None:
        self._runs.clear()
        self._routes.restart(self._group.members)


_HANDLERS: dict[type, Callable[[EpPort, Any], None]] = {
    Begin: EpPort._begin,
    Expect: EpPort._expect,
    Load: EpPort._load,
    Rename: EpPort._rename,
    Thaw: EpPort._thaw,
    Export: EpPort._export,
    Drop: EpPort._drop,
    Withdraw: EpPort._withdraw,
    RunPrefill: EpPort._run_prefill,
    RunDecode: EpPort._run_decode,
}
