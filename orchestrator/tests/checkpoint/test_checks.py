"""Every kind of wrong checkpoint is refused with an error that says what is wrong and what to do."""

from __future__ import annotations

import json
import re

import pytest

from orchestrator.model.checkpoint import CheckpointError, load_weights, verify_checkpoint


def reshaped(name, shape, dtype=None, filler=b"\x78"):
    """An edit that gives a tensor another shape (and dtype)."""

    def edit(tensors):
        old = tensors[name][0]
        count = 1
        for n in shape:
            count *= n
        size = {"F32": 4, "BF16": 2, "F16": 2}.get(dtype or old, 1)
        tensors[name] = (dtype or old, list(shape), filler * (count * size))

    return edit


def renamed(old, new):
    """An edit that replaces a part of every name."""

    def edit(tensors):
        for name in [name for name in tensors if re.search(old, name)]:
            tensors[re.sub(old, new, name)] = tensors.pop(name)

    return edit


def added(name, dtype="F32", shape=(1,), data=b"\0" * 4):
    return lambda tensors: tensors.update({name: (dtype, list(shape), data)})


def removed(pattern):
    def edit(tensors):
        for name in [name for name in tensors if re.search(pattern, name)]:
            del tensors[name]

    return edit


def poked(name, byte, at=5):
    """An edit that changes one byte of a tensor."""

    def edit(tensors):
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[:at] + bytes([byte]) + data[at + 1 :])

    return edit


CASES = {
    # Scale geometries: v41-nano has wq_b [256, 64], an expert's w1 [32, 128], tables [3252, 32].
    "blocks of 128": (
        reshaped("layers.0.attn.wq_b.scale", (2, 1)),
        r"layers\.0\.attn\.wq_b\.scale: got shape \[2, 1\], allowed is \[8, 2\]: one scale covers 32 x 32 weights; "
        r"these are blocks of 128 x 128, as V4 has them",
    ),
    "32 x 32 for FP4": (
        reshaped("layers.5.ffn.experts.2.w1.scale", (1, 4)),
        r"layers\.5\.ffn\.experts\.2\.w1\.scale: got shape \[1, 4\], allowed is \[32, 4\]: one scale covers 32 weights "
        r"of one row, not 32 x 32",
    ),
    "32 x 32 for a table": (
        reshaped("layers.1.engram.embed.scale", (102, 1)),
        r"layers\.1\.engram\.embed\.scale: got shape \[102, 1\], allowed is \[3252, 1\]: one scale covers 32 columns "
        r"of one row, not 32 x 32",
    ),
    "rows for FP8": (
        reshaped("layers.0.attn.wkv.scale", (64, 4)),
        r"layers\.0\.attn\.wkv\.scale: got shape \[64, 4\], allowed is \[2, 4\]: one scale covers 32 x 32 weights",
    ),
    "weight shape": (
        reshaped("head.weight", (500, 128)),
        r"head\.weight: got shape \[500, 128\], allowed is \[512, 128\]",
    ),
    "unpacked codes": (
        reshaped("layers.0.ffn.experts.0.w1.weight", (32, 128)),
        r"layers\.0\.ffn\.experts\.0\.w1\.weight: got shape \[32, 128\], allowed is \[32, 64\]",
    ),
    # Dtypes
    "cast scale": (
        reshaped("layers.0.attn.wkv.scale", (2, 4), "U8"),
        r"layers\.0\.attn\.wkv\.scale: got dtype U8, allowed is F8_E8M0; a scale keeps the bits of its exponent, a "
        r"numeric cast destroys them\. Convert again with a bit view",
    ),
    "float scale": (
        reshaped("layers.0.attn.wkv.scale", (2, 4), "F32"),
        r"layers\.0\.attn\.wkv\.scale: got dtype F32, allowed is F8_E8M0",
    ),
    "rounded coefficients": (
        reshaped("layers.3.hc_attn_scale", (3,), "BF16"),
        r"layers\.3\.hc_attn_scale: got dtype BF16, allowed is F32; rounding these to BF16 is a real error",
    ),
    "rounded bias": (
        reshaped("layers.3.ffn.gate.bias_vl", (8,), "BF16"),
        r"layers\.3\.ffn\.gate\.bias_vl: got dtype BF16, allowed is F32",
    ),
    "FP8 experts": (
        reshaped("layers.0.ffn.experts.0.w1.weight", (32, 128), "F8_E4M3"),
        r"experts\.0\.w1\.weight: got dtype F8_E4M3, allowed is I8; expert weights are two FP4 codes a byte",
    ),
    "dequantised": (
        reshaped("layers.0.attn.wo_a.weight", (64, 128), "BF16"),
        r"layers\.0\.attn\.wo_a\.weight: got dtype BF16, allowed is F8_E4M3; dequantised weights cannot be loaded",
    ),
    "half precision": (
        reshaped("norm.weight", (128,), "F16"),
        r"norm\.weight: got dtype F16, allowed is BF16; take the original tensor",
    ),
    # Values
    "NaN scale": (
        poked("layers.0.attn.wkv.scale", 255),
        r"layers\.0\.attn\.wkv\.scale: byte 255 \(NaN\) at \[1, 1\]; the scale is damaged, download the file again",
    ),
    "NaN expert scale": (
        poked("layers.4.ffn.experts.3.w3.scale", 255),
        r"layers\.4\.ffn\.experts\.3\.w3\.scale: byte 255 \(NaN\) at \[1, 1\]",
    ),
    # Missing and surplus tensors
    "missing": (
        removed(r"^layers\.7\.attn_norm"),
        r"damaged: lacks layers\.7\.attn_norm\.weight, which config\.json asks for; download all shards",
    ),
    "missing layer": (
        removed(r"^layers\.7\.attn"),
        r"lacks layers\.7\.attn_norm\.weight and \d+ more, which config\.json asks for",
    ),
    "missing scale": (
        removed(r"^layers\.7\.attn\.wkv\.scale"),
        r"holds layers\.7\.attn\.wkv\.weight but not layers\.7\.attn\.wkv\.scale; a quantised weight needs both",
    ),
    "missing weight": (
        removed(r"^layers\.4\.engram\.embed\.weight"),
        r"holds layers\.4\.engram\.embed\.scale but not layers\.4\.engram\.embed\.weight",
    ),
    "unexpected": (
        added("layers.0.attn.compressor.norm.weight"),
        r"holds layers\.0\.attn\.compressor\.norm\.weight, which config\.json does not ask for; weights and "
        r"config\.json must be of one model",
    ),
    "bias": (added("layers.0.attn.wkv.bias"), r"holds layers\.0\.attn\.wkv\.bias, which config\.json does not ask for"),
    # Experts
    "expert gap": (
        removed(r"^layers\.6\.ffn\.experts\.3\."),
        r"layers\.6\.ffn\.experts: got 7 experts, allowed is 0 to 7 without a gap; it lacks 3\. Shards of one "
        r"expert-parallel rank cannot be loaded",
    ),
    "one rank": (
        removed(r"\.ffn\.experts\.[4-7]\."),
        r"layers\.0\.ffn\.experts: got 4 experts, allowed is 0 to 7 without a gap; it lacks 4, 5, 6, 7",
    ),
    "shifted": (
        renamed(r"^(layers\.2\.ffn\.experts)\.0\.", r"\1.8."),
        r"layers\.2\.ffn\.experts: got 8 experts, allowed is 0 to 7 without a gap; it lacks 0",
    ),
    "too many": (
        added("mtp.0.ffn.experts.4.w1.weight", "I8", (1,), b"\0"),
        r"mtp\.0\.ffn\.experts: got 5 experts, allowed is 0 to 3 without a gap; it has 4",
    ),
    "missing part": (
        removed(r"^layers\.6\.ffn\.experts\.3\.w3\."),
        r"lacks layers\.6\.ffn\.experts\.3\.w3\.weight and 1 more",
    ),
    # Names of other models and engines
    "V4 head": (added("hc_head_fn"), r"holds hc_head_fn: V4 has these, V4\.1 folds them away; this is a V4 checkpoint"),
    "V4 norm": (added("layers.0.hc_attn_norm.weight"), r"hc_attn_norm\.weight: V4 has these"),
    "V4 compressor": (added("layers.2.attn.compressor.ape"), r"compressor\.ape: a V4 compressor; this is a V4 check"),
    "V4 indexer": (added("layers.2.attn.indexer.compressor.wkv.weight"), r"a V4 compressor"),
    "V4 hash": (added("layers.0.ffn.gate.tid2eid"), r"gate\.tid2eid: V4's hash routing; this is a V4 checkpoint"),
    "V4 markov": (
        renamed(r"markov_head\.embed\.weight", "markov_w1.weight"),
        r"mtp\.0\.markov_w1\.weight: V4 spelling of markov_head\.embed / markov_head\.head; this is a V4 checkpoint",
    ),
    "scale_inv": (
        renamed(r"^(layers\..*\.wkv)\.scale$", r"\1.weight_scale_inv"),
        r"wkv\.weight_scale_inv and \d+ more: another engine's name of \.scale; use the published checkpoint",
    ),
    "router": (renamed(r"gate\.bias$", "gate.e_score_correction_bias"), r"another engine's name of gate\.bias"),
    "attention": (renamed(r"\.attn\.", ".self_attn."), r"self_attn\..* and \d+ more: another engine's names"),
    "feed-forward": (renamed(r"\.ffn\.", ".mlp."), r"mlp\..* and \d+ more: another engine's name of ffn"),
    "head": (renamed(r"^head\.", "lm_head."), r"lm_head\.weight: another engine's names"),
    "internal": (renamed(r"^layers\.", "module.module."), r"module\.module\..* a converted checkpoint"),
    "draft head": (
        added("mtp.0.head.weight"),
        r"mtp\.0\.head\.weight: draft stages share the backbone's embed and head; remove it",
    ),
    "mixed prefixes": (
        renamed(r"^layers\.", "model.layers."),
        r"mixes names with and without the prefix 'model\.' \(model\.layers\..*, .*\); use one form",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(damaged, case):
    edit, message = CASES[case]
    with pytest.raises(CheckpointError, match=message):
        load_weights(damaged(edit))


def test_prefix_beside_its_plain_name(damaged):
    with pytest.raises(CheckpointError, match="mixes names with and without the prefix"):
        load_weights(damaged(added("model.norm.weight")))


def edit_config(folder, edit):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


CONFIGS = {
    "text only": (
        lambda c: c.pop("vision_config"),
        r"holds aligner\.w1\.bias and \d+ more: config\.json has no vision_config; add it or remove the image tensors",
    ),
    "wide": (
        lambda c: c["text_config"].update(vocab_size=544),
        r"embed\.weight: got shape \[512, 128\], allowed is \[544, 128\]",
    ),
    "gelu": (
        lambda c: c["text_config"].update(hidden_act="gelu"),
        r"config\.json: text_config\.hidden_act: got 'gelu', allowed is 'silu' \(nothing else is implemented\)",
    ),
    "blocks": (
        lambda c: c["quantization_config"].update(weight_block_size=[128, 128]),
        r"config\.json: quantization_config\.weight_block_size: got \[128, 128\], allowed is \[32, 32\]",
    ),
    "engram rows": (
        lambda c: c["text_config"].update(engram_num_embeddings=[3252, 3497]),
        r"engram\.embed\.weight: got shape \[3496, 32\], allowed is \[3497, 32\]",
    ),
    "no section": (lambda c: c.update(text_config=None), r"config\.json: text_config: got None, allowed is an object"),
    "nothing": (lambda c: c.clear(), r"config\.json: .* neither a text_config section nor the flat keys"),
    "missing key": (
        lambda c: c["text_config"].pop("head_dim"),
        r"config\.json: got no head_dim; these have no def",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_wrong_configuration(damaged, case):
    edit, message = CONFIGS[case]
    folder = damaged(lambda tensors: None)
    edit_config(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load_weights(folder)


def test_engram_rows_are_prime_sums(damaged):
    """A table of another size, even where configuration and tensors agree on it."""

    def shrink(tensors):
        for part, width in (("weight", 32), ("scale", 1)):
            name = f"layers.1.engram.embed.{part}"
            dtype, _, data = tensors[name]
            tensors[name] = (dtype, [3200, width], data[: 3200 * width])

    folder = damaged(shrink)
    edit_config(folder, lambda c: c["text_config"].update(engram_num_embeddings=[3200, 3496]))
    message = r"config\.json: engram_num_embeddings: got \[3200, 3496\], allowed is the sums of the bucket primes"
    with pytest.raises(CheckpointError, match=message):
        load_weights(folder)


def test_verify_reads_what_loading_maps(damaged):
    folder = damaged(poked("layers.4.engram.embed.scale", 255, at=3000))
    load_weights(folder)
    seen = []
    with pytest.raises(CheckpointError, match=r"layers\.4\.engram\.embed\.scale: no finite value at \[3000, 0\]"):
        verify_checkpoint(folder, seen.append)
    assert seen[-1] == "layers.4.engram.embed.scale"


@pytest.mark.parametrize(
    ("name", "byte", "where"),
    [("layers.4.engram.embed.weight", 0xFF, r"\[0, 5\]"), ("layers.0.attn.wkv.weight", 0x7F, r"\[0, 5\]")],
)
def test_verify_finds_nan(damaged, name, byte, where):
    with pytest.raises(CheckpointError, match=rf"{name}: no finite value at {where}; download the file again"):
        verify_checkpoint(damaged(poked(name, byte)))


def test_verify_finds_infinity(damaged):
    def edit(tensors):
        dtype, shape, data = tensors["norm.weight"]
        tensors["norm.weight"] = (dtype, shape, b"\x80\x7f" + data[2:])

    with pytest.raises(CheckpointError, match=r"norm\.weight: no finite value at \[0\]"):
        verify_checkpoint(damaged(edit))
