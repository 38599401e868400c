"""A very small configuration with every mechanism, and random tensors for it in the checkpoint's storage classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from .config import Config, config_from_dict
from .engram import bucket_primes
from .formats import E2M1, E4M3, _power_of_two_byte, nearest
from .weights import Stored


def small_config(**changes: Any) -> Config:
    """8 layers: window only | full, reuse, full (ratio 2) | full with candidates, reuse, reindex, reuse (ratio 1)."""
    text = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "sliding_window": 8,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0],
        "kv_source_layer_ids": [1, 3, 4],
        "index_source_layer_ids": [1, 3, 4, 6],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 4,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 256},
        "rms_norm_eps": 1e-20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "moe_intermediate_size": 32,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [0, 0],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 31,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 64,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 61,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 16,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    text.update(changes)
    sums = bucket_primes(config_from_dict({"text_config": text})).sum((1, 2))
    text["engram_num_embeddings"] = [int(s) for s in sums]
    return config_from_dict({"text_config": text})


class _Maker:
    """Random tensors by storage class; values are of unit variance after a matrix of unit inputs."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.out: dict[str, Stored] = {}

    def f32(self, name: str, values: np.ndarray) -> None:
        self.out[name] = Stored("F32", values.astype(np.float32))

    def bf16(self, name: str, values: np.ndarray) -> None:
        self.out[name] = Stored("BF16", (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))

    def norm(self, name: str, dim: int) -> None:
        self.bf16(name, 1 + 0.2 * self.rng.normal(size=dim))

    def dense(self, name: str, out: int, width: int) -> None:
        self.bf16(name, self.rng.normal(size=(out, width)) / np.sqrt(width))

    def fp8(self, prefix: str, out: int, width: int) -> None:
        w = self.rng.normal(size=(out, width)) / np.sqrt(width)
        grid = np.pad(np.abs(w), ((0, -out % 32), (0, -width % 32)))
        blocks = grid.reshape(-(-out // 32), 32, -(-width // 32), 32).max((1, 3))
        byte = _power_of_two_byte(blocks / 448)
        scale = np.repeat(np.repeat(2.0 ** (byte - 127), 32, 0), 32, 1)[:out, :width]
        self.out[f"{prefix}.weight"] = Stored("F8_E4M3", _coded(E4M3, 128, w / scale))
        self.out[f"{prefix}.scale"] = Stored("F8_E8M0", byte.astype(np.uint8))

    def fp4(self, prefix: str, out: int, width: int) -> None:
        w = self.rng.normal(size=(out, width)) / np.sqrt(width)
        byte = _power_of_two_byte(np.abs(w).reshape(out, -1, 32).max(-1) / 6)
        code = _coded(E2M1, 8, w / np.repeat(2.0 ** (byte - 127), 32, 1))
        self.out[f"{prefix}.weight"] = Stored("I8", code[:, 0::2] + 16 * code[:, 1::2])
        self.out[f"{prefix}.scale"] = Stored("F8_E8M0", byte.astype(np.uint8))

    def table(self, prefix: str, rows: int, dim: int) -> None:
        w = self.rng.normal(size=(rows, dim)) * np.exp(self.rng.normal(size=(rows, 1)))
        byte = _power_of_two_byte(np.abs(w).reshape(rows, -1, 32).max(-1) / 448)
        self.out[f"{prefix}.weight"] = Stored("F8_E4M3", _coded(E4M3, 128, w / np.repeat(2.0 ** (byte - 127), 32, 1)))
        self.out[f"{prefix}.scale"] = Stored("F8_E8M0", byte.astype(np.uint8))


def _coded(table: np.ndarray, sign_bit: int, units: np.ndarray) -> np.ndarray:
    return (nearest(table, np.abs(units)) + sign_bit * (units < 0)).astype(np.uint8)


def random_tensors(
    config: Config, seed: int = 0, *, q_lora: int = 32, o_lora: int = 32, width: int = 32, markov_rank: int = 16
) -> dict[str, Stored]:
    """Every text tensor of a checkpoint. The low-rank sizes and the expert width are those of `small_config`."""
    make, d, n = _Maker(seed), config.hidden_size, config.hc_mult
    heads, dim = config.num_attention_heads, config.head_dim

    def block(prefix: str, layer: int, experts: int) -> None:
        a, f = f"{prefix}.attn", f"{prefix}.ffn"
        make.f32(f"{a}.attn_sink", make.rng.normal(size=heads))
        for name, size in ((f"{a}.q_norm", q_lora), (f"{a}.kv_norm", dim), (f"{prefix}.attn_norm", d)):
            make.norm(f"{name}.weight", size)
        make.norm(f"{prefix}.ffn_norm.weight", d)
        make.fp8(f"{a}.wq_a", q_lora, d)
        make.fp8(f"{a}.wq_b", heads * dim, q_lora)
        make.fp8(f"{a}.wkv", dim, d)
        make.fp8(f"{a}.wo_a", config.o_groups * o_lora, heads * dim // config.o_groups)
        make.fp8(f"{a}.wo_b", d, config.o_groups * o_lora)
        backbone = prefix.startswith("layers")
        if backbone and layer in config.kv_source_layer_ids:
            make.dense(f"{a}.compressor.wkv.weight", dim, d)
            if config.compress_ratios[layer] == 2:
                make.dense(f"{a}.compressor.wgate.weight", dim, d)
            make.norm(f"{a}.compressor.norm.weight", dim)
            make.dense(f"{a}.indexer.wk.weight", config.index_head_dim, dim)
            make.norm(f"{a}.indexer.k_norm.weight", config.index_head_dim)
        if backbone and layer in config.index_source_layer_ids:
            make.fp8(f"{a}.indexer.wq_b", config.index_n_heads * config.index_head_dim, q_lora)
            make.dense(f"{a}.indexer.weights_proj.weight", config.index_n_heads, d)
        if backbone and layer in config.engram_layer_ids:
            rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
            columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
            make.table(f"{prefix}.engram.embed", rows, config.engram_head_dim)
            make.fp8(f"{prefix}.engram.wkv", d * (n + 1), columns)
            for name in ("q_weight", "k_weight"):
                make.bf16(f"{prefix}.engram.{name}", 1 + 0.2 * make.rng.normal(size=(n, d)))
        make.dense(f"{f}.gate.weight", experts, d)
        make.f32(f"{f}.gate.bias", 0.2 * make.rng.normal(size=experts))
        make.f32(f"{f}.gate.bias_vl", 0.5 * make.rng.normal(size=experts))
        for e in range(experts):
            for name, out, inner in (("w1", width, d), ("w3", width, d), ("w2", d, width)):
                make.fp4(f"{f}.experts.{e}.{name}", out, inner)
        for name, out, inner in (("w1", width, d), ("w3", width, d), ("w2", d, width)):
            make.fp8(f"{f}.shared_experts.{name}", out, inner)
        for half in ("attn", "ffn"):
            make.f32(f"{prefix}.hc_{half}_fn", make.rng.normal(size=((2 + n) * n, n * d)) / np.sqrt(n * d))
            make.f32(f"{prefix}.hc_{half}_base", make.rng.normal(size=(2 + n) * n))
            make.f32(f"{prefix}.hc_{half}_scale", 0.5 + make.rng.random(3))

    make.bf16("embed.weight", make.rng.normal(size=(config.vocab_size, d)))
    make.dense("head.weight", config.vocab_size, d)
    make.norm("norm.weight", d)
    for layer in range(config.num_hidden_layers):
        block(f"layers.{layer}", layer, config.n_routed_experts)
    stages = config.num_nextn_predict_layers
    for stage in range(stages):
        block(f"mtp.{stage}", config.num_hidden_layers + stage, config.dspark_n_routed_experts)
    if stages:
        last = f"mtp.{stages - 1}"
        make.fp8("mtp.0.main_proj", d, d * len(config.dspark_target_layer_ids))
        make.norm("mtp.0.main_norm.weight", d)
        make.norm(f"{last}.norm.weight", d)
        make.bf16(f"{last}.markov_head.embed.weight", make.rng.normal(size=(config.vocab_size, markov_rank)))
        make.dense(f"{last}.markov_head.head.weight", config.vocab_size, markov_rank)
        make.dense(f"{last}.confidence_head.proj.weight", 1, d + markov_rank)
    return make.out
