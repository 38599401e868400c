"""A worker process never outlives its parent, and hears of SIGTERM whatever it is at."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

PARENT_GONE = 3  # exit status
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this process with the thread that started it, where it can; `watch_parent` works anywhere."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(PARENT_GONE)  # it went before the kernel knew


def watch_parent(stdin: BinaryIO) -> None:
    """End this process at once when its standard input ends."""

    def watch() -> None:
        try:
            while os.read(stdin.fileno(), 4096):
                pass
        finally:
            os._exit(PARENT_GONE)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def on_terminate(do: Callable[[], None]) -> None:
    """Have `do` called in a thread at each SIGTERM, also while the main thread is inside of a long call of C.

    An interrupt from the terminal is left to the parent. Call it in the main thread.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            for number in os.read(reading, 64):
                if number == signal.SIGTERM:
                    do()

    threading.Thread(target=watch, name="signals", daemon=True).start()
