"""The rank bench on a small model: what it counts, and what it writes."""

import json

import pytest
import torch

from bench.main import run
from bench.rank import show
from bench.rank.measure import by_op, measure
from bench.rank.record import recording
from kernel_core import formats
from kernel_core.bench.ceilings import Ceilings
from orchestrator.model.presets import v41_nano
from orchestrator.model.random_weights import random_model

BOUNDS = Ceilings(copy_gbps=10.0, bf16_tflops=1.0)


@pytest.fixture(scope="module")
def model():
    return random_model(v41_nano(stages=0), device=torch.device("cpu"))


def once(call):
    call()
    return 1.0


@pytest.mark.parametrize(("sequences", "tokens", "context"), [(3, 1, 150), (1, 40, 0)])
def test_every_op_of_a_step_is_counted(model, sequences, tokens, context):
    step = measure(model, sequences, tokens, context, once, BOUNDS, graph=False)
    calls = {one.op: one.calls for one in by_op(step.ops)}
    layers, config = model.config.num_hidden_layers, model.config
    assert calls["mega_moe.fused_experts"] == calls["mega_moe.route"] == layers
    assert calls["mhc_engram.hc_step"] == 2 * layers
    assert calls["mla_fp4.sparse_attention"] + calls["swa_replay.window_attention"] == layers
    assert calls["mla_fp4.index_topk"] == len(config.index_source_layer_ids)
    assert calls["mhc_engram.engram_gather"] == len(config.engram_layer_ids)
    assert all(one.bound_us > 0 for one in step.ops)
    assert step.kind == ("decode" if tokens == 1 else "prefill")


def test_ops_are_themselves_again():
    import mega_moe

    before = mega_moe.linear
    with pytest.raises(RuntimeError, match="stop"), recording():
        assert mega_moe.linear is not before
        raise RuntimeError("stop")
    assert mega_moe.linear is before


def test_costs_of_a_product_and_of_experts():
    import mega_moe

    x, w = torch.randn(4, 64), torch.randn(32, 64).bfloat16()
    with recording() as record:
        mega_moe.linear(x, w, None)
        mega_moe.linear(x, w, None)
    (call,) = record.calls.values()
    assert (call.count, call.bytes, call.operations) == (2, 4 * 64 * 4 + 32 * 64 * 2 + 4 * 32 * 4, 2 * 4 * 32 * 64)


def test_costs_of_packed_experts_and_dense_products():
    import mega_moe
    from mega_moe.cuda import layout

    d, inter, experts, tokens = 256, 256, 3, 5
    w13, w2 = torch.randn(experts, 2 * inter, d), torch.randn(experts, d, inter)
    packed = layout.pack_experts(*formats.quantize_mxfp4(w13), *formats.quantize_mxfp4(w2), None)
    ids = torch.tensor([[0, 2]] * tokens, dtype=torch.int32)
    with recording() as record:
        mega_moe.packed_experts(torch.randn(tokens, d), ids, torch.rand(tokens, 2), packed)
        torch.mm(torch.randn(4, 8), torch.randn(8, 16))
    found = {call.op: call for call in record.calls.values()}
    assert found["mega_moe.packed_experts"].bytes == experts * 3 * d * inter * 17 / 32 + 2 * tokens * d * 4
    assert found["mega_moe.packed_experts"].operations == 6 * d * inter * 2 * tokens
    assert found["torch.mm"].operations == 2 * 4 * 8 * 16


def test_command_writes_figures_and_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, page = tmp_path / "rank.json", tmp_path / "rank.md"
    small = ["--small", "--device", "cpu", "--sequences", "2", "--prefill", "40", "--context", "130"]
    assert run(["rank", *small, "--out", str(out), "--page", str(page)]) == 0
    steps, about = show.load(out)
    assert [s.kind for s in steps] == ["decode", "prefill"] and about["gpu"] == "CPU"
    text = page.read_text()
    assert "## Decode, 2 sequences" in text and "`mega_moe.fused_experts`" in text
    assert page.with_suffix(".png").stat().st_size > 1000
    again = tmp_path / "again.md"
    assert run(["rank", "--from", str(out), "--page", str(again)]) == 0
    assert again.read_text() == text.replace("rank.png", "again.png")


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--device", "cpu"], "--small"), (["--small", "--device", "cpu", "--sequences", "2,x"], "numbers above 0")],
)
def test_refuses(words, message, capsys):
    assert run(["rank", *words]) == 2
    assert message in capsys.readouterr().out.replace("\n", " ")


def test_refuses_another_file(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"steps": 3}))
    with pytest.raises(ValueError, match="no measurement"):
        show.load(path)
