"""Random weights have the shapes and dtypes of loaded ones, and a model of them runs."""

import dataclasses

import pytest
import torch

from orchestrator.engine.config import EngineConfig
from orchestrator.engine.engine import Engine
from orchestrator.engine.request import SamplingParams
from orchestrator.model.batch import Chunk, StepBatch
from orchestrator.model.cache import CachePools
from orchestrator.model.init import init_checkpoint
from orchestrator.model.presets import v41_flash_rank, v41_nano
from orchestrator.model.random_weights import random_model, random_weights
from orchestrator.model.weights import load_weights

CPU = torch.device("cpu")


def described(value):
    """Names, shapes and dtypes of all tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list):
        return [described(item) for item in value]
    if dataclasses.is_dataclass(value) and not hasattr(value, "vocab_size"):
        return {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return None


@pytest.mark.parametrize("stages", [0, 2])
def test_shapes_are_those_of_a_checkpoint(tmp_path, stages):
    config = v41_nano(stages=stages)
    init_checkpoint(config, tmp_path)
    assert described(random_weights(config, device=CPU)) == described(load_weights(tmp_path))


def test_a_model_runs_and_repeats():
    config = v41_nano(stages=0)
    found = []
    for seed in (1, 1, 2):
        model = random_model(config, device=CPU, seed=seed)
        cache = CachePools(config, 4, 2)
        chunk = Chunk([3, 5, 8, 13, 21], 0, 1, [1], history=[], logits="all")
        found.append(model.forward(StepBatch.build([chunk], model.ratios), cache))
    assert found[0].isfinite().all() and found[0].std() > 0.1
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_refuses_what_it_does_not_make():
    with pytest.raises(ValueError, match="vision tower"):
        random_model(v41_nano(vision=True), device=CPU)


def test_a_rank_is_a_sixty_fourth_of_the_experts():
    rank = v41_flash_rank()
    assert rank.n_routed_experts == rank.num_experts_per_tok == 384 // 64
    assert (rank.hidden_size, rank.num_hidden_layers, rank.global_bytes_per_token) == (5120, 40, 890)
    assert (rank.num_nextn_predict_layers, rank.draft_length, rank.dspark_num_experts_per_tok) == (3, 5, 3)
    assert rank.dspark_n_routed_experts == 3


def test_draft_stages_of_random_weights_draft():
    model = random_model(v41_nano(), device=CPU)
    engine = Engine(model, None, EngineConfig(max_num_seqs=2, num_blocks=8, speculation=5))
    for name in ("a", "b"):
        engine.add(name, [5, 7, 9], SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert engine.stats.drafts > 0 and engine.stats.output_tokens == 24
