"""A rank reads what it holds: its experts of the backbone and of the draft stages, from the checkpoint's bytes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.balance.eplb.placement import EMPTY
from orchestrator.model.checkpoint.errors import CheckpointError
from orchestrator.model.checkpoint.reader import Checkpoint
from orchestrator.model.expert_parallel import CheckpointExperts, DraftExperts, LoadedExperts
from orchestrator.model.expert_parallel.drafts import draft_slots
from orchestrator.model.load import load_model
from orchestrator.model.make import make_model
from orchestrator.model.presets import v41_flash, v41_nano
from orchestrator.model.weights import load_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(v41_nano(), tmp_path_factory.mktemp("share"), seed=20)


def experts_bytes(folder, block):
    entries = Checkpoint(folder).entries.items()
    return sum(e.end - e.begin for name, e in entries if name.startswith(block) and ".ffn.experts." in name)


def test_experts_that_are_not_asked_for_are_not_read(folder):
    whole = load_weights(folder)
    for experts, left_out in ((("layers", "mtp"), ()), (("mtp",), ("layers",)), ((), ("layers", "mtp"))):
        some = load_weights(folder, experts)
        assert whole.bytes_read - some.bytes_read == sum(experts_bytes(folder, block) for block in left_out)
        for blocks, name in ((some.layers, "layers"), (some.drafter.stages, "mtp")):
            rows = {getattr(b.experts, part).shape[0] for b in blocks for part in ("w13", "s13", "w2", "s2")}
            assert rows == ({8 if name == "layers" else 4} if name in experts else {0})
        assert torch.equal(some.layers[3].experts.shared_s2, whole.layers[3].experts.shared_s2)
    load_model(folder, experts=())  # layers are made of no experts


def test_one_expert_is_read_alone(folder):
    model, source = load_model(folder), CheckpointExperts(folder)
    loaded, config = LoadedExperts(model.weights), model.config
    size = experts_bytes(folder, "layers") // (config.num_hidden_layers * config.n_routed_experts)
    picked = [(0, 0), (11, 7), (12, 0), (14, 3)]  # three stages of four experts stand behind twelve layers
    for count, (layer, expert) in enumerate(picked, 1):
        assert torch.equal(source.read(layer, expert), loaded.read(layer, expert))
        assert source.bytes_read == count * size


@pytest.mark.parametrize("name", ["layers.2.ffn.experts.3.w3.scale", "mtp.1.ffn.experts.0.w2.scale"])
def test_a_damaged_scale_is_refused(folder, tmp_path, name):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    checkpoint = Checkpoint(broken)
    with checkpoint.file_of(name).open("r+b") as file:
        file.seek(checkpoint.entries[name].begin + 5)
        file.write(b"\xff")
    source = CheckpointExperts(broken)
    layer, expert = (2, 3) if name.startswith("layers") else (13, 0)
    with pytest.raises(CheckpointError, match=f"{name}: holds byte 255"):
        source.read(layer, expert)
    source.read(layer, expert + 1)


class Numbers:
    """Experts whose bytes say which they are; notes what is read."""

    def __init__(self, size):
        self.size, self.read_of = size, []

    def read(self, layer, expert):
        self.read_of.append((layer, expert))
        return torch.full((self.size,), 16 * (layer - 12) + expert, dtype=torch.uint8)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(1, 8), extra=st.integers(0, 3), deaths=st.integers(0, 5), seed=st.integers(0, 99))
def test_draft_experts_through_deaths(ranks, extra, deaths, seed):
    """Every expert has a copy in every epoch, of the right bytes; only what was lost is read again."""
    config = v41_nano()
    slots = min(8, -(-8 // ranks) + extra)
    rng = np.random.default_rng(seed)
    group = [DraftExperts(config, slots, Numbers(6528)) for _ in range(ranks)]
    lost = None
    for _ in range(deaths + 1):
        tables = np.stack([drafts.table for drafts in group])
        missing = sum(len(set(range(4)) - set(tables[:, stage].ravel().tolist())) for stage in range(3))
        placement = group[0].place(tables)
        before = [drafts.bytes_read for drafts in group]
        held = [drafts.take(placement, rank) for rank, drafts in enumerate(group)]
        read = sum(drafts.bytes_read - old for drafts, old in zip(group, before, strict=True))
        assert lost is None or read == missing * 6528
        placement.check(np.ones(len(group), np.bool_))
        for rank, (drafts, mine) in enumerate(zip(group, held, strict=True)):
            wide = placement.experts[:, rank]
            assert (mine.slots.table[:, rank, : drafts.slots] == wide).all()
            assert (mine.slots.table[:, rank, drafts.slots :] == EMPTY).all()
            for stage, slot in np.argwhere(wide != EMPTY).tolist():
                assert (drafts.pool.w13[int(mine.buffers[stage, slot])] == 16 * stage + int(wide[stage, slot])).all()
        if (len(group) - 1) * slots < 8 or len(group) == 1:
            return  # the backbone has no room either
        lost = group.pop(int(rng.integers(len(group))))


def test_shares_of_the_production_model():
    """64 ranks of 7 slots hold 3 of 128 experts a stage, so that 55 ranks, the fewest for the backbone, hold all."""
    flash = v41_flash()
    assert draft_slots(flash, 7) == 3 and 55 * 3 >= 128 > 54 * 2
    assert draft_slots(flash, 384) == 128 and draft_slots(flash, 52) == 16
