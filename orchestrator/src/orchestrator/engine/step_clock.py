"""Where the time of overlapped steps goes: the host's part, the device's part, and what neither used."""

from __future__ import annotations

import logging
import time
from collections import deque
from statistics import median

_KEPT = 512
_SHARE, _LEAST = 0.8, 32
_log = logging.getLogger(__name__)


class StepClock:
    """Seconds of the last 512 steps.

    Rule H13: a host whose part of a step takes more than 80 % of the device's holds the device up with the next delay.
    That is logged, once every 512 steps at most.

    Attributes:
        alarms: how often that was the case when it was looked at, every 32 steps.
    """

    def __init__(self, *, alarm: bool = True) -> None:
        self._alarm, self.alarms, self._steps, self._logged = alarm, 0, 0, -_KEPT
        self._host: deque[float] = deque(maxlen=_KEPT)
        self._device: deque[float] = deque(maxlen=_KEPT)
        self._last: float | None = None  # end of the step before, unless there was a pause
        self._busy = self._wall = self._held = 0.0

    def host(self, seconds: float) -> None:
        """The host's part of a step, without its waiting."""
        self._host.append(seconds)

    def device(self, seconds: float, held: float = 0.0) -> None:
        """A step that has ended, and how long the device was busy with it.

        `held` are the seconds that it idled in between, as the host had not started the sampling yet.
        """
        self._device.append(seconds)
        now = time.perf_counter()
        if self._last is not None:
            self._busy += seconds
            self._held += held
            self._wall += now - self._last
        self._last = now
        self._steps += 1
        if self._alarm and self._steps % _LEAST == 0 and self.host_share > _SHARE:
            self.alarms += 1
            if self._steps - self._logged >= _KEPT:
                self._logged = self._steps
                _log.warning(
                    "the host takes %.1f ms of a decode step, %.0f %% of the device's %.1f ms: the next delay costs",
                    self.host_seconds * 1e3, self.host_share * 100, self.device_seconds * 1e3,
                )  # fmt: skip

    def pause(self) -> None:
        """The pipeline was emptied: the time until the next step counts for nothing."""
        self._last = None

    @property
    def host_seconds(self) -> float:
        return median(self._host) if self._host else 0.0

    @property
    def device_seconds(self) -> float:
        return median(self._device) if self._device else 0.0

    @property
    def host_share(self) -> float:
        """The host's part over the device's, both as medians."""
        return self.host_seconds / self.device_seconds if self._device and self.device_seconds > 0 else 0.0

    @property
    def bubble(self) -> float:
        """Share of the time between overlapped steps in which the device had nothing to do, since the start."""
        return max(0.0, 1.0 - self._busy / self._wall) if self._wall > 0 else 0.0

    @property
    def held(self) -> float:
        """Share of that time in which the device idled between a forward pass and its sampling.

        This is all that taking a step's tokens one step later could gain.
        """
        return self._held / self._wall if self._wall > 0 else 0.0

    @property
    def steps(self) -> int:
        """Overlapped steps that have ended."""
        return self._steps
