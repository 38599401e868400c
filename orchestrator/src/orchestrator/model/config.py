"""The model's numbers, under the names of the Hugging Face text configuration, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 128
"""Tokens of one cache block."""

WEIGHT_BLOCK = 32
"""Side of a quantisation block: 32 x 32 of a dense weight, 32 along K of an expert weight or a table row."""


@dataclass(frozen=True)
class VisionConfig:
    """The image encoder (`vision_config`)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int = 14
    rope_theta: float = 10000
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V4.1 architecture. Built by `from_hf` or a preset; inconsistent numbers raise `ValueError`.

    Layer numbers are those of the backbone; `num_hidden_layers + s` is draft stage s.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    # attention
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    # which layer owns which state
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    # experts
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    # engram
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_compressed_vocab_size: int
    # draft stages
    num_nextn_predict_layers: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    image_token_id: int
    dspark_block_size: int = 5
    dspark_confidence_temperatures: tuple[float, ...] = ()
    """Divides the confidence logit of each draft position; empty stands for ones. Not a key of the published model."""
    engram_max_ngram_size: int = 4
    engram_pad_token_id: int = 2
    # numerics
    swiglu_limit: float = 10.0
    routed_scaling_factor: float = 1.5
    rms_norm_eps: float = 1e-20
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    initializer_range: float = 0.02
    # positions: the plain theta serves layers without compressed rows, the other one with YaRN all others
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000
    compress_rope_theta: float = 160000
    rope_factor: float = 16
    beta_fast: float = 32
    beta_slow: float = 1
    original_max_position_embeddings: int = 65536
    # special tokens
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    vision: VisionConfig | None = None
    draft_length: int = -1
    """Drafts proposed a step, at most `dspark_block_size`. -1 becomes all of them, 0 without draft stages."""

    def __post_init__(self) -> None:
        from orchestrator.model.config_check import check_config

        if self.draft_length == -1:
            default = self.dspark_block_size if self.num_nextn_predict_layers else 0
            object.__setattr__(self, "draft_length", default)
        check_config(self)

    @staticmethod
    def from_hf(values: dict[str, Any]) -> ModelConfig:
        """Read `config.json`, nested (Hugging Face) or flat (the reference's `inference/config.json`)."""
        from orchestrator.model.config_hf import from_hf

        return from_hf(values)

    def to_hf(self) -> dict[str, Any]:
        """The nested `config.json`, keys in the published order."""
        from orchestrator.model.config_hf import to_hf

        return to_hf(self)

    # Layer roles

    def ratio(self, layer: int) -> int:
        """Tokens a compressed row of this layer's source stands for; 0 where a layer sees its window only."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose main and index rows `layer` reads; None where a layer sees its window only."""
        return _nearest_below(self.kv_source_layer_ids, layer) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection `layer` uses; None where a layer sees its window only."""
        return _nearest_below(self.index_source_layer_ids, layer) if self.ratio(layer) else None

    def is_full(self, layer: int) -> bool:
        """Does the layer write main and index rows (and select from them)?"""
        return layer in self.kv_source_layer_ids

    def is_reindex(self, layer: int) -> bool:
        """Does the layer select anew from the rows of another layer?"""
        return layer in self.index_source_layer_ids and layer not in self.kv_source_layer_ids

    def uses_candidates(self, layer: int) -> bool:
        """Is the layer's selection restricted to the blocks that the candidate source published?"""
        return 0 <= self.candidate_source_layer_id < layer and self.is_reindex(layer)

    @property
    def encoder_layers(self) -> int:
        """Layers of the causal encoder: those before the first one with a row a token."""
        return self.compress_ratios.index(1)

    @property
    def engram_columns(self) -> int:
        """Table rows looked up for one token in one Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def engram_rows(self, layer: int) -> int:
        """Rows of the layer's Engram table."""
        return self.engram_num_embeddings[self.engram_layer_ids.index(layer)]

    # Bytes of state

    @property
    def main_row_bytes(self) -> int:
        """A main row: two E2M1 codes a byte, then an E4M3 scale for 16 values."""
        return self.head_dim // 2 + self.head_dim // 16

    @property
    def window_row_bytes(self) -> int:
        """A window row: E4M3 values, then a UE8M0 scale for 32 of them."""
        return self.head_dim + self.head_dim // 32

    @property
    def index_row_bytes(self) -> int:
        """An index key: two E2M1 codes a byte, and a UE8M0 scale for 32 values."""
        return self.index_head_dim // 2 + self.index_head_dim // 32

    def rows_per_block(self, layer: int) -> int:
        """Compressed rows that a source layer writes for one block of `BLOCK_TOKENS` tokens."""
        return BLOCK_TOKENS // self.ratio(layer)

    @property
    def block_bytes(self) -> int:
        """Main rows and index keys of all sources for one block of `BLOCK_TOKENS` tokens."""
        row = self.main_row_bytes + self.index_row_bytes
        return sum(self.rows_per_block(layer) * row for layer in self.kv_source_layer_ids)

    @property
    def global_bytes_per_token(self) -> float:
        """Cache bytes that one token of context adds (an int wherever it is whole)."""
        whole, rest = divmod(self.block_bytes, BLOCK_TOKENS)
        return self.block_bytes / BLOCK_TOKENS if rest else whole

    @property
    def backtracking(self) -> int:
        """Positions that a rejected draft can take back: the drafts and the token they follow."""
        return self.draft_length + 1

    @property
    def ring_rows(self) -> int:
        """Rows of a window ring."""
        return self.sliding_window + self.backtracking

    @property
    def tail_rows(self) -> int:
        """Rows of a ratio-2 compressor's tail."""
        return 2 + self.backtracking - 1

    @property
    def keep_tokens(self) -> int:
        """Last prompt tokens on which the decoder layers run at prefill."""
        return self.sliding_window + 2 * self.backtracking


def _nearest_below(sources: tuple[int, ...], layer: int) -> int:
    return max(source for source in sources if source <= layer)
