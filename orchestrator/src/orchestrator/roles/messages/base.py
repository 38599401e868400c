"""What all messages share, and what a request is."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kernel_core.check import require

Role = Literal["encoder", "prefill", "decode"]
Life = Literal["active", "draining", "reforming"]
Outcome = Literal["finished", "failed", "cancelled", "rejected"]
Key = tuple[str, int]  # request and epoch


class Wire(Struct, frozen=True, gc=False, tag=True):
    """A message that may travel between processes, encoded by `msgspec`; `messages.Message` decodes it."""


class Image(Struct, frozen=True, gc=False):
    """`digest` of the preprocessed pixels; `patches` that it is cut into."""

    digest: str
    patches: int


class RequestSpec(Struct, frozen=True, gc=False):
    """A request as its client gave it.

    Attributes:
        prompt: token ids. hit: how many of them were found in the store, fewer than all.
        max_tokens: of output. seed: of sampling, drawn before if the client gave none: draws depend on it and on the
            position alone, so a request goes on elsewhere as it would have here.
        grammar: constraint on the output as text, empty for none. expected_output: tokens that placement plans with.
        params: everything else, encoded; cores pass it on.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    tenant: str = ""
    hit: int = 0
    images: tuple[Image, ...] = ()
    grammar: str = ""
    expected_output: int = 256
    params: bytes = b""

    def __post_init__(self) -> None:
        require(len(self.prompt) > 0, "prompt", "no tokens", "at least one")
        require(self.max_tokens > 0, "max_tokens", self.max_tokens, "1 or more")
        require(0 <= self.hit < len(self.prompt), "hit", self.hit, f"0 to {len(self.prompt) - 1}")
        require(self.expected_output >= 0, "expected_output", self.expected_output, "0 or more")
