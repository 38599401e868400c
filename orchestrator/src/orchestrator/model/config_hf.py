"""`config.json` to `ModelConfig` and back: the nested Hugging Face dialect and the reference's flat one.

A value that would change the computation and that nothing here implements is refused, and so is a key that nobody
knows: an ignored setting gives fluent but wrong text.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from orchestrator.model.config import ModelConfig, VisionConfig

_QUANTISATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

# The text configuration in published order. A fixed value is the only one implemented; None is a field of ModelConfig.
_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": None,
    "hidden_size": None,
    "moe_intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": 1,
    "head_dim": None,
    "qk_rope_head_dim": None,
    "q_lora_rank": None,
    "o_lora_rank": None,
    "o_groups": None,
    "hidden_act": "silu",
    "swiglu_limit": None,
    "rms_norm_eps": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": None,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": None,
    "rope_theta": None,
    "rope_scaling": None,
    "n_routed_experts": None,
    "n_shared_experts": 1,
    "num_experts_per_tok": None,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "sliding_window": None,
    "compress_ratios": None,
    "compress_rope_theta": None,
    "kv_source_layer_ids": None,
    "index_source_layer_ids": None,
    "index_n_heads": None,
    "index_head_dim": None,
    "index_topk": None,
    "candidate_source_layer_id": None,
    "candidate_topk_blocks": None,
    "candidate_block_size": None,
    "hc_mult": None,
    "hc_sinkhorn_iters": None,
    "hc_eps": None,
    "engram_layer_ids": None,
    "engram_num_embeddings": None,
    "engram_max_ngram_size": None,
    "engram_vocab_size": None,
    "engram_n_heads": None,
    "engram_head_dim": None,
    "engram_pad_token_id": None,
    "engram_compressed_vocab_size": None,
    "num_nextn_predict_layers": None,
    "dspark_block_size": None,
    "dspark_noise_token_id": None,
    "dspark_target_layer_ids": None,
    "dspark_markov_rank": None,
    "dspark_n_routed_experts": None,
    "dspark_num_experts_per_tok": None,
    "dspark_confidence_temperatures": None,
}

_ROPE = {"factor": "rope_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
_ROPE["original_max_position_embeddings"] = "original_max_position_embeddings"

# Keys that some engines look for, with the only value implemented here.
_SWITCHES: dict[str, Any] = {
    "gate_temp": 1.0,
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
    "num_hash_layers": 0,
}

# Keys without influence on what is computed here; `use_cache` is how a caller generates.
_IGNORED = {"use_cache", "transformers_version", "torch_dtype", "_name_or_path", "auto_map", "tokenizer_compatibility"}
_IGNORED |= {"max_batch_size", "max_seq_len", "temperature"}

_ROOT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")

# Flat dialect: its spelling of a nested key.
_FLAT = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_layers": "engram_layer_ids",
    "engram_pad_id": "engram_pad_token_id",
    "dspark_target_layers": "dspark_target_layer_ids",
    "dspark_noise_id": "dspark_noise_token_id",
}
_FLAT_ROPE = {"original_seq_len": "original_max_position_embeddings", "rope_factor": "factor"}
_FLAT_ROPE |= {"beta_fast": "beta_fast", "beta_slow": "beta_slow"}
_FLAT_VISION = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}
_FLAT_IMAGE_TOKEN = {129280: 129264}
"""The flat dialect names no image token; known by vocabulary size."""


def from_hf(values: dict[str, Any]) -> ModelConfig:
    """Read either dialect. Raises `ValueError` naming the key, what it holds and what is supported."""
    if not isinstance(values, dict):
        raise ValueError(f"config.json: got {type(values).__name__}, allowed is an object")
    return _nested(values if "text_config" in values else _unflatten(values))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The nested dialect, in published key order."""
    text: dict[str, Any] = {}
    for key, fixed in _TEXT.items():
        if key == "rope_scaling":
            text[key] = {"rope_type": "yarn"} | {hf: getattr(config, ours) for hf, ours in _ROPE.items()}
        elif fixed is not None:
            text[key] = fixed
        else:
            value = getattr(config, key)
            if key == "dspark_confidence_temperatures" and not value:
                continue  # the published configuration has no such key
            text[key] = list(value) if isinstance(value, tuple) else value
    root: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "transformers_version": "5.6.0",
        **{key: getattr(config, key) for key in _ROOT_IDS},
        "quantization_config": dict(_QUANTISATION),
        "text_config": text,
    }
    if config.vision is not None:
        numbers = {f.name: getattr(config.vision, f.name) for f in fields(VisionConfig)}
        root["vision_config"] = {"model_type": "deepseek_v41_vision"} | numbers
    return root


def _nested(root: dict[str, Any]) -> ModelConfig:
    _expect("architectures", root.get("architectures", ["DeepseekV41ForCausalLM"]), ["DeepseekV41ForCausalLM"])
    _expect("model_type", root.get("model_type", "deepseek_v41"), "deepseek_v41")
    _expect("dtype", root.get("dtype", "bfloat16"), "bfloat16")
    quantisation = _section(root, "quantization_config")
    for key, value in _QUANTISATION.items():
        _expect(f"quantization_config.{key}", quantisation.get(key), value)
    _refuse_unknown("quantization_config", quantisation, set(_QUANTISATION))
    sections = {"architectures", "model_type", "dtype", "quantization_config", "text_config", "vision_config"}
    _refuse_unknown("", root, sections | set(_ROOT_IDS) | {"tie_word_embeddings"})
    _expect("tie_word_embeddings", root.get("tie_word_embeddings", False), False)

    numbers = _text_numbers(_section(root, "text_config"))
    for key in _ROOT_IDS:
        if key in root:
            numbers[key] = root[key]
    if root.get("vision_config") is not None:
        numbers["vision"] = _vision_numbers(_section(root, "vision_config"))
    required = [f.name for f in fields(ModelConfig) if f.name in _TEXT or f.name in _ROOT_IDS]
    missing = [
        name for name in required if name not in numbers and ModelConfig.__dataclass_fields__[name].default is MISSING
    ]
    if missing:
        raise ValueError(f"config.json: got no {', '.join(missing)}; these have no default, add them")
    _check_types(ModelConfig, numbers)
    return ModelConfig(**numbers)


def _text_numbers(text: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for key, fixed in _TEXT.items():
        if key not in text or key in _IGNORED:
            continue
        if key == "rope_scaling":
            numbers |= _rope_numbers(text[key])
        elif fixed is not None:
            _expect(f"text_config.{key}", text[key], fixed)
        else:
            value = text[key]
            numbers[key] = tuple(value) if isinstance(value, list) else value
    for key, value in _SWITCHES.items():
        _expect(f"text_config.{key}", text.get(key, value), value)
    _expect("text_config.dtype", text.get("dtype", "bfloat16"), "bfloat16")
    index_k = text.get("index_k_source_layer_ids", text.get("kv_source_layer_ids"))
    _expect("text_config.index_k_source_layer_ids", index_k, text.get("kv_source_layer_ids"))
    known = set(_TEXT) | set(_SWITCHES) | set(_ROOT_IDS) | {"index_k_source_layer_ids", "dtype"}
    _refuse_unknown("text_config", text, known)
    for key in _ROOT_IDS:
        if text.get(key) is not None:
            numbers[key] = text[key]
    return numbers


def _rope_numbers(rope: Any) -> dict[str, Any]:
    if not isinstance(rope, dict):
        raise ValueError(f"text_config.rope_scaling: got {rope!r}, allowed is an object of rope_type yarn")
    # "type" is the older spelling of the same key.
    _expect("text_config.rope_scaling.rope_type", rope.get("rope_type", rope.get("type")), "yarn")
    _refuse_unknown("text_config.rope_scaling", rope, set(_ROPE) | {"rope_type", "type"})
    missing = [key for key in _ROPE if key not in rope]
    if missing:
        raise ValueError(f"text_config.rope_scaling: got no {', '.join(missing)}; add them")
    return {ours: rope[key] for key, ours in _ROPE.items()}


def _vision_numbers(vision: dict[str, Any]) -> VisionConfig:
    names = {f.name for f in fields(VisionConfig)}
    _expect("vision_config.model_type", vision.get("model_type", "deepseek_v41_vision"), "deepseek_v41_vision")
    _refuse_unknown("vision_config", vision, names | {"model_type"})
    missing = [f.name for f in fields(VisionConfig) if f.default is MISSING and f.name not in vision]
    if missing:
        raise ValueError(f"vision_config: got no {', '.join(missing)}; add them")
    numbers = {name: vision[name] for name in names if name in vision}
    _check_types(VisionConfig, numbers)
    return VisionConfig(**numbers)


def _unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = {}
    rope: dict[str, Any] = {"rope_type": "yarn"}
    vision: dict[str, Any] = {}
    root: dict[str, Any] = {"quantization_config": dict(_QUANTISATION)}
    for key, value in flat.items():
        if key == "dtype":
            _expect("dtype (flat config)", value, "fp8")
        elif key in ("expert_dtype", "scale_fmt"):
            _expect(f"{key} (flat config)", value, _QUANTISATION[key])
        elif key in _FLAT_VISION:
            vision[_FLAT_VISION[key]] = value
        elif key in _FLAT_ROPE:
            rope[_FLAT_ROPE[key]] = value
        elif key in _ROOT_IDS:
            root[key] = value
        elif (name := _FLAT.get(key, key)) in text:
            raise ValueError(f"{key}: got a second spelling of {name}; remove one of the two")
        else:
            text[name] = value
    if "vocab_size" not in text or "hidden_size" not in text:
        raise ValueError("config.json: got neither a text_config section nor the flat keys vocab_size and dim")
    if len(rope) > 1:
        text.setdefault("rope_scaling", rope)
    if "image_token_id" not in root and text["vocab_size"] in _FLAT_IMAGE_TOKEN:
        root["image_token_id"] = _FLAT_IMAGE_TOKEN[text["vocab_size"]]
    return root | {"text_config": text, "vision_config": vision or None}


def _expect(key: str, got: Any, allowed: Any) -> None:
    if got != allowed or isinstance(got, bool) != isinstance(allowed, bool):
        raise ValueError(f"{key}: got {got!r}, allowed is {allowed!r} (nothing else is implemented)")


def _refuse_unknown(section: str, values: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(values) - known - _IGNORED)
    if unknown:
        place = f"{section}." if section else ""
        names = ", ".join(place + key for key in unknown)
        raise ValueError(
            f"{names}: got a setting that is not implemented; remove it if the weights do not depend on it"
        )


def _section(root: dict[str, Any], key: str) -> dict[str, Any]:
    value = root.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key}: got {value!r}, allowed is an object")
    return value


def _check_types(owner: type, numbers: dict[str, Any]) -> None:
    """Integers where the dataclass says int, whole tuples of them where it says tuple."""
    for f in fields(owner):
        if f.name not in numbers:
            continue
        value = numbers[f.name]
        if f.type == "int" and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{f.name}: got {value!r}, allowed is an integer")
        if f.type == "float" and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            raise ValueError(f"{f.name}: got {value!r}, allowed is a number")
        if f.type == "tuple[int, ...]" and not (isinstance(value, tuple) and all(type(v) is int for v in value)):
            raise ValueError(f"{f.name}: got {value!r}, allowed is a list of integers")
        if f.type == "tuple[float, ...]" and not (
            isinstance(value, tuple) and all(type(v) in (int, float) for v in value)
        ):
            raise ValueError(f"{f.name}: got {value!r}, allowed is a list of numbers")
