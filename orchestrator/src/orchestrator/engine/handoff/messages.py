"""The parts that are not rows: what is offered, what the request has come to, and the list of all parts. Msgpack."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, TypeVar

import msgspec

from orchestrator.engine.handoff.parts import HandoffRefused
from orchestrator.engine.request import GrammarSpec, SamplingParams

Form = Literal["full", "replay", "tokens"]
FORMS: tuple[Form, ...] = ("full", "replay", "tokens")
_T = TypeVar("_T")


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """An image's run of placeholders in the prompt, as `cache.chain.ImageRun`."""

    start: int
    tokens: int
    digest: bytes
    width: int
    height: int


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First: what a receiver has to know to make room, and to refuse what it cannot take.

    Attributes:
        form: "full" (all state), "replay" (global rows; windows are computed again), "tokens" (tokens alone).
        model: 32 bytes that name the weights. layout: 32 bytes that name the meaning of all rows.
        rows: tokens whose global rows will come; 0 for "tokens".
        prompt_len, max_total: lengths in tokens, of the prompt and of the whole at most.
        draft_stages: window rings that come beside those of the layers.
        text: whether the sender makes text of tokens, so that stop strings count.
        keys: of the full blocks that are known by now, 32 bytes each, where they may be shared; and their root.
        pictures: of the prompt, in order; their embeddings come as parts.
        labels: what the sender's owner wants to say (tenant, priority, epoch); not looked at.
    """

    form: Form
    handoff: bytes
    request_id: str
    model: bytes
    layout: bytes
    params: SamplingParams
    rows: int
    prompt_len: int
    max_total: int
    draft_stages: int
    text: bool
    root: bytes = b""
    keys: bytes = b""
    pictures: list[Picture] = []
    labels: dict[str, str] = {}


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a request that is neither rows nor tokens, as the fields of `engine.sequence.Sequence` with these names.

    Attributes:
        written: tokens whose global rows came; at least `computed` while a replay was under way at the sender.
        held_back: text that waits for more, to be found again when the text is rebuilt from the tokens.
        unfinished: bytes of a character that waits for more, likewise.
        matched: tokens that the grammar has taken, likewise; -1 without one.
        mode: prefix cache of the sender, where the prompt was not read to its end.
    """

    seed: int
    computed: int
    written: int
    decoder_lower: int
    encoder_lower: int
    global_floor: int
    hit: int
    announced: bool
    preemptions: int
    drafts: list[int]
    confidence: list[float]
    stale: list[float] | None
    publishable: int
    stops: list[int]
    prompt_logprobs: list[float | None]
    held_back: str
    unfinished: bytes
    matched: int
    mode: str


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A part: name, bytes with its header, CRC32C of them."""

    name: str
    size: int
    crc: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Last: every part before it, in order."""

    parts: list[Listed]


def encode(message: Offer | State | Manifest) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def decode(data: bytes, kind: type[_T]) -> _T:
    """Raises HandoffRefused for bytes that are no such message, and for parameters out of range or unknown here."""
    try:
        message = msgspec.msgpack.decode(data, type=kind)
        if isinstance(message, Offer):
            _check_known(data)
        return message
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError) as error:
        raise HandoffRefused("state", f"{kind.__name__.lower()}: {error}") from None


def _check_known(data: bytes) -> None:
    """Refuse parameters that are not known here: unlike a message's fields they would be left out."""
    sent = msgspec.msgpack.decode(data)["params"]
    for values, kind in ((sent, SamplingParams), (sent.get("grammar") or {}, GrammarSpec)):
        known = {field.name for field in fields(kind)}
        if not values.keys() <= known:
            raise ValueError(f"params: got {', '.join(values.keys() - known)}, allowed are {', '.join(sorted(known))}")


def _plain(value: Any) -> Any:
    raise TypeError(f"params: got {type(value).__name__}, allowed are plain values")
