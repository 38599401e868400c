"""The same model without selection: every visible compressed row is read. What selecting costs is the difference."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.model.transformer import Transformer


def reading_every_row(model: Transformer, tokens: int) -> Transformer:
    """A model over the same weights whose selections hold all rows of up to so many tokens."""
    config = model.config
    blocks = -(-tokens // config.candidate_block_size)
    wide = replace(config, index_topk=max(tokens, config.index_topk),
                   candidate_topk_blocks=max(blocks, config.candidate_topk_blocks))  # fmt: skip
    return Transformer(replace(model.weights, config=wide), model.tables)
