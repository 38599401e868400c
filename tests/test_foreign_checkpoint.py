"""A checkpoint that somebody else wrote: the library's writer, other shards, the other configuration dialect."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from orchestrator import LLM, SamplingParams

safetensors = pytest.importorskip("safetensors.torch", reason="the official safetensors library is not installed")

# Keys of the flat dialect, where they differ from the nested one.
FLAT = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
}


def rewrite(source: Path, target: Path, shards: int, *, flat: bool) -> Path:
    """The same tensors through the official library, dealt out at random, with an index."""
    target.mkdir()
    shutil.copy(source / "tokenizer.json", target)
    tensors = {}
    for file in source.glob("*.safetensors"):
        tensors.update(safetensors.load_file(file))
    config = json.loads((source / "config.json").read_text())
    if flat:
        text = dict(config["text_config"])
        scaling = text.pop("rope_scaling")
        config = {FLAT.get(key, key): value for key, value in text.items()}
        config |= {
            "original_seq_len": scaling["original_max_position_embeddings"],
            "rope_factor": scaling["factor"],
            "beta_fast": scaling["beta_fast"],
            "beta_slow": scaling["beta_slow"],
            "image_token_id": text.get("image_token_id", config.get("image_token_id", 510)),
            "dtype": "fp8",
            "expert_dtype": "fp4",
        }
    (target / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    random.Random(7).shuffle(names)
    weight_map = {}
    for shard in range(shards):
        file = f"part-{shard}.safetensors" if shards > 1 else "model.safetensors"
        mine = {name: tensors[name] for name in names[shard::shards]}
        safetensors.save_file(mine, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    if shards > 1:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


@pytest.mark.parametrize(("shards", "flat"), [(1, False), (3, False), (5, True)])
def test_it_speaks_as_the_original(nano_path, tmp_path, shards, flat):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = LLM(nano_path, num_blocks=8).generate("import os", params, progress=False)[0]
    other = LLM(rewrite(nano_path, tmp_path / "other", shards, flat=flat), num_blocks=8)
    assert other.generate("import os", params, progress=False)[0].token_ids == expected.token_ids
    assert len(expected.token_ids) == 12


def test_a_folder_without_tokenizer_says_so(nano_path, tmp_path):
    folder = rewrite(nano_path, tmp_path / "bare", 1, flat=False)
    (folder / "tokenizer.json").unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=r"tokenizer\.json"):
        LLM(folder)
