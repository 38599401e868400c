"""From the messages of a handoff to a request of the engine that took it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.engine.grammar import Matcher
from orchestrator.engine.handoff.given_out import ended_by, repeat_tokens
from orchestrator.engine.handoff.messages import Offer, State
from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.engine.handoff.pictures import adopt_pictures, check_pictures
from orchestrator.engine.handoff.replay import begin_replay
from orchestrator.engine.sequence import Sequence

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine


def check_offer(engine: Engine, offer: Offer, model: bytes, layout: bytes) -> None:
    """Raise HandoffRefused for a request that can never run here, or not under its id."""
    if offer.model != model:
        raise HandoffRefused("model", f"model: got {offer.model.hex()[:16]}, allowed is {model.hex()[:16]}")
    if offer.layout != layout:
        raise HandoffRefused("layout", f"layout: got {offer.layout.hex()[:16]}, allowed is {layout.hex()[:16]}")
    check_id(engine, offer.request_id)
    stages = engine.model.config.num_nextn_predict_layers
    for name, value, least, most in (
        ("prompt_len", offer.prompt_len, 1, offer.max_total - 1),
        ("rows", offer.rows, 0 if offer.form == "tokens" else 1, 0 if offer.form == "tokens" else offer.max_total),
        ("draft_stages", offer.draft_stages, 0, stages),
        ("keys", len(offer.keys), 0, offer.rows // 128 * 32),
    ):
        if not least <= value <= most or (name == "keys" and value % 32):
            raise HandoffRefused("state", f"{name}: got {value}, allowed are {least} to {most}")
    check_queue(engine, offer)
    check_pictures(engine, offer)
    if offer.max_total > engine.context:
        raise HandoffRefused("context", f"max_total: got {offer.max_total}, allowed is the context, {engine.context}")
    if offer.text and engine.tokenizer is None:
        raise HandoffRefused("tokenizer", "text: the request's tokens become text, and this engine has no tokenizer")
    if offer.form == "replay" and offer.params.prompt_logprobs:
        raise HandoffRefused("state", "form: got 'replay' with prompt_logprobs, allowed are 'full' and 'tokens'")


def check_id(engine: Engine, request_id: str) -> None:
    """Raise HandoffRefused for an id that is in use."""
    if engine.find(request_id) is not None:
        raise HandoffRefused("id", f"request_id: got {request_id!r}, which is running here; ids have to be unique")


def check_queue(engine: Engine, offer: Offer) -> None:
    """Raise HandoffRefused for a request that would have to wait where too many do."""
    waiting = len(engine.scheduler.waiting)
    if offer.form == "tokens" and waiting >= engine.config.max_waiting:
        raise HandoffRefused("room", f"{waiting} requests are waiting already; try again later")


def check_state(engine: Engine, offer: Offer, state: State, tokens: int) -> None:
    """Raise HandoffRefused for numbers that contradict each other; `tokens` of prompt and output have come."""
    full = offer.form == "full"
    rows = 0 if offer.form == "tokens" else tokens
    bounds = {
        "computed": (state.computed, 0, tokens - 1 if full else tokens),
        "written": (state.written, state.computed if full else min(1, rows), rows),
        "global_floor": (state.global_floor, 0, tokens),
        "encoder_lower": (state.encoder_lower, 0, tokens),
        "decoder_lower": (state.decoder_lower, 0, tokens),
        "hit": (state.hit, 0, offer.prompt_len),
        "preemptions": (state.preemptions, 0, 1 << 62),
        "publishable": (state.publishable, 0, 1 << 62),
        "prompt_logprobs": (len(state.prompt_logprobs), 0, offer.prompt_len if offer.params.prompt_logprobs else 0),
        "drafts": (len(state.drafts), 0, engine.model.config.draft_length),
        "matched": (state.matched, -1 if offer.params.grammar is None else 0, tokens - offer.prompt_len),
        "seed": (state.seed, -(1 << 63), (1 << 63) - 1),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise HandoffRefused("state", f"{name}: got {value}, allowed are {least} to {most}")
    if any(not (0 < stop <= offer.prompt_len) for stop in state.stops):
        raise HandoffRefused("state", f"stops: got {state.stops}, allowed are positions up to {offer.prompt_len}")
    if full and state.mode == "canonical":  # windows are rebuilt on the way, or the prompt means something else
        prefix = engine.prefix
        if prefix is None or prefix.root_of(offer.params.cache_salt) != offer.root:
            raise HandoffRefused(
                "state", "mode: got a prompt read in part in 'canonical' mode, allowed is the same here"
            )


def arrive(
    engine: Engine, offer: Offer, state: State, tokens: list[int], images: list[bytes], matcher: Matcher | None
) -> Sequence:
    """A request with all but its memory. Drains overlapped steps; raises HandoffRefused with nothing else changed."""
    prompt = tokens[: offer.prompt_len]
    try:
        engine.check(prompt, offer.params)
        sequence = engine.begin(offer.request_id, prompt, offer.params, matcher=matcher, seed=state.seed)
        if sequence.max_total < offer.max_total:
            raise ValueError(f"max_total: got {offer.max_total}, allowed are {sequence.max_total}")
        sequence.max_total = offer.max_total
        repeat_tokens(sequence, tokens[offer.prompt_len :])
    except ValueError as error:
        raise HandoffRefused("state", str(error)) from None
    _check_rebuilt(sequence, offer, state)
    if offer.form != "tokens" and ended_by(sequence)[0] is not None:
        raise HandoffRefused("state", "tokens: with them the request has ended")
    if engine.pipeline is not None:  # a request comes in where nothing is in flight
        engine.pipeline.drain()
    check_id(engine, offer.request_id)
    check_queue(engine, offer)
    sequence.images = adopt_pictures(engine, offer, prompt, images)  # nothing is refused behind it
    sequence.announced, sequence.hit, sequence.preemptions = state.announced, state.hit, state.preemptions
    prefix = engine.prefix
    if offer.form == "tokens":
        sequence.hit = 0
        if prefix is not None:
            prefix.prepare(sequence)
        if offer.params.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        return sequence
    sequence.computed, sequence.global_floor = state.computed, state.global_floor
    sequence.encoder_lower, sequence.decoder_lower = state.encoder_lower, state.decoder_lower
    sequence.prompt_logprobs = list(state.prompt_logprobs)
    sequence.stale, sequence.confidence = state.stale, []
    sequence.snapped = len(tokens) // 128 * 128  # what comes is one window, not one at a boundary
    if prefix is not None:
        sequence.shares = bool(offer.root) and prefix.root_of(offer.params.cache_salt) == offer.root
    if sequence.shares:
        sequence.publishable, sequence.stops = state.publishable, list(state.stops)
        assert prefix is not None
        prefix.note_stored(sequence)
    if offer.form == "replay":
        begin_replay(sequence, state.written, engine.model.config, prefix)
    return sequence


def _check_rebuilt(sequence: Sequence, offer: Offer, state: State) -> None:
    """Text and grammar have to be where they were: else the vocabularies differ, or what a grammar means."""
    if offer.text and sequence.text is not None and sequence.text.pending != (state.held_back, state.unfinished):
        raise HandoffRefused("tokenizer", "text: what waits for more differs from what waited at the sender")
    taken = -1 if sequence.matcher is None else sequence.matcher.taken
    if taken != state.matched:
        raise HandoffRefused("state", f"matched: got {state.matched}, allowed are the {taken} tokens of the output")
