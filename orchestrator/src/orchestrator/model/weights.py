"""The weights of a model as the forward pass takes them.

Matrices are `[out, in]`. Quantised ones keep their stored bytes; a scale is uint8, the bit pattern of an E8M0 exponent
(value 2^(byte - 127), 255 is NaN), never a converted number. Names in comments are those of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from orchestrator.model.config import ModelConfig

if TYPE_CHECKING:
    from mega_moe.cuda.experts_sm100 import PackedExpertsSm100
    from mega_moe.cuda.layout import PackedExperts


@dataclass
class Linear:
    """`weight[o, i]`: float8_e4m3fn with `scale` uint8 [ceil(o/32), ceil(i/32)], or bfloat16/float32 without."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass
class HyperConnection:
    """Mixing of one half block, float32: `fn[(2+n)n, n*d]` (norm weight folded in), `base[(2+n)n]`, `scale[3]`."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass
class Experts:
    """Routed experts (MXFP4, two codes a byte) and the shared one (FP8). A `w13` is the gate (w1), then up (w3)."""

    w13: torch.Tensor  # uint8 [E, 2I, d/2]
    s13: torch.Tensor  # uint8 [E, 2I, d/32]
    w2: torch.Tensor  # uint8 [E, d, I/2]
    s2: torch.Tensor  # uint8 [E, d, I/32]
    shared_w13: torch.Tensor  # float8_e4m3fn [2I, d]
    shared_s13: torch.Tensor  # uint8 [2I/32, d/32]
    shared_w2: torch.Tensor  # float8_e4m3fn [d, I]
    shared_s2: torch.Tensor  # uint8 [d/32, I/32]


@dataclass
class Compressor:
    """Makes the latent of a main row. `wgate` only at ratio 2."""

    wkv: torch.Tensor  # bfloat16 [head_dim, d]
    wgate: torch.Tensor | None  # bfloat16 [head_dim, d]
    norm: torch.Tensor  # float32 [head_dim]


@dataclass
class Indexer:
    """Index queries and head weights; `wk` and `k_norm` only where the layer writes index keys."""

    wq_b: Linear  # [index heads * index dim, q_lora_rank]
    weights_proj: torch.Tensor  # bfloat16 [index heads, d]
    wk: torch.Tensor | None  # bfloat16 [index dim, head_dim]
    k_norm: torch.Tensor | None  # float32 [index dim]


@dataclass
class Engram:
    """A table of n-gram rows, mapped from the file and never read whole, and its projection."""

    table: torch.Tensor  # float8_e4m3fn [rows, dim]
    table_scale: torch.Tensor  # uint8 [rows, dim/32]
    qk_weight: torch.Tensor  # float32 [n, d], q_weight * k_weight: only the product is used
    wkv: Linear  # [(n+1)*d, columns*dim]: n keys, then the value


@dataclass
class Layer:
    """A backbone layer or a draft stage."""

    attn_norm: torch.Tensor  # float32 [d]
    ffn_norm: torch.Tensor  # float32 [d]
    wq_a: Linear
    q_norm: torch.Tensor  # float32 [q_lora_rank]
    wq_b: Linear
    wkv: Linear
    kv_norm: torch.Tensor  # float32 [head_dim]
    wo_a: Linear  # [G*o_lora, H*head_dim/G]: rows of group g see the heads of group g only
    wo_b: Linear
    sink: torch.Tensor  # float32 [H]
    gate: torch.Tensor  # bfloat16 [E, d]
    gate_bias: torch.Tensor  # float32 [E]
    gate_bias_vl: torch.Tensor  # float32 [E], for tokens inside an image span
    experts: Experts
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    compressor: Compressor | None = None
    indexer: Indexer | None = None
    engram: Engram | None = None
    # Experts as a GPU's kernels read them, once the layer was built; `experts` is empty then.
    packed: PackedExperts | PackedExpertsSm100 | None = None


@dataclass
class Drafter:
    """The draft stages; embedding and head are the backbone's."""

    stages: list[Layer]
    main_proj: Linear  # [d, taps*d]
    main_norm: torch.Tensor  # float32 [d]
    norm: torch.Tensor  # float32 [d]
    markov_embed: torch.Tensor  # bfloat16 [V, rank]
    markov_head: torch.Tensor  # bfloat16 [V, rank]
    confidence: torch.Tensor  # float32 [d + rank]


@dataclass
class ModelWeights:
    """Everything that `load_weights` reads."""

    config: ModelConfig
    embed: torch.Tensor  # bfloat16 [V, d]
    head: torch.Tensor  # bfloat16 [V, d]
    norm: torch.Tensor  # float32 [d]
    layers: list[Layer]
    drafter: Drafter | None = None
    image_start: torch.Tensor | None = None  # float32 [d]
    image_end: torch.Tensor | None = None  # float32 [d]
    image_newline: torch.Tensor | None = None  # float32 [d]
    vision: dict[str, torch.Tensor] | None = field(default=None)  # `vision.*` and `aligner.*`, bfloat16
    bytes_read: int = 0  # of the checkpoint's tensors; Engram tables are mapped, not read


ExpertsOf = tuple[Literal["layers", "mtp"], ...]
"""Blocks whose routed experts are read: those of the backbone, those of the draft stages."""


def load_weights(path: str | Path, experts: ExpertsOf = ("layers", "mtp"), vision: bool = True) -> ModelWeights:
    """Read a checkpoint folder (`config.json` and safetensors). `ValueError` names the tensor or file that is wrong.

    Routed experts of blocks that are not among `experts` have no rows, and none of their bytes is read; nor are
    the image encoder's without `vision`.
    """
    from orchestrator.model.checkpoint.assemble import load_weights as load

    return load(path, experts, vision)
