"""A transfer whose layers are events of a GPU."""

from __future__ import annotations

from typing import Any

from gdr_swapin.transfer import SwapInError, Transfer


class CudaTransfer(Transfer):
    """`wait_layer` makes a stream wait for the layer's event; a layer that could not be queued has none."""

    events: list[Any]
    current_stream: Any

    def wait_layer(self, layer: int, *, stream: Any = None, timeout: float | None = None) -> None:
        if timeout is not None:
            raise ValueError(f"timeout: got {timeout}, allowed is None: a stream waits, the caller does not")
        position = self.layout.position(layer)
        future = self.future(layer)
        error = future.exception() if future.done() else None
        if error is not None:
            raise error
        if self.events[position] is None:
            raise SwapInError(layer, "it was not queued")
        (stream or self.current_stream()).wait_event(self.events[position])
