"""How much is measured. A figure's error is stated with it, so sizes change precision and not meaning."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.evaluate.bits import SCORED
from orchestrator.evaluate.recall import QUERIES
from orchestrator.model.config import ModelConfig

SECTIONS = ("bits", "replay", "acceptance", "calibration", "recall", "needle")


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    bits: windows of `window` tokens.
    replay: hit length -> windows.
    prompts, prompt_tokens: held-out texts that are continued, and their length.
    questions: conversations that are continued.
    output: tokens of each continuation.
    recall: context length -> texts.
    needle: text length -> trials at each depth.
    every_row: retrieval without selection too, up to this length.
    """

    bits: int
    replay: dict[int, int]
    prompts: int
    questions: int
    output: int
    recall: dict[int, int]
    needle: dict[int, int]
    window: int = 1280
    prompt_tokens: int = 384
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    every_row: int = 4096

    def within(self, config: ModelConfig, longest: int) -> Sizes:
        """What of it a model with so many positions and texts of at most `longest` tokens allow."""
        limit = min(config.max_position_embeddings, longest)
        keep = config.sliding_window
        return replace(
            self,
            window=min(self.window, limit),
            replay={h: n for h, n in self.replay.items() if keep < h and h + SCORED <= limit},
            prompt_tokens=min(self.prompt_tokens, limit - self.output),
            recall={c: n for c, n in self.recall.items() if keep + QUERIES < c <= limit},
            needle={c: n for c, n in self.needle.items() if c + 64 <= config.max_position_embeddings},
        )


SIZES = {
    "quick": Sizes(
        bits=8, replay={256: 4, 1024: 2}, prompts=8, questions=8, output=64,
        recall={1024: 2, 4096: 1}, needle={512: 1, 1024: 1, 4096: 1}, depths=(0.1, 0.5, 0.9), every_row=1024,
    ),
    "default": Sizes(
        bits=40, replay={256: 48, 1024: 32, 4096: 12}, prompts=32, questions=32, output=192,
        recall={1024: 8, 4096: 4, 16384: 2}, needle={512: 4, 1024: 8, 4096: 4, 16384: 2},
    ),
    "thorough": Sizes(
        bits=200, replay={256: 100, 1024: 64, 4096: 32}, prompts=96, questions=32, output=256,
        recall={1024: 12, 4096: 8, 16384: 4}, needle={512: 20, 1024: 20, 4096: 12, 16384: 5},
    ),
}  # fmt: skip
