"""What must hold between the numbers of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_core.check import require

if TYPE_CHECKING:
    from orchestrator.model.config import ModelConfig

_POSITIVE = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
]

# Every dimension that a quantised matrix has; a partial scale block in one of them would be a new layout.
_BLOCKED = ["hidden_size", "head_dim", "index_head_dim", "q_lora_rank", "o_lora_rank", "moe_intermediate_size"]


def check_config(config: ModelConfig) -> None:
    """Raise `ValueError` for numbers that contradict one another or that no code path serves."""
    for name in _POSITIVE:
        require(getattr(config, name) > 0, name, getattr(config, name), "a positive number")
    for name in _BLOCKED:
        require(getattr(config, name) % 32 == 0, name, getattr(config, name), "a multiple of 32 (the scale block)")
    rope = config.qk_rope_head_dim
    limit = min(config.head_dim, config.index_head_dim)
    require(rope % 2 == 0 and rope <= limit, "qk_rope_head_dim", rope, f"an even number up to {limit}")
    heads, groups = config.num_attention_heads, config.o_groups
    require(heads % groups == 0, "o_groups", groups, f"a divisor of num_attention_heads ({heads})")
    require(config.hc_mult == 4, "hc_mult", config.hc_mult, "4 (the number of residual streams)")
    require(config.rms_norm_eps > 0, "rms_norm_eps", config.rms_norm_eps, "a positive number")
    _check_experts(config)
    _check_roles(config)
    _check_engram(config)
    _check_drafter(config)
    _check_vision(config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = getattr(config, name)
        require(0 <= value < config.vocab_size, name, value, f"an id below vocab_size ({config.vocab_size})")


def _check_experts(config: ModelConfig) -> None:
    pairs = [("num_experts_per_tok", "n_routed_experts")]
    if config.num_nextn_predict_layers:
        pairs.append(("dspark_num_experts_per_tok", "dspark_n_routed_experts"))
    for name, total in pairs:
        chosen, experts = getattr(config, name), getattr(config, total)
        require(1 <= chosen <= experts, name, chosen, f"1 to {total} ({experts})")


def _check_roles(config: ModelConfig) -> None:
    layers, ratios = config.num_hidden_layers, config.compress_ratios
    length = layers + config.num_nextn_predict_layers
    require(
        len(ratios) == length,
        "compress_ratios",
        f"{len(ratios)} entries",
        f"one for each backbone layer and draft stage ({length})",
    )
    require(set(ratios) <= {0, 1, 2}, "compress_ratios", sorted(set(ratios)), "the values 0, 1 and 2")
    require(not any(ratios[layers:]), "compress_ratios", ratios[layers:], "0 for every draft stage")
    require(1 in ratios, "compress_ratios", ratios, "a decoder, that is layers of ratio 1")
    first = ratios.index(1)
    require(
        set(ratios[first:layers]) == {1}, "compress_ratios", ratios, "nothing but 1 from the first 1 to the last layer"
    )

    kv, index = config.kv_source_layer_ids, config.index_source_layer_ids
    for name, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        valid = list(ids) == sorted(set(ids)) and all(0 <= layer < layers and ratios[layer] for layer in ids)
        require(valid, name, list(ids), "ascending layers with a compress ratio above 0")
    require(set(kv) <= set(index), "index_source_layer_ids", list(index), f"all of kv_source_layer_ids {list(kv)}")
    decoder = [layer for layer in kv if layer >= first]
    require(decoder == [first], "kv_source_layer_ids", list(kv), f"one decoder layer, the first ({first}), among them")
    for layer in range(layers):
        if ratios[layer]:
            source = max((s for s in kv if s <= layer), default=None)
            got = f"layer {layer} of ratio {ratios[layer]} reading layer {source}"
            same = source is not None and ratios[source] == ratios[layer]
            require(same, "kv_source_layer_ids", got, "a source of the same ratio at or below each layer")

    source = config.candidate_source_layer_id
    if source != -1:
        require(
            source in kv and ratios[source] == 1, "candidate_source_layer_id", source, "-1 or a kv source of ratio 1"
        )
        for name in ("candidate_topk_blocks", "candidate_block_size"):
            require(getattr(config, name) > 0, name, getattr(config, name), "a positive number")
        size = config.candidate_block_size
        require(128 % size == 0, "candidate_block_size", size, "a divisor of 128, so that no block crosses a page")


def _check_engram(config: ModelConfig) -> None:
    ids, rows = config.engram_layer_ids, config.engram_num_embeddings
    valid = list(ids) == sorted(set(ids)) and all(0 <= layer < config.num_hidden_layers for layer in ids)
    require(valid, "engram_layer_ids", list(ids), f"ascending layers below {config.num_hidden_layers}")
    require(len(rows) == len(ids), "engram_num_embeddings", list(rows), f"one for each engram layer ({len(ids)})")
    if not ids:
        return
    orders = config.engram_max_ngram_size
    require(orders == 4, "engram_max_ngram_size", orders, "4 (the hash looks three tokens back)")
    dim = config.engram_head_dim
    require(dim > 0 and dim % 32 == 0, "engram_head_dim", dim, "a positive multiple of 32 (the scale block)")
    for name in ("engram_n_heads", "engram_vocab_size"):
        require(getattr(config, name) > 0, name, getattr(config, name), "a positive number")
    size, vocab = config.engram_compressed_vocab_size, config.vocab_size
    require(1 <= size <= vocab, "engram_compressed_vocab_size", size, f"1 to vocab_size ({vocab})")
    pad = config.engram_pad_token_id
    require(0 <= pad < vocab, "engram_pad_token_id", pad, f"an id below vocab_size ({vocab})")


def _check_drafter(config: ModelConfig) -> None:
    stages, length = config.num_nextn_predict_layers, config.draft_length
    require(stages >= 0, "num_nextn_predict_layers", stages, "0 or more")
    most = config.dspark_block_size if stages else 0
    require(0 <= length <= most, "draft_length", length, f"0 to {most} (dspark_block_size, or 0 without draft stages)")
    if not stages:
        return
    noise, taps = config.dspark_noise_token_id, config.dspark_target_layer_ids
    require(0 <= noise < config.vocab_size, "dspark_noise_token_id", noise, f"an id below {config.vocab_size}")
    valid = bool(taps) and all(config.encoder_layers <= layer < config.num_hidden_layers for layer in taps)
    # Prefill runs decoder layers on the last tokens only; a tap elsewhere would be computed on other rows.
    require(valid, "dspark_target_layer_ids", list(taps), "decoder layers")
    rank = config.dspark_markov_rank
    require(rank > 0, "dspark_markov_rank", rank, "a positive number")
    given = config.dspark_confidence_temperatures
    allowed = f"none, or a positive number for each of the {config.dspark_block_size} positions"
    fits = len(given) in (0, config.dspark_block_size) and all(0 < value < float("inf") for value in given)
    require(fits, "dspark_confidence_temperatures", list(given), allowed)


def _check_vision(config: ModelConfig) -> None:
    vision = config.vision
    if vision is None:
        return
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size")
    for name in (*sizes, "downsample_ratio", "min_pixels"):
        require(getattr(vision, name) > 0, f"vision.{name}", getattr(vision, name), "a positive number")
    width, heads = vision.hidden_size, vision.num_attention_heads
    # A head's channels: two halves that turn against each other, each with the angles of a row and of a column.
    require(width % (4 * heads) == 0, "vision.hidden_size", width, f"a multiple of 4 * num_attention_heads {4 * heads}")
    theta, tokens = vision.rope_theta, vision.max_image_tokens
    require(theta > 0, "vision.rope_theta", theta, "a positive number")
    require(tokens >= 4, "vision.max_image_tokens", tokens, "4 or more: one image token, its newline and the frame")
    ratio = vision.max_wh_ratio
    require(ratio is None, "vision.max_wh_ratio", ratio, "None (nothing else is implemented)")
