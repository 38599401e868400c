import pytest
import torch

from orchestrator.cache.layout import BlockLayout
from orchestrator.model.cache import CachePools
from orchestrator.model.presets import v41_flash_rank, v41_mini, v41_nano


def test_production_offsets() -> None:
    layout = BlockLayout.of(v41_flash_rank())
    assert [s.offset for s in layout.sections] == [0, 4352, 22784, 27136, 45568, 49920, 68352, 77056]
    assert [s.kind for s in layout.sections] == ["index", "main"] * 4
    assert layout.block_bytes == 113_920


@pytest.mark.parametrize("quantised", [True, False])
def test_a_block_survives_the_way_out_and_back(quantised: bool) -> None:
    config = v41_nano(stages=0)
    layout = BlockLayout.of(config, quantised=quantised)
    source, target = (CachePools(config, 4, 2, quantised=quantised) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    for pool in source.pools.values():
        for rows in (pool.main, pool.index):
            rows.view(torch.uint8).random_(0, 256, generator=generator)
    (payload,) = layout.gather(source, [2])
    assert len(payload) == layout.block_bytes
    layout.scatter(target, [3], [payload])
    assert layout.gather(target, [3]) == [payload]
    assert layout.gather(target, [2]) == [bytes(layout.block_bytes)] and layout.gather(target, []) == []
    for layer, pool in source.pools.items():
        assert torch.equal(pool.main[2].view(torch.uint8), target.pools[layer].main[3].view(torch.uint8))
        assert torch.equal(pool.index[2].view(torch.uint8), target.pools[layer].index[3].view(torch.uint8))


def test_other_layouts_have_other_tags() -> None:
    layouts = [BlockLayout.of(v41_nano(stages=0)), BlockLayout.of(v41_nano(stages=0), quantised=False),
               BlockLayout.of(v41_mini()), BlockLayout.of(v41_flash_rank())]  # fmt: skip
    assert len({layout.tag for layout in layouts}) == 4


def test_padding_and_short_payloads_are_refused() -> None:
    config = v41_nano(stages=0)
    layout, pools = BlockLayout.of(config), CachePools(config, 4, 2)
    with pytest.raises(ValueError, match=r"blocks: got 0, allowed are 1 to 3"):
        layout.scatter(pools, [0], [bytes(layout.block_bytes)])
    with pytest.raises(ValueError, match="payloads: got 1 bytes"):
        layout.scatter(pools, [1], [b"x"])
    for blocks in ([1, 1], [1]):
        with pytest.raises(ValueError, match=r"blocks: got .*, allowed are 2 different ones"):
            layout.scatter(pools, blocks, [bytes(layout.block_bytes)] * 2)
    assert not any(pool.main.any() for pool in pools.pools.values())
