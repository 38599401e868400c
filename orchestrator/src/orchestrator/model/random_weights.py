"""Random weights in the stored formats, made on their device: for measurements, where values do not count.

`init.py` makes checkpoints that are the same on every machine and test every mechanism; these take seconds for a rank
of the full model.
"""

from __future__ import annotations

import torch

from kernel_core import formats
from orchestrator.model.config import ModelConfig
from orchestrator.model.dense import DenseMode
from orchestrator.model.device import moved
from orchestrator.model.engram_tables import EngramTables
from orchestrator.model.transformer import Transformer
from orchestrator.model.weights import (
    Compressor,
    Drafter,
    Engram,
    Experts,
    HyperConnection,
    Indexer,
    Layer,
    Linear,
    ModelWeights,
)


def random_model(
    config: ModelConfig, *, device: torch.device, seed: int = 0, dense: DenseMode = "fixed"
) -> Transformer:
    """A model of that architecture, without images, bound to the kernels of `device`.

    Raises ValueError where the configuration has a vision tower, or `engram_compressed_vocab_size` is not that of the
    identity map (which stands for the tokenizer).
    """
    if config.vision is not None:
        raise ValueError("config: got a vision tower, allowed are the text backbone and its draft stages")
    tables = EngramTables.build(config)
    return Transformer(random_weights(config, device=device, seed=seed), moved(tables, device), mode=dense)


def random_weights(config: ModelConfig, *, device: torch.device, seed: int = 0) -> ModelWeights:
    """Backbone and draft stages on `device`; one seed gives the same bytes on the same kind of device."""
    make = _Maker(config, device, seed)
    vocabulary = (config.vocab_size, config.hidden_size)
    return ModelWeights(
        config,
        embed=make.normal(*vocabulary).bfloat16(),
        head=make.matrix(*vocabulary).bfloat16(),
        norm=make.norm(config.hidden_size),
        layers=[make.layer(layer) for layer in range(config.num_hidden_layers)],
        drafter=make.drafter() if config.num_nextn_predict_layers else None,
    )


class _Maker:
    def __init__(self, config: ModelConfig, device: torch.device, seed: int) -> None:
        self.config, self.device = config, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device)

    def norm(self, width: int) -> torch.Tensor:
        return 1 + 0.1 * self.normal(width)

    def matrix(self, *shape: int) -> torch.Tensor:
        """[..., out, in] that keeps the scale of its input."""
        return self.normal(*shape) * shape[-1] ** -0.5

    def fp8(self, out: int, width: int) -> Linear:
        return Linear(*formats.quantize_fp8_block(self.matrix(out, width)))

    def mxfp4(self, count: int, out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [formats.quantize_mxfp4(self.matrix(out, width)) for _ in range(count)]
        return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])

    def hyper(self) -> HyperConnection:
        n, d = self.config.hc_mult, self.config.hidden_size
        return HyperConnection(self.matrix((2 + n) * n, n * d), self.normal((2 + n) * n), 0.3 + 0.1 * self.normal(3))

    def experts(self, count: int) -> Experts:
        c = self.config
        d, inter = c.hidden_size, c.moe_intermediate_size
        (w13, s13), (w2, s2) = (
            self.mxfp4(count, 2 * inter, d),
            self.mxfp4(count, d, inter),
        )
        shared13, shared2 = self.fp8(2 * inter, d), self.fp8(d, inter)
        assert shared13.scale is not None and shared2.scale is not None
        return Experts(w13, s13, w2, s2, shared13.weight, shared13.scale, shared2.weight, shared2.scale)

    def compressor(self, layer: int) -> Compressor:
        c = self.config
        gate = self.matrix(c.head_dim, c.hidden_size).bfloat16() if c.ratio(layer) == 2 else None
        return Compressor(self.matrix(c.head_dim, c.hidden_size).bfloat16(), gate, self.norm(c.head_dim))

    def indexer(self, layer: int) -> Indexer:
        c = self.config
        writes = c.is_full(layer)
        return Indexer(
            self.fp8(c.index_n_heads * c.index_head_dim, c.q_lora_rank),
            self.matrix(c.index_n_heads, c.hidden_size).bfloat16(),
            self.matrix(c.index_head_dim, c.head_dim).bfloat16() if writes else None,
            self.norm(c.index_head_dim) if writes else None,
        )

    def engram(self, layer: int) -> Engram:
        c = self.config
        table, scale = formats.quantize_fp8_rows(self.normal(c.engram_rows(layer), c.engram_head_dim))
        n, d = c.hc_mult, c.hidden_size
        return Engram(
            table, scale, self.norm(n * d).view(n, d), self.fp8((n + 1) * d, c.engram_columns * c.engram_head_dim)
        )

    def layer(self, layer: int) -> Layer:
        """A backbone layer, or draft stage `layer - num_hidden_layers`."""
        c = self.config
        heads = c.num_attention_heads * c.head_dim
        backbone = layer < c.num_hidden_layers
        experts = c.n_routed_experts if backbone else c.dspark_n_routed_experts
        return Layer(
            attn_norm=self.norm(c.hidden_size),
            ffn_norm=self.norm(c.hidden_size),
            wq_a=self.fp8(c.q_lora_rank, c.hidden_size),
            q_norm=self.norm(c.q_lora_rank),
            wq_b=self.fp8(heads, c.q_lora_rank),
            wkv=self.fp8(c.head_dim, c.hidden_size),
            kv_norm=self.norm(c.head_dim),
            wo_a=self.fp8(c.o_groups * c.o_lora_rank, heads // c.o_groups),
            wo_b=self.fp8(c.hidden_size, c.o_groups * c.o_lora_rank),
            sink=self.normal(c.num_attention_heads),
            gate=self.matrix(experts, c.hidden_size).bfloat16(),
            gate_bias=0.05 * self.normal(experts),
            gate_bias_vl=0.05 * self.normal(experts),
            experts=self.experts(experts),
            hc_attn=self.hyper(),
            hc_ffn=self.hyper(),
            compressor=self.compressor(layer) if backbone and c.is_full(layer) else None,
            indexer=self.indexer(layer) if layer in c.index_source_layer_ids else None,
            engram=self.engram(layer) if layer in c.engram_layer_ids else None,
        )

    def drafter(self) -> Drafter:
        c = self.config
        d, taps = c.hidden_size, len(c.dspark_target_layer_ids)
        first = c.num_hidden_layers
        return Drafter(
            stages=[self.layer(first + stage) for stage in range(c.num_nextn_predict_layers)],
            main_proj=self.fp8(d, taps * d),
            main_norm=self.norm(d),
            norm=self.norm(d),
            markov_embed=self.normal(c.vocab_size, c.dspark_markov_rank).bfloat16(),
            markov_head=self.matrix(c.vocab_size, c.dspark_markov_rank).bfloat16(),
            confidence=self.matrix(1, d + c.dspark_markov_rank).view(-1),
        )
