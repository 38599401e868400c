"""What is written is read again bit by bit, however it is spread over files."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zlib

import pytest
import safetensors
import torch

from kernel_core.formats import dequantize_fp8_block, dequantize_fp8_rows, dequantize_mxfp4
from orchestrator.model.checkpoint import (
    Checkpoint,
    layout,
    load_weights,
    tensor_specs,
    verify_checkpoint,
    write_checkpoint,
)
from orchestrator.model.checkpoint.specs import stored_weights
from orchestrator.model.init import RandomWeights, init_checkpoint, initial_values
from orchestrator.model.presets import v41_nano

CONFIG = v41_nano(stages=1, vision=True)


def shuffled(shards):
    """A placement without any structure."""
    return lambda name: zlib.crc32(name.encode()) % shards


@pytest.fixture(scope="module")
def source(nano_folder):
    checkpoint = Checkpoint(nano_folder)
    return {name: checkpoint.read(name) for name in checkpoint.entries}


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("placement", ["single", "layers", "capped", shuffled(1), shuffled(2), shuffled(7)])
def test_bit_exact(tmp_path, source, placement):
    write_checkpoint(tmp_path, CONFIG, source, placement=placement)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == CONFIG
    assert set(checkpoint.entries) == set(source) == set(tensor_specs(CONFIG))
    for name, expected in source.items():
        assert as_bytes(checkpoint.read(name)) == as_bytes(expected) == as_bytes(checkpoint.map(name)), name
    assert verify_checkpoint(tmp_path) == sum(spec.nbytes for spec in tensor_specs(CONFIG).values())


def test_capped_files_are_small(tmp_path, source, monkeypatch):
    cap = 200_000
    monkeypatch.setattr(layout, "CAPPED_BYTES", cap)
    write_checkpoint(tmp_path, CONFIG, source, placement="capped")
    files = sorted(tmp_path.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) <= cap and sum(sizes) > 0.85 * cap * (len(sizes) - 1)
    checkpoint = Checkpoint(tmp_path)
    for name in checkpoint.entries:
        if name.endswith(".scale"):
            assert checkpoint.file_of(name) == checkpoint.file_of(name.removesuffix(".scale") + ".weight")
    monkeypatch.setattr(layout, "CAPPED_BYTES", 130_000)
    with pytest.raises(ValueError, match=r"placement: got 'capped', but embed\.weight takes 131\d+ bytes"):
        write_checkpoint(tmp_path / "small", CONFIG, source, placement="capped")
    assert not (tmp_path / "small").exists()


def test_the_library_agrees(tmp_path, source):
    """The safetensors package accepts the files and sees the published dtypes."""
    write_checkpoint(tmp_path, CONFIG, source, placement="layers")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in tensor_specs(CONFIG).values())
    specs, seen = tensor_specs(CONFIG), set()
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                part = file.get_slice(name)
                assert (part.get_dtype(), tuple(part.get_shape())) == specs[name]
                assert as_bytes(file.get_tensor(name)) == as_bytes(source[name])
                assert index["weight_map"][name] == path.name
                seen.add(name)
    assert seen == set(specs)


def test_same_bytes_every_time(tmp_path, nano_folder):
    init_checkpoint(CONFIG, tmp_path / "again", seed=3)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (nano_folder / name).read_bytes()
    init_checkpoint(CONFIG, tmp_path / "other", seed=4)
    assert (tmp_path / "other/model.safetensors").read_bytes() != (nano_folder / "model.safetensors").read_bytes()


def test_loaded_weights(nano_folder, source):
    """Each part of the model holds the tensor of its name: stacked, widened or multiplied, nothing else."""
    weights = load_weights(nano_folder)
    assert weights.config == CONFIG
    assert torch.equal(weights.embed, source["embed.weight"]) and weights.norm.dtype == torch.float32
    for index, layer in enumerate(weights.layers):
        name = f"layers.{index}"
        assert as_bytes(layer.wq_b.weight) == as_bytes(source[f"{name}.attn.wq_b.weight"])
        assert torch.equal(layer.wq_b.scale, source[f"{name}.attn.wq_b.scale"])
        assert torch.equal(layer.attn_norm, source[f"{name}.attn_norm.weight"].float())
        assert torch.equal(layer.sink, source[f"{name}.attn.attn_sink"])
        assert torch.equal(layer.gate_bias_vl, source[f"{name}.ffn.gate.bias_vl"])
        assert torch.equal(layer.hc_ffn.base, source[f"{name}.hc_ffn_base"])
        assert (layer.compressor is None) == (not CONFIG.is_full(index))
        assert (layer.indexer is None) == (index not in CONFIG.index_source_layer_ids)
        assert (layer.engram is None) == (index not in CONFIG.engram_layer_ids)
        _check_experts(layer.experts, f"{name}.ffn", source, CONFIG.n_routed_experts)
    assert weights.layers[2].compressor.wgate is not None and weights.layers[6].compressor.wgate is None
    assert weights.layers[6].indexer.wk is not None and weights.layers[8].indexer.wk is None

    engram, name = weights.layers[4].engram, "layers.4.engram"
    assert torch.equal(engram.qk_weight, source[f"{name}.q_weight"].float() * source[f"{name}.k_weight"].float())
    assert as_bytes(engram.table) == as_bytes(source[f"{name}.embed.weight"])
    assert torch.equal(engram.table_scale, source[f"{name}.embed.scale"])

    drafter = weights.drafter
    assert len(drafter.stages) == 1 and drafter.confidence.shape == (CONFIG.hidden_size + CONFIG.dspark_markov_rank,)
    assert torch.equal(drafter.markov_head, source["mtp.0.markov_head.head.weight"])
    _check_experts(drafter.stages[0].experts, "mtp.0.ffn", source, CONFIG.dspark_n_routed_experts)
    assert torch.equal(weights.image_end, source["image_end"].float())
    assert set(weights.vision) == {name for name in source if name.startswith(("vision.", "aligner."))}


def _check_experts(experts, name, source, count):
    inter = CONFIG.moe_intermediate_size
    assert experts.w13.shape == (count, 2 * inter, CONFIG.hidden_size // 2)
    for e in range(count):
        for part, rows in (("w1", slice(0, inter)), ("w3", slice(inter, None))):
            assert torch.equal(experts.w13[e, rows], source[f"{name}.experts.{e}.{part}.weight"])
            assert torch.equal(experts.s13[e, rows], source[f"{name}.experts.{e}.{part}.scale"])
        assert torch.equal(experts.w2[e], source[f"{name}.experts.{e}.w2.weight"])
        assert torch.equal(experts.s2[e], source[f"{name}.experts.{e}.w2.scale"])
    shared = f"{name}.shared_experts"
    both = as_bytes(source[f"{shared}.w1.weight"]) + as_bytes(source[f"{shared}.w3.weight"])
    assert as_bytes(experts.shared_w13) == both
    assert torch.equal(experts.shared_s13, torch.cat([source[f"{shared}.w1.scale"], source[f"{shared}.w3.scale"]]))
    assert as_bytes(experts.shared_w2) == as_bytes(source[f"{shared}.w2.weight"])


def test_text_only(tmp_path):
    config = v41_nano(stages=0)
    init_checkpoint(config, tmp_path, seed=1)
    weights = load_weights(tmp_path)
    assert weights.drafter is None and weights.vision is None and weights.image_start is None


def test_prefixed_names(tmp_path, damaged, source):
    def prefix(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    folder = damaged(prefix)
    assert torch.equal(load_weights(folder).head, source["head.weight"])


def test_quantised_values_are_near(source):
    """Storage loses what its format loses: half a step of 3 bits (FP8) or 1 bit (FP4) below a shared exponent."""
    for stored in stored_weights(CONFIG):
        if stored.storage in ("bf16", "f32"):
            continue
        values = initial_values(CONFIG, stored, 3)
        weight, scale = source[f"{stored.name}.weight"], source[f"{stored.name}.scale"]
        decode = {"fp8": dequantize_fp8_block, "table": dequantize_fp8_rows, "fp4": dequantize_mxfp4}[stored.storage]
        error = (decode(weight, scale) - values).norm() / values.norm()
        assert error < (0.2 if stored.storage == "fp4" else 0.04), stored.name


def test_random_weights_exercise_the_formats(source):
    """Exponents differ, extreme codes occur, nothing sits at its neutral value."""
    scale = source["layers.3.attn.wq_b.scale"]
    assert len(scale.unique()) >= 2
    assert len(source["layers.3.ffn.experts.1.w1.scale"].unique()) >= 3
    codes = source["layers.3.ffn.experts.1.w1.weight"]
    assert set((codes & 15).flatten().tolist()) | set((codes >> 4).flatten().tolist()) == set(range(16))
    for name in ("attn.attn_sink", "ffn.gate.bias", "ffn.gate.bias_vl", "hc_attn_base", "hc_ffn_scale"):
        assert source[f"layers.3.{name}"].abs().min() > 0
    assert not torch.equal(source["layers.3.ffn.gate.bias"], source["layers.3.ffn.gate.bias_vl"])
    base = source["layers.3.hc_attn_base"]
    assert (base[:4] > 1).sum() == 1  # one stream is read


def test_write_refuses(tmp_path, source, nano_folder):
    with pytest.raises(ValueError, match=r"source: got no \['norm\.weight'\]"):
        write_checkpoint(tmp_path, CONFIG, {k: v for k, v in source.items() if k != "norm.weight"})
    with pytest.raises(ValueError, match=r"source: got \['extra'\]"):
        write_checkpoint(tmp_path, CONFIG, source | {"extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"head\.weight: got torch\.float32, allowed is torch\.bfloat16"):
        write_checkpoint(tmp_path, CONFIG, source | {"head.weight": source["head.weight"].float()})
    with pytest.raises(ValueError, match=r"norm\.weight: got shape \[1, 128\], allowed is \[128\]"):
        write_checkpoint(tmp_path, CONFIG, source | {"norm.weight": source["norm.weight"][None]})
    with pytest.raises(ValueError, match=r"placement: got 'rows', allowed is 'single', 'layers', 'capped'"):
        write_checkpoint(tmp_path, CONFIG, source, placement="rows")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"folder: got .*, which holds weights, allowed is an empty folder"):
        init_checkpoint(CONFIG, nano_folder, seed=3)


def test_a_failed_write_leaves_nothing(tmp_path):
    weights = RandomWeights(CONFIG)

    def source(name):
        if name.startswith("layers.5"):
            raise RuntimeError("stop")
        return weights(name)

    with pytest.raises(RuntimeError, match="stop"):
        write_checkpoint(tmp_path, CONFIG, source, placement="layers")
    assert list(tmp_path.iterdir()) == []


def test_overwrite_replaces_shards(tmp_path, source):
    write_checkpoint(tmp_path, CONFIG, source, placement="layers")
    write_checkpoint(tmp_path, CONFIG, source, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    load_weights(tmp_path)


def test_tokenizer_beside_the_weights_sets_the_map(tmp_path, nano_folder):
    from orchestrator.model.engram_tables import EngramTables, compressed_vocab_size
    from orchestrator.text.files import write_tokenizer

    config = v41_nano(stages=0)
    write_tokenizer(tmp_path, config)
    written = init_checkpoint(config, tmp_path)
    size = compressed_vocab_size(tmp_path / "tokenizer.json", 512)
    assert written == dataclasses.replace(config, engram_compressed_vocab_size=size) == Checkpoint(tmp_path).config
    tables = EngramTables.from_checkpoint(tmp_path, written)
    assert int(tables.token_map.max()) + 1 == size < 512
    shutil.copy(nano_folder / "config.json", tmp_path)
    with pytest.raises(ValueError, match=rf"tokenizer: got the map of this tokenizer of {size} ids, allowed is"):
        EngramTables.from_checkpoint(tmp_path, Checkpoint(nano_folder).config)
