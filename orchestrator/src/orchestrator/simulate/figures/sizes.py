"""How much is simulated: for the report, and for a test of seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    warm, span: seconds of a run before and while it is measured. It then runs on until all requests are done.
    loads: of prefill, as parts of what it would do balanced and offline, ascending.
    sessions, requests: of the traces; None for all. seeds: of the runs behind a range.
    decode_rates: requests a second into the decode group. decode_span: seconds of it.
    rates: requests a second of the runs of rising load.
    calls: of the router's decisions that are timed, at least.
    """

    warm: float = 15.0
    span: float = 40.0
    loads: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 0.65, 0.75, 0.8, 0.85, 0.9)
    sessions: int | None = None
    requests: int | None = None
    seeds: int = 3
    decode_rates: tuple[float, ...] = (600.0, 1200.0, 2000.0, 2800.0)
    decode_span: float = 20.0
    rates: tuple[float, ...] = (100.0, 300.0, 500.0, 700.0, 850.0, 1000.0, 1100.0, 1250.0, 1400.0)
    calls: int = 2000


FULL = Sizes()
QUICK = Sizes(
    warm=1.0,
    span=3.0,
    loads=(0.3, 0.8),
    sessions=40,
    requests=500,
    seeds=1,
    decode_rates=(300.0,),
    decode_span=1.5,
    rates=(200.0, 1500.0),
    calls=50,
)
