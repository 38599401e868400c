"""A decode step on its way into the CUDA modules, with stand-ins for these: which kernels it calls, and how.

Stand-ins compute nothing, so results are noise; what counts is that every op of the model has a kernel for its shapes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import mla_fp4.cuda.attention
import mla_fp4.cuda.indexer
import mla_fp4.cuda.rows
import mla_fp4.ops.attention
import mla_fp4.ops.compressor
import mla_fp4.ops.indexer
import mla_fp4.ops.norm
import mla_fp4.ops.rows
import swa_replay.cuda
import swa_replay.ops
from kernel_core import using
from kernel_core.testing.bindings import FakeModule
from orchestrator.engine.decode_batch import decode_shape, padded_batch

PACKAGES = Path(__file__).parents[3] / "packages"
SIZES = {"index_score_workspace": 64, "index_topk_workspace": 64, "topk_slices": 1, "topk_workspace": 0}


@pytest.fixture
def modules(monkeypatch):
    """The compiled modules' stand-ins, and every op sent their way."""
    made = {name: FakeModule(PACKAGES / name / "csrc" / "cuda", SIZES) for name in ("mla_fp4", "swa_replay")}
    for user in (mla_fp4.cuda.attention, mla_fp4.cuda.indexer, mla_fp4.cuda.rows, swa_replay.cuda):
        monkeypatch.setattr(user, "cuda_module", made.__getitem__)
        monkeypatch.setattr(user, "stream", lambda _: 1)
        monkeypatch.setattr(user, "multiprocessors", lambda _: 132, raising=False)
    monkeypatch.setattr(swa_replay.cuda, "sparse_kernels", lambda: mla_fp4.cuda.attention)
    ops = mla_fp4.ops
    for user in (ops.attention, ops.compressor, ops.indexer, ops.norm, ops.rows, swa_replay.ops):
        monkeypatch.setattr(user, "elsewhere", lambda *_, **__: "cuda")
    return made


def test_every_op_of_the_trained_model_has_a_kernel(mini, requests, modules, watch):
    batch = requests(mini, [4, 37, 9])
    chunks = batch.next_chunks()
    step = padded_batch(chunks, decode_shape(chunks, 4, 300), mini.ratios)
    with using("library"), torch.inference_mode():
        mini.reserve_positions(300)
        with watch() as reads:
            logits = mini.forward(step, batch.cache)
    assert logits.shape == (4, mini.config.vocab_size) and reads.found == set()
    config = mini.config
    layers, full = config.num_hidden_layers, len(config.kv_source_layer_ids)
    selects = len(config.index_source_layer_ids)
    calls = Counter(name for module in modules.values() for name, _ in module.calls)
    calls = Counter({name: count for name, count in calls.items() if name not in SIZES})
    assert calls == {
        "sparse_attention": layers,
        "store_window": layers,
        "kv_rows": layers + 2 * full,
        "store_rows": 2 * full,
        "compress": full - 1,
        "index_topk": 3,  # layers that neither publish blocks nor are held to them
        "index_score": selects - 3,
        "topk": selects - 3 + 1,  # the candidate blocks too
        "norm_rope": 2 * layers + full + selects,
    }
    heads = [a for name, a in modules["mla_fp4"].calls if name == "sparse_attention"]
    assert all(a["rows"] == a["batch"] == 4 and a["heads"] == config.num_attention_heads for a in heads)
    scores = [a for name, a in modules["mla_fp4"].calls if name in ("index_score", "index_topk")]
    assert all(a["longest_request"] == 1 for a in scores)
    assert sorted({a["width"] for a in scores}) == [3 * 64, 3 * 128, 64 * 8]
