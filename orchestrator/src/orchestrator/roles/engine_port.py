"""The seam between the roles and an engine: commands that a core gives, answers that come back as events.

The simulator's engine and the real one both implement `EnginePort`. A request is named by (request, epoch) everywhere;
an engine may hold several epochs of one request. Commands are carried out in order. `Drop` is good in every state and
takes effect when no step in flight touches the request any more; what a step brings for a dropped one is left out.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from orchestrator.roles.messages import Image, Key, RequestSpec
from orchestrator.roles.state_parts import Manifest


class Encode(Struct, frozen=True, gc=False):
    """Encoder: compute an embedding. Answer: `EncodeDone`. `entry` is the party that has the pixels."""

    image: Image
    entry: str = ""


class EncodeDone(Struct, frozen=True, gc=False):
    """`payload` is the embedding; `why` is not empty where there is none."""

    digest: str
    payload: bytes
    why: str = ""


class Begin(Struct, frozen=True, gc=False):
    """Prefill: take a prompt in, with its stored prefix if that can be had. Answer: `Began`.

    `output` tokens were generated elsewhere; they are computed as prompt, and the grammar is moved over them.
    `embeddings`: (digest, bytes) of the images.
    """

    request: str
    epoch: int
    spec: RequestSpec
    output: tuple[int, ...] = ()
    side: str = "prefill"
    embeddings: tuple[tuple[str, bytes], ...] = ()


class Began(Struct, frozen=True, gc=False):
    """`computed` tokens need not be computed any more: fewer than all. `why` is not empty where it cannot run.

    `ticket`: where parts of the state can be fetched while the prompt is computed; empty where none go ahead.
    """

    request: str
    epoch: int
    computed: int
    why: str = ""
    retry: bool = True
    ticket: bytes = b""


class PrefillChunk(Struct, frozen=True, gc=False):
    """`count` tokens of a prompt from `start` on, on `rank`; `final` ends prompt and output so far."""

    request: str
    epoch: int
    rank: int
    start: int
    count: int
    final: bool


class RunPrefill(Struct, frozen=True, gc=False):
    """Prefill: one step of these chunks. Answer: `PrefillDone`. One step is under way at most."""

    step: int
    chunks: tuple[PrefillChunk, ...]


class PrefillDone(Struct, frozen=True, gc=False):
    """`failed`: requests that gave no distribution or have no memory, with the reason; the others went on.

    `ahead`: requests of the step that are further than it asked for, with the tokens that need no computing any more,
    as where an engine found the beginning of a prompt in its cache.
    """

    step: int
    seconds: float
    plan: int = 0
    failed: tuple[tuple[str, int, str], ...] = ()
    ahead: tuple[tuple[str, int, int], ...] = ()


class Export(Struct, frozen=True, gc=False):
    """Prefill, decode: copy a request's state out, all kinds, as the last step left it. Answer: `Exported`.

    The request does not run any more until `Thaw` or `Drop`. The manifest has all its tokens, and no `DecodeDone` tells
    any of them again; a request that has ended has no state, and the next `DecodeDone` tells its end.
    """

    request: str
    epoch: int


class Exported(Struct, frozen=True, gc=False):
    """The parts as the manifest numbers them, or `why` there are none."""

    request: str
    epoch: int
    manifest: Manifest | None
    parts: tuple[bytes, ...]
    why: str = ""


class Thaw(Struct, frozen=True, gc=False):
    """Decode: an exported request may run again. No answer."""

    request: str
    epoch: int


class Withdraw(Struct, frozen=True, gc=False):
    """Prefill: what an export left behind, for a target to fetch, is wanted no more; an unknown one is no error.

    No answer. `Drop` alone leaves it there, since a prompt's memory is given back before its state has been fetched.
    """

    request: str
    epoch: int


class Expect(Struct, frozen=True, gc=False):
    """Decode: begin to fetch a state while its prompt is computed; once a request. `Load` or `Drop` ends it.

    No answer.
    """

    request: str
    epoch: int
    ticket: bytes


class Load(Struct, frozen=True, gc=False):
    """Decode: take a state in. Answer: `Loaded`. `parts` stand beside `manifest.parts`."""

    request: str
    epoch: int
    spec: RequestSpec
    manifest: Manifest
    parts: tuple[bytes, ...]


class Loaded(Struct, frozen=True, gc=False):
    request: str
    epoch: int
    why: str = ""


class Rename(Struct, frozen=True, gc=False):
    """Decode: a loaded request is of a higher epoch from now on. No answer."""

    request: str
    epoch: int
    new_epoch: int


class RunDecode(Struct, frozen=True, gc=False):
    """Decode: one step of these requests, (request, epoch) each. Answer: `DecodeDone`. One is under way at most.

    An engine may step others that it holds too; their tokens are told once, when they are named or with their state.
    """

    step: int
    requests: tuple[Key, ...]


class DecodeOutput(Struct, frozen=True, gc=False):
    """What a step gave for one request: one token or more, none at its end.

    `reason`: "stop", "length" or "error" ends it; "preempted" means that its state is gone and it has to go on
    elsewhere, which is no end. `notes`: as in `Tokens`.
    """

    request: str
    epoch: int
    tokens: tuple[int, ...]
    reason: str = ""
    error: str = ""
    notes: tuple[bytes, ...] = ()


class DecodeDone(Struct, frozen=True, gc=False):
    step: int
    outputs: tuple[DecodeOutput, ...]
    plan: int = 0


class Drop(Struct, frozen=True, gc=False):
    """All: free what is held of a request, expected ones too; unknown ones are no error. Answer: `Dropped`."""

    request: str
    epoch: int


class Dropped(Struct, frozen=True, gc=False):
    request: str
    epoch: int


class RankDied(Struct, frozen=True, gc=False):
    """Event without a command: a rank of the group has died, and with it the state of every request of the group.

    Commands that were not answered before it never are.
    """

    rank: int


class Reform(Struct, frozen=True, gc=False):
    """All ranks that live form the group anew, without any request. Answer: `Reformed`, or `RankDied` once more.

    Ranks that hang are ended first. `number` counts groups of this worker.
    """

    number: int


class Reformed(Struct, frozen=True, gc=False):
    """`ranks` live; `room` and `rows` as in `Report`. No rank left, or too few for the experts: `why` is not empty."""

    number: int
    ranks: int
    room: float
    rows: int
    why: str = ""


Command = Encode | Begin | RunPrefill | Export | Withdraw | Thaw | Expect | Load | Rename | RunDecode | Drop | Reform
EngineEvent = EncodeDone | Began | PrefillDone | Exported | Loaded | DecodeDone | Dropped | RankDied | Reformed


class EnginePort(Protocol):
    """What stands behind a worker. `do` returns at once; answers come from `answers`, in order.

    In the simulator `answers` are put into its queue of events; over the real engine a thread makes them.
    """

    def do(self, command: Command) -> None: ...

    def answers(self) -> list[EngineEvent]:
        """Events since the last call."""
        ...


def is_command(action: Any) -> bool:
    """Whether an action of a core is for its engine."""
    return isinstance(action, _COMMANDS)


_COMMANDS = (Encode, Begin, RunPrefill, Export, Withdraw, Thaw, Expect, Load, Rename, RunDecode, Drop, Reform)
