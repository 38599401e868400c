"""The named architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestrator.model.config import ModelConfig, VisionConfig

# Sums of the Engram bucket sizes of the small models; `engram_tables` derives them and refuses others.
_NANO_ROWS = (3252, 3496)
_MINI_ROWS = (12764, 13780)
_RANK_ROWS = (1574980, 1580602)


def v41_flash() -> ModelConfig:
    """DeepSeek-V4.1-Flash as published: 552B parameters, 16B of them active."""
    return ModelConfig(
        vocab_size=129280,
        hidden_size=5120,
        num_hidden_layers=40,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_groups=8,
        o_lora_rank=1024,
        sliding_window=128,
        compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
        kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        moe_intermediate_size=2304,
        n_routed_experts=384,
        num_experts_per_tok=6,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682),
        engram_vocab_size=16_000_000,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_compressed_vocab_size=99092,
        num_nextn_predict_layers=3,
        dspark_noise_token_id=128799,
        dspark_target_layer_ids=(37, 38, 39),
        dspark_markov_rank=256,
        dspark_n_routed_experts=128,
        dspark_num_experts_per_tok=3,
        image_token_id=129264,
        vision=VisionConfig(num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816),
    )


def v41_flash_rank() -> ModelConfig:
    """One of 64 ranks that share the experts of `v41_flash`: full width and depth, 6 routed experts a layer.

    Every token goes to all six. So a rank with B requests a step multiplies B rows by each of them, as it would with
    64 B requests on 64 ranks and experts that are chosen evenly; what ranks send each other is left out. Draft
    stages have three experts, all of which a token goes to: as many rows as 2 of 128 experts get there, over one expert
    more. Engram tables are small. No images.
    """
    flash = v41_flash()
    return replace(
        flash,
        n_routed_experts=6,
        dspark_n_routed_experts=flash.dspark_num_experts_per_tok,
        engram_vocab_size=65536,
        engram_num_embeddings=_RANK_ROWS,
        engram_compressed_vocab_size=flash.vocab_size,
        vision=None,
    )


def v41_mini(*, vision: bool = False) -> ModelConfig:
    """30M parameters with the production row formats (288, 528 and 68 bytes) and every mechanism.

    `engram_compressed_vocab_size` is that of the identity map until a tokenizer says otherwise.
    """
    return ModelConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=16,
        num_attention_heads=4,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=128,
        compress_ratios=(0,) * 2 + (2,) * 6 + (1,) * 8 + (0,) * 3,
        kv_source_layer_ids=(2, 4, 6, 8),
        index_source_layer_ids=(2, 4, 6, 8, 10, 12, 14),
        index_n_heads=8,
        index_head_dim=128,
        index_topk=64,
        candidate_source_layer_id=8,
        candidate_topk_blocks=64,
        candidate_block_size=8,
        moe_intermediate_size=64,
        n_routed_experts=12,
        num_experts_per_tok=2,
        engram_layer_ids=(1, 6),
        engram_num_embeddings=_MINI_ROWS,
        engram_vocab_size=1031,
        engram_n_heads=4,
        engram_head_dim=32,
        engram_compressed_vocab_size=4096,
        num_nextn_predict_layers=3,
        dspark_noise_token_id=4093,
        dspark_target_layer_ids=(13, 14, 15),
        dspark_markov_rank=32,
        dspark_n_routed_experts=6,
        dspark_num_experts_per_tok=2,
        image_token_id=4094,
        max_position_embeddings=65536,
        original_max_position_embeddings=4096,
        vision=_small_vision(intermediate_size=128) if vision else None,
    )


def v41_nano(*, stages: int = 3, vision: bool = False) -> ModelConfig:
    """3M parameters, for unit tests: short rows (36, 66 and 17 bytes), a window of 32, `stages` draft stages."""
    return ModelConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        sliding_window=32,
        compress_ratios=(0,) * 2 + (2,) * 4 + (1,) * 6 + (0,) * stages,
        kv_source_layer_ids=(2, 4, 6),
        index_source_layer_ids=(2, 4, 6, 8, 10),
        index_n_heads=4,
        index_head_dim=32,
        index_topk=16,
        candidate_source_layer_id=6,
        candidate_topk_blocks=16,
        candidate_block_size=4,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        engram_layer_ids=(1, 4),
        engram_num_embeddings=_NANO_ROWS,
        engram_vocab_size=521,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_compressed_vocab_size=512,
        num_nextn_predict_layers=stages,
        dspark_noise_token_id=509,
        dspark_target_layer_ids=(9, 10, 11),
        dspark_markov_rank=16,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        image_token_id=510,
        max_position_embeddings=4096,
        original_max_position_embeddings=256,
        vision=_small_vision(intermediate_size=96) if vision else None,
    )


def _small_vision(*, intermediate_size: int) -> VisionConfig:
    return VisionConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=intermediate_size)


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "v41-flash": v41_flash,
    "v41-flash-rank": v41_flash_rank,
    "v41-mini": v41_mini,
    "v41-nano": v41_nano,
}


def preset(name: str) -> ModelConfig:
    """The architecture of that name; `ValueError` lists the names there are."""
    if name not in PRESETS:
        raise ValueError(f"name: got {name!r}, allowed is {', '.join(PRESETS)}")
    return PRESETS[name]()
