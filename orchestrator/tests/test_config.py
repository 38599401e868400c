"""The named architectures, their derived numbers and the two dialects of config.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from orchestrator.model.config import ModelConfig
from orchestrator.model.presets import PRESETS, preset, v41_flash, v41_mini, v41_nano

# Of the published file.
FLASH_SHA256 = "8be45ce0476004a3f529fd896115a4a2e800a129ad2d3ec05b16050f52e21879"


def test_flash_is_the_published_file():
    text = json.dumps(v41_flash().to_hf(), indent=2) + "\n"
    assert hashlib.sha256(text.encode()).hexdigest() == FLASH_SHA256


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip(name):
    config = preset(name)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_vision_round_trip():
    for make in (v41_mini, v41_nano):
        config = make(vision=True)
        assert ModelConfig.from_hf(config.to_hf()) == config


def test_bytes_of_state():
    assert [preset(name).global_bytes_per_token for name in PRESETS] == [890, 890, 890, 106]
    for config in (v41_flash(), v41_mini()):
        assert (config.main_row_bytes, config.window_row_bytes, config.index_row_bytes) == (288, 528, 68)
        assert (config.ring_rows, config.tail_rows, config.keep_tokens) == (134, 7, 140)
        assert config.block_bytes == 113920
    nano = v41_nano()
    assert (nano.main_row_bytes, nano.window_row_bytes, nano.index_row_bytes) == (36, 66, 17)
    assert (nano.ring_rows, nano.tail_rows, nano.keep_tokens) == (38, 7, 44)


def test_draft_length_moves_the_rings():
    config = dataclasses.replace(v41_mini(), draft_length=2)
    assert (config.ring_rows, config.tail_rows, config.keep_tokens) == (131, 4, 134)
    assert v41_nano(stages=0).draft_length == 0


def test_layer_roles():
    config = v41_flash()
    assert config.encoder_layers == 20
    assert [config.kv_source(layer) for layer in (0, 1, 2, 7, 8, 19, 20, 39, 41)] == [
        None,
        None,
        2,
        2,
        8,
        14,
        20,
        20,
        None,
    ]
    assert [config.index_source(layer) for layer in (1, 2, 19, 23, 24, 39, 42)] == [None, 2, 14, 20, 24, 36, None]
    assert [layer for layer in range(43) if config.is_full(layer)] == [2, 8, 14, 20]
    assert [layer for layer in range(43) if config.is_reindex(layer)] == [24, 28, 32, 36]
    assert [layer for layer in range(43) if config.uses_candidates(layer)] == [24, 28, 32, 36]
    assert config.rows_per_block(2) == 64 and config.rows_per_block(20) == 128
    assert v41_mini().encoder_layers == 8 and v41_nano().encoder_layers == 6


def flat(config: ModelConfig) -> dict:
    """The same numbers as the reference's own file spells them."""
    text = config.to_hf()["text_config"]
    spelling = {
        "hidden_size": "dim", "moe_intermediate_size": "moe_inter_dim", "num_hidden_layers": "n_layers",
        "num_nextn_predict_layers": "n_mtp_layers", "num_attention_heads": "n_heads",
        "num_experts_per_tok": "n_activated_experts", "dspark_num_experts_per_tok": "dspark_n_activated_experts",
        "scoring_func": "score_func", "routed_scaling_factor": "route_scale", "qk_rope_head_dim": "rope_head_dim",
        "rms_norm_eps": "norm_eps", "sliding_window": "window_size", "kv_source_layer_ids": "kv_source_layers",
        "index_source_layer_ids": "index_source_layers", "candidate_source_layer_id": "candidate_source_layer",
        "engram_pad_token_id": "engram_pad_id",
    }  # fmt: skip
    drop = {"model_type", "rope_scaling", "hidden_act", "attention_bias", "attention_dropout", "use_cache"}
    drop |= {"initializer_range", "tie_word_embeddings", "num_key_value_heads", "topk_method", "norm_topk_prob"}
    out = {spelling.get(key, key): value for key, value in text.items() if key not in drop}
    rope = text["rope_scaling"]
    out |= {"original_seq_len": rope["original_max_position_embeddings"], "rope_factor": rope["factor"]}
    out |= {"beta_fast": rope["beta_fast"], "beta_slow": rope["beta_slow"], "dtype": "fp8", "expert_dtype": "fp4"}
    vision = config.vision
    if vision:
        names = {"n_layers": "num_hidden_layers", "dim": "hidden_size", "n_heads": "num_attention_heads"}
        names |= {"inter_dim": "intermediate_size", "max_n_token": "max_image_tokens"}
        for key in ("patch_size", "rope_theta", "downsample_ratio", "min_pixels", "max_wh_ratio"):
            names[key] = key
        out |= {f"vision_{key}": getattr(vision, name) for key, name in names.items()}
    return out


def test_flat_dialect():
    assert ModelConfig.from_hf(flat(v41_flash())) == v41_flash()
    assert ModelConfig.from_hf(flat(v41_nano()) | {"image_token_id": 510}) == v41_nano()
    with pytest.raises(ValueError, match=r"config\.json: got no image_token_id"):
        ModelConfig.from_hf(flat(v41_nano()))
    with pytest.raises(ValueError, match="got a second spelling of hidden_size"):
        ModelConfig.from_hf(flat(v41_flash()) | {"hidden_size": 5120})
    with pytest.raises(ValueError, match=r"dtype \(flat config\): got 'bf16', allowed is 'fp8'"):
        ModelConfig.from_hf(flat(v41_flash()) | {"dtype": "bf16"})


REFUSED = [
    ("text_config.hidden_act", "gelu", r"text_config\.hidden_act: got 'gelu', allowed is 'silu'"),
    ("text_config.attention_bias", True, r"text_config\.attention_bias: got True, allowed is False"),
    ("text_config.attention_dropout", 0.1, r"text_config\.attention_dropout: got 0\.1"),
    ("text_config.num_key_value_heads", 8, r"text_config\.num_key_value_heads: got 8, allowed is 1"),
    ("text_config.scoring_func", "sigmoid", r"text_config\.scoring_func: got 'sigmoid', allowed is 'sqrtsoftplus'"),
    ("text_config.tie_word_embeddings", True, r"text_config\.tie_word_embeddings: got True"),
    ("text_config.norm_topk_prob", False, r"text_config\.norm_topk_prob: got False, allowed is True"),
    ("text_config.n_shared_experts", 2, r"text_config\.n_shared_experts: got 2, allowed is 1"),
    ("text_config.num_hash_layers", 3, r"text_config\.num_hash_layers: got 3, allowed is 0"),
    ("text_config.hc_shifted", False, r"text_config\.hc_shifted: got False, allowed is True"),
    ("text_config.index_k_source_layer_ids", [2], r"text_config\.index_k_source_layer_ids: got \[2\]"),
    ("text_config.rope_scaling.rope_type", "linear", r"rope_scaling\.rope_type: got 'linear', allowed is 'yarn'"),
    ("text_config.rope_scaling.mscale", 1.0, r"rope_scaling\.mscale: got a setting that is not implemented"),
    ("text_config.dtype", "float32", r"text_config\.dtype: got 'float32', allowed is 'bfloat16'"),
    ("text_config.new_mechanism", 1, r"text_config\.new_mechanism: got a setting that is not implemented"),
    ("text_config.hidden_size", 5120.0, r"hidden_size: got 5120\.0, allowed is an integer"),
    ("text_config.compress_ratios", 2, r"compress_ratios: got 2, allowed is a list of integers"),
    (
        "quantization_config.weight_block_size",
        [128, 128],
        r"weight_block_size: got \[128, 128\], allowed is \[32, 32\]",
    ),
    ("quantization_config.expert_dtype", "fp8", r"expert_dtype: got 'fp8', allowed is 'fp4'"),
    ("quantization_config.scale_fmt", "float", r"scale_fmt: got 'float', allowed is 'ue8m0'"),
    ("model_type", "deepseek_v4", r"model_type: got 'deepseek_v4', allowed is 'deepseek_v41'"),
    ("dtype", "float16", r"dtype: got 'float16', allowed is 'bfloat16'"),
    ("vision_config.depth", 3, r"vision_config\.depth: got a setting that is not implemented"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_values(key, value, message):
    values = v41_flash().to_hf()
    *path, last = key.split(".")
    section = values
    for name in path:
        section = section[name]
    section[last] = value
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(values)


INCONSISTENT = [
    ({"hidden_size": 5100}, "hidden_size: got 5100, allowed is a multiple of 32"),
    ({"o_groups": 7}, "o_groups: got 7, allowed is a divisor of num_attention_heads"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok: got 0"),
    ({"num_experts_per_tok": 385}, "num_experts_per_tok: got 385, allowed is 1 to n_routed_experts"),
    ({"compress_ratios": (0,) * 40}, "compress_ratios: got 40 entries, allowed is one for each"),
    ({"kv_source_layer_ids": (2, 8, 14)}, r"kv_source_layer_ids: got \[2, 8, 14\].*one decoder layer, the first"),
    ({"kv_source_layer_ids": (2, 8, 14, 20, 24)}, r"kv_source_layer_ids: got .*24\].*one decoder layer"),
    ({"engram_max_ngram_size": 3}, "engram_max_ngram_size: got 3, allowed is 4"),
    ({"hc_mult": 2}, "hc_mult: got 2, allowed is 4"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps: got 0.0"),
    ({"kv_source_layer_ids": (8, 14, 20)}, "layer 2 of ratio 2 reading layer None"),
    ({"index_source_layer_ids": (2, 8, 20)}, "index_source_layer_ids: got"),
    ({"candidate_source_layer_id": 24}, "candidate_source_layer_id: got 24"),
    ({"candidate_block_size": 3}, "candidate_block_size: got 3, allowed is a divisor of 128"),
    ({"engram_num_embeddings": (5,)}, "engram_num_embeddings: got"),
    ({"engram_compressed_vocab_size": 129281}, "engram_compressed_vocab_size: got 129281"),
    ({"dspark_target_layer_ids": (3,)}, "dspark_target_layer_ids: got"),
    ({"draft_length": 6}, "draft_length: got 6, allowed is 0 to 5"),
    ({"image_token_id": 129280}, "image_token_id: got 129280"),
]


@pytest.mark.parametrize(("change", "message"), INCONSISTENT, ids=[str(next(iter(row[0]))) for row in INCONSISTENT])
def test_inconsistent_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(v41_flash(), **change)


def test_unknown_preset():
    with pytest.raises(ValueError, match="name: got 'v4', allowed is v41-flash, v41-flash-rank, v41-mini, v41-nano"):
        preset("v4")
