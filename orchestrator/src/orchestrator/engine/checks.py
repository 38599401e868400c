"""What can be said of a request before anything is computed: whether it can ever run."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_core.check import require
from orchestrator.engine.image_spans import PlacedImage, check_images
from orchestrator.engine.request import SamplingParams
from orchestrator.model.config import ModelConfig


def check_request(
    prompt: list[int],
    params: SamplingParams,
    images: Sequence[PlacedImage],
    *,
    model: ModelConfig,
    context: int,
    has_tokenizer: bool,
) -> None:
    """Raise ValueError for what can never run: empty or too long prompt, unknown token, misplaced image.

    `context` is the longest request in tokens. Without tokenizer there are no stop strings and no grammars.
    """
    vocab = model.vocab_size
    known = f"an integer from 0 to {vocab - 1}"
    require(isinstance(params, SamplingParams), "params", repr(params), "SamplingParams")
    require(len(prompt) > 0, "prompt", "no tokens", "at least one")
    for token in prompt:
        if not (isinstance(token, int) and 0 <= token < vocab):
            raise ValueError(f"prompt: got token {token!r}, allowed is {known}")
    if len(prompt) >= context:
        raise ValueError(
            f"prompt: got {len(prompt)} tokens, allowed is at most {context - 1} (context {context} "
            "less one token to sample); raise max_model_len or num_blocks, or shorten the prompt"
        )
    if not has_tokenizer:
        for name in ("stop", "grammar"):
            given = getattr(params, name)
            require(not given, name, repr(given), "nothing, since the engine has no tokenizer")
    for token in params.stop_token_ids:
        require(0 <= token < vocab, "stop_token_ids", token, known)
    check_images(prompt, images, model)
