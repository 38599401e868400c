"""Between an entry and the router, and from whoever frees a request to whoever holds something of it."""

from __future__ import annotations

from orchestrator.roles.messages.base import RequestSpec, Wire


class Submit(Wire, frozen=True):
    """Entry to router: run this, or go on with it; repeated until `Accepted`.

    `output` was generated before. `accepted_by` is the incarnation of the router that accepted this epoch, 0 for none.
    """

    request: str
    epoch: int
    entry: str
    spec: RequestSpec
    output: tuple[int, ...] = ()
    accepted_by: int = 0


class Wanted(Wire, frozen=True):
    """Entry to router, at intervals until tokens come: it waits. Answers: `Accepted`, `Lost`, `Unknown`."""

    request: str
    epoch: int
    entry: str


class Unknown(Wire, frozen=True):
    """Router to entry: it does not know a `Wanted` request; `Submit` it again."""

    request: str
    epoch: int


class Accepted(Wire, frozen=True):
    """Router to entry: the request will run. Answer to `Submit` and `Wanted` of one that waits or runs."""

    request: str
    epoch: int
    router_incarnation: int


class Refused(Wire, frozen=True):
    """Router to entry: it will not run. 400: never; 429: not now, again in `retry_after` seconds."""

    request: str
    epoch: int
    status: int
    retry_after: int
    why: str


class Lost(Wire, frozen=True):
    """Router to entry: whoever had this epoch has it no more; go on under a higher one.

    `certain`: its worker's life is over, so nothing more comes of it; else the router may only not hear the worker.
    """

    request: str
    epoch: int
    why: str
    certain: bool = False


class Release(Wire, frozen=True):
    """Entry to router and workers, router to workers: free what you hold of this request up to this epoch, for good.

    `ended` tells that no higher epoch will come. `output`: tokens delivered, for the tenant's account. `entry` is who
    wants to hear `Released`, empty for nobody.
    """

    request: str
    epoch: int
    ended: bool
    output: int = 0
    entry: str = ""


class Released(Wire, frozen=True):
    """Router to entry: answer to `Release`."""

    request: str
    epoch: int


class WorkFailed(Wire, frozen=True):
    """Worker to entry, repeated until `Release`: this epoch ends here. `retry`: another attempt may help."""

    request: str
    epoch: int
    worker: str
    incarnation: int
    why: str
    retry: bool = True
