"""First bytes of two published rows. A wrong nibble order passes every statistical test, not these."""

from __future__ import annotations

import json

import torch

from kernel_core.formats import dequantize_fp8_block, dequantize_mxfp4
from orchestrator.model.checkpoint.safetensors_file import SafetensorsFile

WKV = bytes.fromhex("d871f2797069f0e55370eee3dcd8776d6bdc6bf25b66716b5c6d71d0eae7e062")  # layers.0.attn.wkv, scale 0x73
EXPERT = bytes.fromhex("a0a8ec4aadaf42aacc82256ffa054544")  # layers.0.ffn.experts.0.w1, scale 0x78


def test_real_rows(tmp_path):
    parts = {
        "wkv.weight": ("F8_E4M3", [1, 32], WKV),
        "wkv.scale": ("F8_E8M0", [1, 1], b"\x73"),
        "w1.weight": ("I8", [1, 16], EXPERT),
        "w1.scale": ("F8_E8M0", [1, 1], b"\x78"),
    }
    header, payload = {}, b""
    for name, (dtype, shape, data) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(payload), len(payload) + len(data)]}
        payload += data
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    file = SafetensorsFile(path)

    wkv = dequantize_fp8_block(file.read("wkv.weight"), file.read("wkv.scale"))
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert wkv[0, :8].tolist() == expected
    w1 = dequantize_mxfp4(file.read("w1.weight"), file.read("w1.scale"))
    steps = [0, -1, 0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1]
    assert torch.equal(w1[0, :16], torch.tensor(steps, dtype=torch.float32) / 128)
