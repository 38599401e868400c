"""The numbers of a checkpoint that the oracle needs, read from the nested (Hugging Face) `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Config:
    """Shapes and constants of the text model. Names follow the checkpoint's own configuration keys."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    rms_norm_eps: float
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    @property
    def decoder_start_layer(self) -> int:
        """The first layer of ratio 1: where the causal encoder ends and the decoder begins."""
        return self.compress_ratios[: self.num_hidden_layers].index(1)

    @property
    def keep_tokens(self) -> int:
        """Rows of the decoder tail: the window plus twice the maximal backtracking."""
        return self.sliding_window + 2 * (self.dspark_block_size + 1)

    def kv_source(self, layer: int) -> int:
        """The layer whose main and index rows `layer` reads: the nearest source at or below it."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose top-k selection `layer` uses."""
        return max(s for s in self.index_source_layer_ids if s <= layer)

    def uses_candidates(self, layer: int) -> bool:
        """Whether the layer scores only inside the candidate blocks that the candidate source published."""
        return layer in self.index_source_layer_ids and layer > self.candidate_source_layer_id >= 0


def config_from_dict(hf: dict[str, Any]) -> Config:
    """Builds a `Config` from the nested dialect; a missing key is a KeyError with its name."""
    text = dict(hf["text_config"])
    scaling = text.pop("rope_scaling")
    text["rope_factor"] = scaling["factor"]
    for name in ("beta_fast", "beta_slow", "original_max_position_embeddings"):
        text[name] = scaling[name]
    values: dict[str, Any] = {name: text[name] for name in Config.__dataclass_fields__}
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return Config(**values)


def read_config(folder: str | Path) -> Config:
    """Reads `config.json` of a checkpoint folder."""
    return config_from_dict(json.loads((Path(folder) / "config.json").read_text()))
