"""What the engines need of a GPU: streams, events, memory and the compiled module. Tests have another one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from kernel_core.cuda import cuda_module


class Device(Protocol):
    """Streams have `wait_event(event)` and a number `cuda_stream`; events `record(stream)` and `synchronize()`."""

    module: Any

    def stream(self) -> Any:
        """A new stream, ahead of ordinary ones: its short kernels should not queue behind a forward pass."""
        ...

    def event(self) -> Any:
        """A new event whose `synchronize` sleeps."""
        ...

    def current_stream(self) -> Any: ...

    def memory(self, size: int) -> torch.Tensor:
        """`uint8[size]` on the device."""
        ...

    def pinned_ids(self, *shape: int) -> torch.Tensor:
        """`int32[shape]` in pinned host memory."""
        ...

    def ids(self, *shape: int) -> torch.Tensor:
        """`int32[shape]` on the device."""
        ...

    def zeros(self, *shape: int) -> torch.Tensor:
        """`int32[shape]` on the device, all 0 before anything else that is queued."""
        ...

    def order_events(self, count: int) -> np.ndarray:
        """Handles of events that only order streams, `uint64[count]`; `module.free_events` frees them."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """Calls of the module inside go to this device."""
        ...

    def enter(self) -> None:
        """Called by each thread that uses the device."""
        ...


class TorchDevice:
    """One CUDA device through PyTorch."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.module = cuda_module("gdr_swapin")

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device, priority=-1)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def memory(self, size: int) -> torch.Tensor:
        return self._settled(torch.empty(size, dtype=torch.uint8, device=self.device))

    def pinned_ids(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, pin_memory=True)

    def ids(self, *shape: int) -> torch.Tensor:
        return self._settled(torch.empty(shape, dtype=torch.int32, device=self.device))

    def zeros(self, *shape: int) -> torch.Tensor:
        return self._settled(torch.zeros(shape, dtype=torch.int32, device=self.device))

    def order_events(self, count: int) -> np.ndarray:
        events = np.zeros(count, dtype=np.uint64)
        with self.active():
            self.module.make_events(events=events.ctypes.data, count=count)
        return events

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def enter(self) -> None:
        torch.cuda.set_device(self.device)

    def _settled(self, memory: torch.Tensor) -> torch.Tensor:
        """What used this memory before may still be at work on the current stream; other streams do not know it."""
        self.current_stream().synchronize()
        return memory
