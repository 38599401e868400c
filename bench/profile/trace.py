"""Decode steps under PyTorch's profiler, as a file that Perfetto opens, and what can be read off it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.launch import Worker
from orchestrator.engine.ranges import OPS, ranges_on
from orchestrator.engine.request import SamplingParams
from orchestrator.engine.step_clock import StepClock
from orchestrator.model.transformer import Transformer

WARM_UP = 6  # steps before the traced ones


@dataclass
class Trace:
    """What a trace shows: ranges of steps, calls of ops and of kernels by name, and the pipeline's times."""

    steps: list[str] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    overlapped: int = 0
    bubble: float = 0.0
    host_ms: float = 0.0
    device_ms: float = 0.0


def decoding(model: Transformer, sequences: int, context: int, speculation: str | int) -> Engine:
    """An engine whose requests have all come to decode steps. On a CPU a thread of its own is the device."""
    blocks = sequences * (-(-(context + 512) // 128) + 1)
    config = EngineConfig(
        max_num_seqs=sequences,
        num_blocks=blocks,
        max_step_tokens=max(512, 8 * sequences),
        device="cuda" if model.device.type == "cuda" else "cpu",
        speculation=speculation,
    )
    engine = Engine(model, None, config)
    if model.device.type == "cpu":
        engine.overlap(Worker())
    generator = torch.Generator().manual_seed(3)
    for i in range(sequences):
        prompt = torch.randint(3, model.config.vocab_size - 8, (context,), generator=generator).tolist()
        engine.add(str(i), prompt, SamplingParams(max_tokens=500, seed=i, ignore_eos=True))
    assert engine.pipeline is not None
    while engine.pipeline.clock.steps < WARM_UP:
        engine.step()
    return engine


def record(engine: Engine, steps: int, path: Path, tick: Callable[[], None] = lambda: None) -> Trace:
    """Trace that many steps into `path` (JSON of the Chrome trace format)."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if engine.model.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with ranges_on():
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, experimental_config=every_thread) as profiler:
            assert engine.pipeline is not None
            engine.pipeline.clock = StepClock()  # starting a profiler takes longer than a step
            for _ in range(steps):
                engine.step()
                tick()
            if engine.model.device.type == "cuda":
                torch.cuda.synchronize()
            engine.pipeline.drain()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    clock, found = engine.pipeline.clock, read(path)
    found.bubble, found.host_ms, found.device_ms = clock.bubble, clock.host_seconds * 1e3, clock.device_seconds * 1e3
    return found


def read(path: Path) -> Trace:
    """Raises ValueError where the file is no trace."""
    try:
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: got no trace ({error})") from error
    names = {f"{package}.{op}" for package, ops in OPS.items() for op in ops}
    found = Trace()
    device: list[tuple[float, float]] = []
    host: list[tuple[float, float]] = []
    on_gpu: list[tuple[float, float]] = []
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "kernel":
            found.kernels[name] += 1
        elif event.get("cat") == "gpu_user_annotation" and name[:2] in ("F ", "S "):
            on_gpu.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
        elif event.get("cat") == "user_annotation":
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            if name in names:
                found.ops[name] += 1
            elif name[:2] in ("F ", "S "):
                found.steps.append(name)
                device.append(span)
            elif name.startswith(("plan", "launch", "read")):
                host.append(span)
    device = on_gpu or device  # beside a GPU the other ranges are those of starting the work
    found.overlapped = sum(any(a < d and c < b for c, d in device) for a, b in host)
    return found
