"""A worker process with one engine over the shared store: `python service_kit_store.py SPEC`, a JSON line a question.

Questions: {"run": prompt, "tokens": n}, {"match": prompt}, {"flush": seconds}, {"numbers": 1}, {"io": 1}, {"home": 1}.
`Worker` is the test's side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRIDE = 256
PATIENCE_S = 180.0


def prompt_of(length: int, seed: int, vocab: int = 500) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(vocab) for _ in range(length)]


def until(true: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Wait for other processes; the time-out is a failure, not a measurement."""
    end = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def config_of(model: Path, kind: str, folder: Path | None, mode: str = "exact", **store: Any) -> dict[str, Any]:
    """A small service; `store` are fields of `StoreSettings`."""
    return {
        "model": {"path": str(model)},
        "engine": {"prefix_cache": mode, "num_blocks": 48, "max_num_seqs": 4, "speculation": "off"},
        "store": {"kind": kind, "folder": str(folder or ""), "capacity_gb": 0.05, "host_blocks": 64, **store},
    }


class Worker:
    """A worker process. `folder` is the service's on the machine that it stands for."""

    def __init__(self, config: dict[str, Any], folder: Path, **options: Any) -> None:
        spec = {"config": config, "folder": str(folder), **options}
        self.log = folder / f"worker-{time.monotonic_ns()}.log"
        folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(spec)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._data = b""

    def up(self) -> Worker:
        assert self._line() == {"up": True}
        return self

    def ask(self, **question: Any) -> Any:
        self.send(**question)
        return self._line()

    def send(self, **question: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return self._line()

    def run(self, prompt: list[int], tokens: int = 4) -> dict[str, Any]:
        """`tokens`, `logprobs`, `cached`, `seconds` to the first token."""
        return self.ask(run=prompt, tokens=tokens)

    def stored(self, prompt: list[int], blocks: int) -> None:
        """Wait until the store has so many first blocks of a prompt, as this worker sees it."""
        until(lambda: self.ask(match=prompt) >= blocks, f"the store never had {blocks} blocks; {self.words()}")

    def numbers(self) -> dict[str, float]:
        return self.ask(numbers=1)

    def io_pid(self) -> int:
        """Of the I/O process that serves this worker's machine."""
        return int(self.ask(io=1))

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def close(self) -> None:
        """End in order, as with the end of its standard input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.kill()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        end = time.monotonic() + PATIENCE_S
        while b"\n" not in self._data:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the worker says nothing: {self.words()}"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"the worker is gone: {self.words()}"
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Tokens and the bits of their log-probabilities."""
    return all(found[name] == expected[name] for name in ("tokens", "logprobs", "reason"))


def engine_of(values: dict[str, Any], model: Any = None) -> Any:
    """An engine over a model, loaded where none is given."""
    from orchestrator.engine.config import EngineConfig
    from orchestrator.engine.engine import Engine
    from orchestrator.model.load import load_model

    engine = Engine(model or load_model(Path(values["model"]["path"])), None, EngineConfig(**values["engine"]))
    if engine.prefix is not None:
        engine.prefix.stride = STRIDE
    return engine


def main(spec: dict[str, Any]) -> None:
    import torch

    from orchestrator.service.config import from_values
    from orchestrator.service.store.shared import shared_store

    torch.set_num_threads(1)
    logging.basicConfig()
    config, engine = from_values(spec["config"]), engine_of(spec["config"])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    patience = {"deadline_s": 60.0, "answer_s": 20.0, "start_s": 60.0, **spec.get("patience", {})}
    with shared_store(config, engine, Path(config.model.path), Path(spec["folder"]), **patience) as store:
        if spec.get("kill_at"):
            store.tier.client.arena.at = Kill(spec["kill_at"])
        say(out, {"up": True})
        for line in sys.stdin:
            say(out, answer(engine, store, json.loads(line)))
    os._exit(0)


class Kill:
    """Ends the process at the n-th step of its writes into the arena."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, name: str) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def run_one(engine: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    from orchestrator.engine.request import Finished, SamplingParams, TokenOutput

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    began, first, events = time.monotonic(), 0.0, []
    engine.add("r", prompt, params)
    while engine.has_work:
        found = engine.step()
        if not first and any(isinstance(event, TokenOutput) for event in found):
            first = time.monotonic() - began
        events += found
    end = next(event for event in events if isinstance(event, Finished))
    outputs = [event for event in events if isinstance(event, TokenOutput)]
    return {"tokens": [o.token_id for o in outputs], "logprobs": [o.logprob for o in outputs],
            "cached": end.cached_tokens, "reason": end.reason, "seconds": first}  # fmt: skip


def answer(engine: Any, store: Any, question: dict[str, Any]) -> Any:
    if "run" in question:
        return run_one(engine, question["run"], question.get("tokens", 4))
    if "match" in question:
        return store.tier.match(question["match"], engine.prefix.root_of("")).blocks
    if "flush" in question:
        return store.flush(question["flush"])
    if "home" in question:
        return str(store.keeper.places.home)
    if "io" in question:
        return (Path(store.keeper.places.home) / "pid").read_text()
    return store.numbers()


def say(out: Any, words: Any) -> None:
    out.write(json.dumps(words) + "\n")
    out.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
