"""All 96,085 tensors of the published checkpoint in its 48 shards, with short rows."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
import torch

from orchestrator.model.checkpoint import load_weights, tensor_specs, write_checkpoint
from orchestrator.model.config import VisionConfig
from orchestrator.model.engram_tables import bucket_primes
from orchestrator.model.presets import v41_flash

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}


def reduced():
    """The published structure (layers, roles, experts, stages) over the smallest dimensions."""
    config = dataclasses.replace(
        v41_flash(),
        vocab_size=96,
        hidden_size=32,
        num_attention_heads=8,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        moe_intermediate_size=32,
        index_n_heads=2,
        index_head_dim=32,
        engram_vocab_size=101,
        engram_head_dim=32,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        dspark_noise_token_id=93,
        dspark_markov_rank=8,
        image_token_id=94,
        vision=VisionConfig(num_hidden_layers=32, hidden_size=32, num_attention_heads=2, intermediate_size=32),
    )
    sums = bucket_primes(dataclasses.replace(config, engram_layer_ids=(1, 14), engram_num_embeddings=(1, 1),
                                             engram_compressed_vocab_size=96)).sum(-1)  # fmt: skip
    return dataclasses.replace(
        config,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=tuple(sums.tolist()),
        engram_compressed_vocab_size=96,
    )


@pytest.mark.slow
def test_every_published_name(tmp_path):
    config = reduced()
    specs = tensor_specs(config)
    assert set(specs) == set(tensor_specs(v41_flash()))

    def fill(name):
        """A byte that tells the tensor; below 120 it is a finite number in every format."""
        return zlib.crc32(name.encode()) % 120

    def source(name):
        spec = specs[name]
        raw = torch.full((spec.nbytes,), fill(name), dtype=torch.uint8)
        return raw.view(TORCH.get(spec.dtype, torch.uint8)).view(spec.shape)

    write_checkpoint(tmp_path, config, source, placement="layers")
    assert len(list(tmp_path.glob("*.safetensors"))) == 48
    weights = load_weights(tmp_path)
    for index in (0, 1, 2, 20, 39):
        layer, experts = weights.layers[index], weights.layers[index].experts
        for e in (0, 1, 200, 383):
            name = f"layers.{index}.ffn.experts.{e}"
            stacks = {"weight": (experts.w13, experts.w2), "scale": (experts.s13, experts.s2)}
            for kind, (gate_up, down) in stacks.items():
                assert gate_up[e, 0, 0] == fill(f"{name}.w1.{kind}") and gate_up[e, -1, -1] == fill(f"{name}.w3.{kind}")
                assert down[e, 5, 0] == fill(f"{name}.w2.{kind}")
        assert layer.wo_a.weight.view(torch.uint8)[3, 3] == fill(f"layers.{index}.attn.wo_a.weight")
    assert weights.layers[14].engram.table.view(torch.uint8)[-1, -1] == fill("layers.14.engram.embed.weight")
    assert weights.drafter.stages[2].experts.w2[127, 0, 0] == fill("mtp.2.ffn.experts.127.w2.weight")
    assert len(weights.vision) == 263
