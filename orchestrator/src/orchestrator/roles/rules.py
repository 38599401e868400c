"""Rules of the protocol between the roles, one switch each. All are on; the simulator turns one off to show that its
checks would notice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Attributes:
    check_epoch: an entry takes tokens of the present epoch only, from the worker that it was given to. Off: of any.
    dedup_by_index: an entry takes a token only at the next index. Off: whatever comes is appended.
    hold_until_taken: a source keeps a state until its target has taken it, or the lease is over. Off: until offered.
    check_parts: a target compares lengths and checksums of parts, and kinds, with the manifest. Off: takes all.
    forward_cancel: an entry tells router and workers that a request has ended. Off: it only forgets it.
    tell_refusal: an entry tells its client that the router refused. Off: the request is forgotten.
    replay_whole_log: an attempt is given all tokens that were delivered. Off: all but the first.
    drop_dead: the router drops a worker without a lease. Off: it goes on giving it work.
    drain_waits: a drained worker leaves when it holds nothing. Off: at once.
    know_retries: an entry and the router know a request that they have already. Off: a client's retry begins anew, a
        repeated `Submit` is queued once more.
    check_incarnation: a worker refuses what was meant for an earlier life, the router what comes from one. Off: they
        take it.
    keep_tombstones: whoever freed a request refuses what comes late for it. Off: it takes it as new.
    """

    check_epoch: bool = True
    dedup_by_index: bool = True
    hold_until_taken: bool = True
    check_parts: bool = True
    forward_cancel: bool = True
    tell_refusal: bool = True
    replay_whole_log: bool = True
    drop_dead: bool = True
    drain_waits: bool = True
    know_retries: bool = True
    check_incarnation: bool = True
    keep_tombstones: bool = True
