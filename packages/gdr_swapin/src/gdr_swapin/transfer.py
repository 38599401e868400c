"""What a loader hands out: one future a source layer, resolved in deadline order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from gdr_swapin.layout import BlockLayout
from kernel_core import check


class SwapInError(RuntimeError):
    """A layer did not arrive; its blocks hold no valid rows of it. `layer`: its number, `reason`: what happened."""

    def __init__(self, layer: int, reason: str) -> None:
        super().__init__(f"layer {layer} was not loaded: {reason}")
        self.layer, self.reason = layer, reason


class Busy(RuntimeError):
    """The loader has as many transfers in flight as it takes; try again when one has ended."""


class Transfer:
    """Blocks on their way. Each layer ends once: loaded or failed; after a failed layer all later ones fail too.

    `future(layer)` resolves to None when the layer's bytes are in the pools, or raises `SwapInError`.
    """

    def __init__(self, layout: BlockLayout, count: int, on_end: Callable[[Transfer], None]) -> None:
        self.layout, self.count = layout, count
        self._futures: list[Future[None]] = [Future() for _ in layout.layers]
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ending = False
        self._over = threading.Event()
        for future in self._futures:
            future.set_running_or_notify_cancel()  # a copy engine cannot be called back

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer numbers in the order in which they arrive."""
        return self.layout.numbers

    def future(self, layer: int) -> Future[None]:
        """Of one layer; a callback on it runs on the loader's thread, so it should only wake somebody."""
        return self._futures[self.layout.position(layer)]

    def done(self, layer: int) -> bool:
        """Whether the layer is in the pools. False while it is on its way and after a failure."""
        future = self.future(layer)
        return future.done() and future.exception() is None

    @property
    def ended(self) -> bool:
        """Whether nothing of this transfer is in flight any more, so that slots and blocks may be used again."""
        return self._over.is_set()

    def failures(self) -> dict[int, str]:
        """Layer -> reason, of the layers that failed until now."""
        found = {}
        for future in self._futures:
            error = future.exception() if future.done() else None
            if isinstance(error, SwapInError):
                found[error.layer] = error.reason
        return found

    def wait_layer(self, layer: int, *, stream: Any = None, timeout: float | None = None) -> None:
        """Make what follows see the layer's rows; raises `SwapInError` where it failed.

        On a GPU the stream (the current one by default) waits and the caller does not. Elsewhere the caller waits, at
        most `timeout` seconds: then TimeoutError, and the layer stays on its way.
        """
        check.require(stream is None, "stream", stream, "None: these pools are in host memory")
        try:
            self.future(layer).result(timeout)
        except FutureTimeoutError as error:
            raise TimeoutError(f"layer {layer} has not arrived after {timeout} s") from error

    def wait(self, timeout: float | None = None) -> None:
        """The calling thread waits until the transfer has ended; raises the first layer's `SwapInError`."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"the transfer has not ended after {timeout} s")
        for future in self._futures:
            future.result()

    # Called by engines.

    def loaded(self, position: int) -> None:
        """The layer is in the pools."""
        if not self._futures[position].done():
            self._futures[position].set_result(None)

    def failed(self, position: int, reason: str) -> None:
        """The layer, and with it all later ones, did not arrive."""
        for i in range(position, len(self._futures)):
            why = reason if i == position else f"layer {self.layers[position]} failed before it ({reason})"
            if not self._futures[i].done():
                self._futures[i].set_exception(SwapInError(self.layers[i], why))

    def end(self) -> None:
        """Nothing is in flight any more; what has no result by now failed."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
        self.failed(0, "the loader ended the transfer")
        self._on_end(self)
        self._over.set()
