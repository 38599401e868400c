"""Rules of the overlapped pipeline, one for each of its hazards, by the names that code and tests use.

A step is planned and started while the one before it still runs, so what the host knows is late. Every rule is on;
tests turn one off to show that it is needed. H3 has no switch: `Scheduler.reserve` parks nobody.
docs/speculation.md says what each is about.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Attributes:
    discard_after_end: H1, what a step brings for a request that has ended is dropped.
    fenced_frees: H2, slots and blocks are free when the last step that may touch them has ended.
    guarded_buffers: H4, a host buffer is used again only when the step that filled it was read.
    publish_late: H5, written rows are announced after the step that wrote them has ended.
    optimistic_lengths: H6, lengths are taken as if everything in flight were accepted, up to a request's limit.
    drop_aborted: H7, an abort ends a request at once; what is in flight for it is dropped.
    sample_late: H8, sampling waits for the tokens of the step before, as masks depend on them.
    position_keyed: H9, random draws depend on seed and position, not on steps.
    agreed_steps: H10, ranks agree on a step before it; an idle one takes part with an empty batch.
    padding_apart: H11, padding rows stand in block 0 and slot 0 and see nothing.
    flips_between: H12, weights change between steps only.
    host_alarm: H13, a host that takes most of a step's time is reported.
    """

    discard_after_end: bool = True
    fenced_frees: bool = True
    guarded_buffers: bool = True
    publish_late: bool = True
    optimistic_lengths: bool = True
    drop_aborted: bool = True
    sample_late: bool = True
    position_keyed: bool = True
    agreed_steps: bool = True
    padding_apart: bool = True
    flips_between: bool = True
    host_alarm: bool = True
