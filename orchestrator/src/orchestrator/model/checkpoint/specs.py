"""Every tensor of a checkpoint, derived from the configuration: name, storage and shape.

A quantised matrix is stored as two tensors, `NAME.weight` and `NAME.scale`, in one of three geometries:

=======  =======================  ==============================  =============================
storage  weight                   scale (F8_E8M0)                 a scale covers
=======  =======================  ==============================  =============================
fp8      F8_E4M3 `[o, i]`         `[ceil(o/32), ceil(i/32)]`      32 rows x 32 columns
fp4      I8 `[o, i/2]`            `[o, i/32]`                     32 columns of one row
table    F8_E4M3 `[rows, dim]`    `[rows, dim/32]`                32 columns of one row
=======  =======================  ==============================  =============================
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from orchestrator.model.config import WEIGHT_BLOCK, ModelConfig

Storage = Literal["fp8", "fp4", "table", "bf16", "f32"]

ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


class TensorSpec(NamedTuple):
    """Dtype (as safetensors spells it) and shape of one tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Stored(NamedTuple):
    """One weight: its name (without `.weight`/`.scale` where it is quantised), storage and shape in values."""

    name: str
    storage: Storage
    shape: tuple[int, ...]

    def tensors(self) -> dict[str, TensorSpec]:
        """The tensors that hold it."""
        if self.storage == "bf16":
            return {self.name: TensorSpec("BF16", self.shape)}
        if self.storage == "f32":
            return {self.name: TensorSpec("F32", self.shape)}
        rows, columns = self.shape
        blocks = -(-columns // WEIGHT_BLOCK)
        if self.storage == "fp8":
            weight, scale_rows = TensorSpec("F8_E4M3", self.shape), -(-rows // WEIGHT_BLOCK)
        elif self.storage == "fp4":
            weight, scale_rows = TensorSpec("I8", (rows, columns // 2)), rows
        else:
            weight, scale_rows = TensorSpec("F8_E4M3", self.shape), rows
        return {f"{self.name}.weight": weight, f"{self.name}.scale": TensorSpec("F8_E8M0", (scale_rows, blocks))}


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint by name, in model order."""
    specs: dict[str, TensorSpec] = {}
    for stored in stored_weights(config):
        specs |= stored.tensors()
    return specs


def parameter_count(config: ModelConfig, *, vision: bool = True) -> int:
    """Weights of the model, scales not counted. `vision=False` leaves the image encoder and its vectors out."""
    names = ("vision.", "aligner.", "image_")
    return sum(math.prod(s.shape) for s in stored_weights(config) if vision or not s.name.startswith(names))


def stored_weights(config: ModelConfig) -> Iterator[Stored]:
    """All weights of the model: embedding and head, vision, backbone layers, draft stages."""
    d = config.hidden_size
    yield Stored("embed.weight", "bf16", (config.vocab_size, d))
    yield Stored("head.weight", "bf16", (config.vocab_size, d))
    yield Stored("norm.weight", "bf16", (d,))
    if config.vision is not None:
        yield from _vision(config)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        yield from _block(config, prefix, config.n_routed_experts)
        yield from _compressed(config, f"{prefix}.attn", layer)
        if layer in config.engram_layer_ids:
            yield from _engram(config, f"{prefix}.engram", layer)
    for stage in range(config.num_nextn_predict_layers):
        yield from _block(config, f"mtp.{stage}", config.dspark_n_routed_experts)
    if config.num_nextn_predict_layers:
        yield from _drafter(config)


def _block(config: ModelConfig, prefix: str, experts: int) -> Iterator[Stored]:
    """What backbone layers and draft stages have in common."""
    d, inter = config.hidden_size, config.moe_intermediate_size
    heads, dim, rank = config.num_attention_heads, config.head_dim, config.q_lora_rank
    groups, low = config.o_groups, config.o_lora_rank
    yield Stored(f"{prefix}.attn_norm.weight", "bf16", (d,))
    yield Stored(f"{prefix}.attn.wq_a", "fp8", (rank, d))
    yield Stored(f"{prefix}.attn.q_norm.weight", "bf16", (rank,))
    yield Stored(f"{prefix}.attn.wq_b", "fp8", (heads * dim, rank))
    yield Stored(f"{prefix}.attn.wkv", "fp8", (dim, d))
    yield Stored(f"{prefix}.attn.kv_norm.weight", "bf16", (dim,))
    yield Stored(f"{prefix}.attn.attn_sink", "f32", (heads,))
    yield Stored(f"{prefix}.attn.wo_a", "fp8", (groups * low, heads * dim // groups))
    yield Stored(f"{prefix}.attn.wo_b", "fp8", (d, groups * low))

    yield Stored(f"{prefix}.ffn_norm.weight", "bf16", (d,))
    yield Stored(f"{prefix}.ffn.gate.weight", "bf16", (experts, d))
    yield Stored(f"{prefix}.ffn.gate.bias", "f32", (experts,))
    yield Stored(f"{prefix}.ffn.gate.bias_vl", "f32", (experts,))
    owners: list[tuple[str, Storage]] = [(f"{prefix}.ffn.experts.{e}", "fp4") for e in range(experts)]
    for owner, storage in [*owners, (f"{prefix}.ffn.shared_experts", "fp8")]:
        yield Stored(f"{owner}.w1", storage, (inter, d))
        yield Stored(f"{owner}.w2", storage, (d, inter))
        yield Stored(f"{owner}.w3", storage, (inter, d))

    streams = config.hc_mult
    coefficients = (2 + streams) * streams
    for half in ("attn", "ffn"):
        yield Stored(f"{prefix}.hc_{half}_fn", "f32", (coefficients, streams * d))
        yield Stored(f"{prefix}.hc_{half}_base", "f32", (coefficients,))
        yield Stored(f"{prefix}.hc_{half}_scale", "f32", (3,))


def _compressed(config: ModelConfig, prefix: str, layer: int) -> Iterator[Stored]:
    """Compressor and indexer of the layers that write or select compressed rows."""
    d, dim = config.hidden_size, config.head_dim
    heads, index_dim = config.index_n_heads, config.index_head_dim
    if config.is_full(layer):
        yield Stored(f"{prefix}.compressor.wkv.weight", "bf16", (dim, d))
        if config.ratio(layer) > 1:
            yield Stored(f"{prefix}.compressor.wgate.weight", "bf16", (dim, d))
        yield Stored(f"{prefix}.compressor.norm.weight", "bf16", (dim,))
        yield Stored(f"{prefix}.indexer.wk.weight", "bf16", (index_dim, dim))
        yield Stored(f"{prefix}.indexer.k_norm.weight", "bf16", (index_dim,))
    if layer in config.index_source_layer_ids:
        yield Stored(f"{prefix}.indexer.wq_b", "fp8", (heads * index_dim, config.q_lora_rank))
        yield Stored(f"{prefix}.indexer.weights_proj.weight", "bf16", (heads, d))


def _engram(config: ModelConfig, prefix: str, layer: int) -> Iterator[Stored]:
    d, streams, dim = config.hidden_size, config.hc_mult, config.engram_head_dim
    yield Stored(f"{prefix}.embed", "table", (config.engram_rows(layer), dim))
    yield Stored(f"{prefix}.q_weight", "bf16", (streams, d))
    yield Stored(f"{prefix}.k_weight", "bf16", (streams, d))
    yield Stored(f"{prefix}.wkv", "fp8", ((streams + 1) * d, config.engram_columns * dim))


def _drafter(config: ModelConfig) -> Iterator[Stored]:
    """What the first and the last draft stage have besides a block."""
    d, rank, vocab = config.hidden_size, config.dspark_markov_rank, config.vocab_size
    yield Stored("mtp.0.main_proj", "fp8", (d, len(config.dspark_target_layer_ids) * d))
    yield Stored("mtp.0.main_norm.weight", "bf16", (d,))
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    yield Stored(f"{last}.norm.weight", "bf16", (d,))
    yield Stored(f"{last}.markov_head.embed.weight", "bf16", (vocab, rank))
    yield Stored(f"{last}.markov_head.head.weight", "bf16", (vocab, rank))
    yield Stored(f"{last}.confidence_head.proj.weight", "bf16", (1, d + rank))


def _vision(config: ModelConfig) -> Iterator[Stored]:
    """Image encoder, the aligner to the text width, and the vectors that frame an image."""
    vision, d = config.vision, config.hidden_size
    assert vision is not None
    width, inter, taps = vision.hidden_size, vision.intermediate_size, vision.downsample_ratio**2
    for name in ("image_start", "image_end", "image_newline"):
        yield Stored(name, "bf16", (d,))
    yield Stored("vision.patch_embed.proj.weight", "bf16", (width, 3 * vision.patch_size**2))
    yield Stored("vision.patch_embed.proj.bias", "bf16", (width,))
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        yield Stored(f"{prefix}.norm1.weight", "bf16", (width,))
        yield Stored(f"{prefix}.attn.wqkv.weight", "bf16", (3 * width, width))
        yield Stored(f"{prefix}.attn.wqkv.bias", "bf16", (3 * width,))
        yield Stored(f"{prefix}.attn.wo.weight", "bf16", (width, width))
        yield Stored(f"{prefix}.attn.wo.bias", "bf16", (width,))
        yield Stored(f"{prefix}.norm2.weight", "bf16", (width,))
        yield Stored(f"{prefix}.mlp.w1.weight", "bf16", (2 * inter, width))
        yield Stored(f"{prefix}.mlp.w2.weight", "bf16", (width, inter))
    yield Stored("vision.norm.weight", "bf16", (width,))
    yield Stored("aligner.w1.weight", "bf16", (d, taps * width))
    yield Stored("aligner.w1.bias", "bf16", (d,))
    yield Stored("aligner.w2.weight", "bf16", (d, d))
    yield Stored("aligner.w2.bias", "bf16", (d,))
