"""A GPU's streams in one process: what is queued runs later, in any order that streams and events allow.

A seeded scheduler picks the next stream, so races show as wrong bytes for some seeds and come back with the same one.
Copies and kernels move real bytes of host memory when their turn comes, and read descriptors only then.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernel_core.testing.bindings import bindings
from kernel_core.testing.child import load_file

run_stage = load_file(Path(__file__).parent / "host_stage.py").run_stage
CSRC = Path(__file__).parents[1] / "csrc" / "cuda"


class SimEvent:
    def __init__(self, gpu: SimGpu) -> None:
        self._gpu, self.passed, self.recorded = gpu, False, False

    def record(self, stream: SimStream) -> None:
        self.recorded = True
        stream.push(lambda: setattr(self, "passed", True))

    def synchronize(self) -> None:
        self._gpu.run_until(lambda: self.passed or not self.recorded)


class SimCounter(SimEvent):
    """A wait for a counter in memory; it is over when the counter says so."""

    def __init__(self, gpu: SimGpu, address: int, value: int) -> None:
        self._at, self._value = address, value
        super().__init__(gpu)

    @property
    def passed(self) -> bool:
        return (int(array(self._at, 1, np.uint32)[0]) - self._value) % (1 << 32) < 1 << 31

    @passed.setter
    def passed(self, _value: bool) -> None:
        return None


class SimStream:
    def __init__(self, gpu: SimGpu, number: int) -> None:
        self._gpu, self.cuda_stream = gpu, number
        self.weight = gpu.random.choice((1.0, 1.0, 0.02))  # some streams fall far behind
        self.work: deque[Callable[[], None] | SimEvent] = deque()

    def push(self, item: Callable[[], None] | SimEvent) -> None:
        with self._gpu.lock:
            self.work.append(item)

    def wait_event(self, event: SimEvent) -> None:
        if event.recorded:  # one that was never recorded holds nothing up
            self.push(event)

    def ready(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], SimEvent) or self.work[0].passed)


class SimGpu:
    """Stands in for `gdr_swapin.cuda.device.Device`; `module` answers to the names and arguments of the bindings."""

    def __init__(self, seed: int = 0, *, batch: bool = True, held: bool = False) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.streams: list[SimStream] = []
        self.batch = batch
        self.held = held  # nothing runs until `release`
        self.turned = threading.Condition(self.lock)
        self.module = SimModule(self)
        self.main = self.stream()

    # what engines use

    def stream(self) -> SimStream:
        self.streams.append(SimStream(self, len(self.streams) + 1))
        return self.streams[-1]

    def event(self) -> SimEvent:
        return SimEvent(self)

    def current_stream(self) -> SimStream:
        return self.main

    def memory(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xDD, dtype=torch.uint8)

    def pinned_ids(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32)

    def ids(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def order_events(self, count: int) -> np.ndarray:
        events = np.zeros(count, dtype=np.uint64)
        self.module.make_events(events=events.ctypes.data, count=count)
        return events

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def enter(self) -> None:
        return None

    # what tests use

    def release(self) -> None:
        with self.lock:
            self.held = False
            self.turned.notify_all()

    def step(self) -> bool:
        with self.lock:
            ready = [stream for stream in self.streams if stream.ready()]
            if not ready:
                return False
            item = self.random.choices(ready, [stream.weight for stream in ready])[0].work.popleft()
            if not isinstance(item, SimEvent):
                item()
            return True

    def run_until(self, over: Callable[[], bool]) -> None:
        with self.lock:
            while not over():
                if (self.held or not self.step()) and not self.turned.wait(timeout=10):
                    raise RuntimeError("the simulated device hangs")

    def run_all(self) -> None:
        while self.step():
            pass


class SimModule:
    def __init__(self, gpu: SimGpu) -> None:
        self._gpu, self._known = gpu, bindings(CSRC)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fail_at: int | None = None  # number of the call that raises
        self.failing: set[str] = set()  # and names of calls that always do
        self.events: dict[int, SimEvent | None] = {}  # handle -> its latest record

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._known:
            raise AttributeError(f"the bindings have no function {name!r}")

        def call(**given: Any) -> Any:
            if given.keys() != self._known[name].keys():
                raise TypeError(f"{name}: got {sorted(given)}, the bindings take {sorted(self._known[name])}")
            if any(not isinstance(value, (bool, int)) for value in given.values()):
                raise TypeError(f"{name}: {given} are not all integers")
            if name not in ("has_batch", "has_wait_value", "device_address", "make_events", "free_events"):
                self.note(name, given)
            result = getattr(self, f"_{name}")(**given)
            with self._gpu.lock:
                self._gpu.turned.notify_all()
            return result

        return call

    def note(self, name: str, given: dict[str, Any]) -> None:
        self.calls.append((name, given))
        if self.fail_at == len(self.calls) - 1 or name in self.failing:
            raise RuntimeError(f"{name}: out of memory")

    def named(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self.calls if called == name]

    def _stream(self, stream: int) -> SimStream:
        return next(s for s in self._gpu.streams if s.cuda_stream == stream)

    def _push(self, stream: int, item: Callable[[], None]) -> None:
        self._stream(stream).push(item)

    def record(self, handle: int, stream: int) -> None:
        """Waits of before keep the record that they saw."""
        event = SimEvent(self._gpu)
        event.record(self._stream(stream))
        self.events[handle] = event

    def wait(self, stream: int, handle: int) -> None:
        event = self.events[handle]
        if event is not None:
            self._stream(stream).wait_event(event)

    def _make_events(self, events: int, count: int) -> None:
        handles = range(1000 + len(self.events), 1000 + len(self.events) + count)
        self.events.update(dict.fromkeys(handles))
        ctypes.memmove(events, np.array(handles, dtype=np.uint64).ctypes.data, 8 * count)

    def _free_events(self, events: int, count: int) -> None:
        for handle in array(events, count, np.uint64).tolist():
            del self.events[handle]

    def _record_events(self, events: int, count: int, stream: int) -> None:
        for handle in array(events, count, np.uint64).tolist():
            self.record(handle, stream)

    def _upload_ids(self, pinned: int, device: int, slots: int, blocks: int, count: int, stream: int) -> None:
        ids = np.concatenate([array(address, count, np.int64) for address in (slots, blocks)]).astype(np.int32)
        ctypes.memmove(pinned, ids.ctypes.data, ids.nbytes)
        # Reads the pinned buffer when its turn comes.
        self._push(stream, lambda: ctypes.memmove(device, pinned, ids.nbytes) and None)

    def _stage(self, **given: int) -> int:
        rest = {name: given[name] for name in given.keys() - {"turn", "stream_count"}}
        plan = {name: rest.pop(name) for name in given.keys() & PLANNED}
        plan |= {"streams": given["stream_count"], "stream": given["turn"]}
        streams = array(given["streams"], given["stream_count"], np.uint64).tolist()
        filled, emptied = (array(given[name], given["parts"], np.uint64).tolist() for name in ("filled", "emptied"))
        return run_stage(SimStageQueue(self, given, streams, filled, emptied), **plan)

    def _has_batch(self) -> bool:
        return self._gpu.batch

    def _device_address(self, at: int) -> int:
        return at

    def _copy_batch(self, targets, sources, sizes, count, per_call, any_order, prefer_overlap, stream) -> int:
        if not self._gpu.batch or per_call < 1:
            raise ValueError("copy_batch")
        return self._copy_each(targets, sources, sizes, count, stream)

    def _copy_each(self, targets, sources, sizes, count, stream) -> int:
        lists = [array(address, count, np.uint64).tolist() for address in (targets, sources, sizes)]
        for to, source, size in zip(*lists, strict=True):  # the arrays are read during the call
            self._push(stream, lambda to=to, source=source, size=size: ctypes.memmove(to, source, size) and None)
        return count

    def _copy_strided(
        self, targets, target_pitches, sources, source_pitches, widths, rows, count, per_call, any_order,
        prefer_overlap, stream,
    ) -> int:  # fmt: skip
        lists = [array(a, count, np.uint64).tolist()
                 for a in (targets, target_pitches, sources, source_pitches, widths, rows)]  # fmt: skip
        for row in zip(*lists, strict=True):
            self._copy_rows(*row, stream)
        return count

    def _copy_rows(self, to, to_pitch, from_, from_pitch, width, rows, stream) -> None:
        if width > min(to_pitch, from_pitch):
            raise ValueError("copy_rows: a pitch below the width")

        def run() -> None:
            for row in range(rows):
                ctypes.memmove(to + row * to_pitch, from_ + row * from_pitch, width)

        self._push(stream, run)

    def _has_wait_value(self) -> bool:
        return self._gpu.batch

    def _wait_value(self, counter, value, stream) -> None:
        self._stream(stream).push(SimCounter(self._gpu, counter, value))

    def _move_bulk(self, stages, group_ends, done, stream_once, **rest) -> None:
        if not 4 <= stages <= 64:
            raise ValueError("move_bulk: stages")
        if not done:
            self._move(**rest)
            return
        ends = [l + 1 for l in range(rest["layer_count"]) if group_ends >> l & 1]
        if ends[-1:] != [rest["layer_count"]]:
            raise ValueError("move_bulk: group_ends")
        for number, (first, end) in enumerate(itertools.pairwise([0, *ends])):
            self._move(**{**rest, "layers": rest["layers"] + 40 * first, "layer_count": end - first})
            for _ in range(rest["ctas"]):
                self._push(rest["stream"], lambda at=done + 4 * number: self._count_up(at))

    def _count_up(self, at: int) -> None:
        ctypes.memmove(at, (array(at, 1, np.uint32) + np.uint32(1)).tobytes(), 4)

    def _move_plain(self, loads, **rest) -> None:
        if loads not in (1, 4, 8):
            raise ValueError("move_plain: loads")
        self._move(**rest)

    def _move(self, source, stride, slots, blocks, count, piece, layers, layer_count, ctas, stream) -> None:
        table = array(layers, layer_count * 5, np.uint64).reshape(layer_count, 5).tolist()  # read during the call
        if piece % 16 or ctas < 1:
            raise ValueError("move")

        def run() -> None:
            pages = array(blocks, count, np.int32)
            ids = array(slots, count, np.int32) if slots else np.arange(count)
            for offset, index_bytes, main_bytes, index, main in table:
                for slot, page in zip(ids.tolist(), pages.tolist(), strict=True):
                    at = source + slot * stride + offset
                    ctypes.memmove(index + page * index_bytes, at, index_bytes)
                    ctypes.memmove(main + page * main_bytes, at + index_bytes, main_bytes)

        self._push(stream, run)

    def _register_host(self, at: int, bytes: int) -> None:
        return None

    def _unregister_host(self, at: int) -> None:
        return None


PLANNED = {"source", "stride", "slots", "count", "offset", "size", "area", "part_bytes", "parts", "part", "first",
           "per_call", "regular_from"}  # fmt: skip


class SimStageQueue:
    """What the module's queue does, on simulated streams."""

    def __init__(
        self, module: SimModule, given: dict[str, int], streams: list[int], filled: list[int], emptied: list[int]
    ) -> None:
        self._module, self._given = module, given
        self._streams, self._filled, self._emptied = streams, filled, emptied

    def before(self, stream: int, part: int) -> None:
        self._module.wait(self._streams[stream], self._emptied[part])

    def copy(self, stream: int, to: Any, from_: Any, sizes: Any, n: int) -> None:
        g = self._given
        to, from_, sizes = (ctypes.cast(p, ctypes.c_void_p).value for p in (to, from_, sizes))
        call = {"targets": to, "sources": from_, "sizes": sizes, "count": n, "stream": self._streams[stream]}
        if g["batched"]:
            how = {name: g[name] for name in ("per_call", "any_order", "prefer_overlap")}
            self._module.copy_batch(**call, **how)
        else:
            self._module.copy_each(**call)

    def rows(self, stream: int, to: int, to_pitch: int, from_: int, from_pitch: int, width: int, n: int) -> None:
        self._module.copy_rows(to=to, to_pitch=to_pitch, from_=from_, from_pitch=from_pitch, width=width, rows=n,
                               stream=self._streams[stream])  # fmt: skip

    def after(self, stream: int, part: int) -> None:
        self._module.record(self._filled[part], self._streams[stream])
        self._module.wait(self._given["join"], self._filled[part])

    def deal(self, part: int, at: int, start: int, n: int) -> None:
        g = self._given
        move = {name: g[name] for name in ("piece", "layers", "layer_count", "ctas")}
        move |= {"source": at, "stride": g["size"], "slots": 0, "blocks": g["ids"] + 4 * start, "count": n}
        if g["loads"]:
            self._module.move_plain(**move, loads=g["loads"], stream=g["join"])
        else:
            self._module.move_bulk(**move, stages=g["stages"], group_ends=0, done=0, stream_once=False,
                                   stream=g["join"])  # fmt: skip
        self._module.record(self._emptied[part], g["join"])


def array(address: int, count: int, dtype: type) -> np.ndarray:
    """A copy of an array at an address."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype=dtype)
