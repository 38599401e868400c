"""Special tokens of the small vocabularies: names and places follow the rules of the full one.

The full vocabulary of 129,280 entries opens with BOS, EOS and PAD and closes with control tokens. Small
vocabularies keep that shape and fix two places relative to their end, which the model configuration relies on:
the drafter's noise id (the row of ``<｜System｜>``) is ``vocab - 3`` and the image placeholder is ``vocab - 2``.
"""

from __future__ import annotations

from typing import NamedTuple


class Special(NamedTuple):
    """One added token. ``control`` tokens never appear in decoded text; the others are markup that parsers read."""

    text: str
    control: bool


BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK_START, THINK_END, DSML = "<think>", "</think>", "｜DSML｜"
#: The image placeholder: the spelling of this project's tokenizers, then the one of the published checkpoint.
IMAGE_SPELLINGS = ("<｜image｜>", "<｜deepseek_image｜>")

LEADING = tuple(Special(text, True) for text in (BOS, EOS, PAD))

_TOOL_PARTS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "outputs▁begin", "outputs▁end")
_TOOLS = tuple(f"<｜tool▁{part}｜>" for part in (*_TOOL_PARTS, "output▁begin", "output▁end", "sep"))
_REGIONS = tuple(f"<｜{slash}{shape}｜>" for shape in ("polygon", "point", "box", "ref") for slash in ("/", ""))

TRAILING = (
    *(Special(f"<｜fim▁{part}｜>", True) for part in ("hole", "begin", "end")),
    Special(USER, True),
    Special(ASSISTANT, True),
    Special("<|EOT|>", True),
    *(Special(text, True) for text in _TOOLS),
    Special(THINK_START, False),
    Special(THINK_END, False),
    Special(DSML, False),
    Special("<｜latest_reminder｜>", True),
    *(Special(text, False) for text in _REGIONS),
    Special(SYSTEM, True),
    Special(IMAGE_SPELLINGS[0], True),
    Special("<|place_holder_mm_span_0000|>", True),
)

#: Vocabulary sizes of the models whose tokenizers this project ships.
SMALL_VOCABULARIES = {"v41-mini": 4096, "v41-nano": 512}
