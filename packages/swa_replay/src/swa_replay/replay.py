"""Bounded replay: which rows are fed again, which are kept, and what they may write.

Rules: docs/model.md, Bounded replay.

Pure functions of lengths; positions and tokens count from 0. They hold for any window and draft length.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_core.check import require

BLOCK_TOKENS = 128


def ring_rows(window: int = 128, draft_length: int = 5) -> int:
    """Rows of a window ring: the window and the furthest way back, one more than the drafts (134 for the model)."""
    return window + draft_length + 1


def tail_rows(ratio: int = 2, draft_length: int = 5) -> int:
    """Rows of a compressor's tail ring: an open group and the furthest way back (7 for ratio 2)."""
    return ratio + draft_length


def exact_tail_rows(layers: int, window: int = 128) -> int:
    """Last rows that `layers` stacked window layers have to run for their top rows to miss nothing."""
    return window + (layers - 1) * (window - 1)


@dataclass(frozen=True)
class EncoderReplayPlan:
    """Feeding a prompt whose first `hit` tokens have global rows but no window rows.

    Tokens `start` to `length` - 1 are fed at their own positions. Window keys below `start` are not seen
    (`lower` of the attention) and all fed rows are stored in the rings, but a global row is written only when its
    last token is at or above `write_floor`: rows of the hit are shared and stay as they are.
    """

    hit: int
    length: int
    window: int
    start: int
    write_floor: int

    @property
    def lower(self) -> int:
        """Window lower bound of every fed row."""
        return self.start

    @property
    def replayed(self) -> int:
        """Tokens fed again."""
        return self.hit - self.start

    @property
    def fed(self) -> int:
        """Tokens fed in all."""
        return self.length - self.start

    def first_group(self, ratio: int) -> int:
        """The first compressed position that is written, for a source of `ratio` tokens a row."""
        return self.write_floor // ratio

    def writes_group(self, group: int, ratio: int) -> bool:
        """Whether compressed position `group` is written: its last token is at or above the floor."""
        return (group + 1) * ratio - 1 >= self.write_floor

    def new_tokens(self, chunk_start: int, chunk_end: int) -> int:
        """Tokens of a chunk that need new global rows; 0 for a chunk inside the replay, which advances all the same."""
        return max(0, chunk_end - max(chunk_start, self.write_floor))


@dataclass(frozen=True)
class DecoderTailPlan:
    """Which rows of a prompt the decoder layers run.

    The decoder runs positions `start` to `length` - 1, `keep` at most; below `start` no window key is seen and no
    ring row written in its layers, while the first decoder layer makes global rows of every token. `start` follows
    from the whole prompt, not from its chunks, so chunking has no influence. `exact` says that nothing was left out.
    """

    length: int
    window: int
    keep: int
    start: int

    @property
    def lower(self) -> int:
        """Window lower bound of the decoder layers."""
        return self.start

    @property
    def write_floor(self) -> int:
        """Lowest position whose window row the decoder layers store (`floor` of `store_window`)."""
        return self.start

    @property
    def exact(self) -> bool:
        """True when the decoder runs the whole prompt."""
        return self.start == 0


def plan_encoder_replay(hit: int, length: int, window: int = 128) -> EncoderReplayPlan:
    """The plan for `hit` cached tokens of a prompt of `length`. A hit of 0 is a cold start and feeds everything.

    Raises:
        ValueError: the hit leaves no token to compute, or is not longer than the window (see `usable_hit`).
    """
    require(window > 0, "window", window, "1 or more")
    require(length > 0, "length", length, "1 or more")
    require(0 <= hit < length, "hit", hit, f"0 to {length - 1}, so that one token is left to compute")
    require(hit == 0 or hit > window, "hit", hit, f"0, or more than the window of {window}")
    return EncoderReplayPlan(hit, length, window, start=max(0, hit - window), write_floor=hit)


def plan_decoder_tail(length: int, window: int = 128, draft_length: int = 5) -> DecoderTailPlan:
    """The plan for a prompt of `length`: the decoder keeps window + 2 (draft_length + 1) rows, 140 for the model.

    A later query at position >= length sees window keys from length - window + 1 on, all above `start`.

    Raises:
        ValueError: a length, window or draft length out of range.
    """
    require(length > 0, "length", length, "1 or more")
    require(window > 0, "window", window, "1 or more")
    require(draft_length >= 0, "draft_length", draft_length, "0 or more")
    keep = window + 2 * (draft_length + 1)
    return DecoderTailPlan(length, window, keep, start=max(0, length - keep))


def kept_rows(chunk_start: int, chunk_end: int, plan: DecoderTailPlan) -> slice:
    """The rows of a chunk (positions chunk_start to chunk_end - 1) that the decoder runs, as a slice of its rows.

    Over all chunks of a prompt the slices cover positions plan.start to plan.length - 1 once; early chunks give an
    empty slice.

    Raises:
        ValueError: the chunk is not inside the prompt.
    """
    require(
        0 <= chunk_start <= chunk_end <= plan.length, "chunk", (chunk_start, chunk_end), f"a part of 0 to {plan.length}"
    )
    return slice(min(max(plan.start - chunk_start, 0), chunk_end - chunk_start), chunk_end - chunk_start)


def usable_hit(
    matched: int,
    length: int,
    *,
    window: int = 128,
    block: int = BLOCK_TOKENS,
    window_kept: bool = False,
    first_logit: int | None = None,
) -> int:
    """How many of `matched` cached tokens a prompt of `length` adopts.

    Whole blocks, at least one token left to compute, so a fully cached prompt of whole blocks falls back by one
    block. Without window rows a hit that is not longer than the window is not worth adopting: replay would compute
    all of it again.

    Args:
        matched: tokens whose global rows are present in all sources.
        length: prompt length.
        window: window of the attention.
        block: tokens a block.
        window_kept: the window rows at the end of the hit are there too, so there is nothing to replay.
        first_logit: the first position whose logits are wanted (0 for log-probabilities of the whole prompt);
            the hit ends at or before it. None: only those after the prompt.

    Raises:
        ValueError: a length or block out of range.
    """
    require(matched >= 0, "matched", matched, "0 or more")
    require(length > 0, "length", length, "1 or more")
    require(block > 0, "block", block, "1 or more")
    last = length - 1 if first_logit is None else min(first_logit, length - 1)
    require(last >= 0, "first_logit", first_logit, "0 or more")
    hit = min(matched, last) // block * block
    return hit if window_kept or hit > window else 0
