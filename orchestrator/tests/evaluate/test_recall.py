"""Attention mass that selections hold, against a plain computation."""

from __future__ import annotations

import pytest
import torch

from orchestrator.evaluate.recall import QUERIES, WAYS, dense_mass, measure_recall


def test_mass_of_a_plain_softmax():
    generator = torch.Generator().manual_seed(1)
    query, window, main = (torch.randn(*shape, generator=generator) for shape in ((20, 2, 8), (5, 8), (30, 8)))
    seen = torch.rand(20, 5, generator=generator) < 0.6
    visible, sink = torch.arange(10, 30), torch.tensor([0.3, -1.0])
    mass, total = dense_mass(query, window, seen, main, visible, sink, 0.4)
    for t in range(20):
        keys = torch.cat([window[seen[t]], main[: visible[t]]])
        weights = (0.4 * query[t] @ keys.T).exp()
        weights = weights / (weights.sum(1, keepdim=True) + sink.exp().unsqueeze(1))
        expected = weights[:, int(seen[t].sum()) :].sum(0)
        assert torch.allclose(mass[t, : visible[t]], expected, atol=1e-6)
        assert mass[t, visible[t] :].sum() == 0
        assert torch.allclose(total[t], weights.sum(), atol=1e-5)


def test_shares_of_every_selecting_layer(nano, heldout):
    texts = [w.tokens for w in heldout.windows(2, 300)]
    found = measure_recall(nano, texts, 300)
    assert [r.layer for r in found] == list(nano.config.index_source_layer_ids)
    for r in found:
        shares = {way: r.shares[way].value for way in WAYS}
        assert all(share <= shares["best"] + 1e-6 for share in shares.values()), shares
        assert shares["selected"] > 0 and shares["best"] < 1
        assert abs(shares["selected"] - shares["float32"]) < 0.1
        assert r.queries == 2 * QUERIES and r.visible == 300 // nano.config.ratio(r.layer)
        assert 0 < r.mass < 1
    unrestricted = [r for r in found if not nano.config.uses_candidates(r.layer)]
    assert all(r.shares["float32"].value == r.shares["float32, all rows"].value for r in unrestricted)
    restricted = [r for r in found if nano.config.uses_candidates(r.layer)]
    assert any(r.shares["float32"].value != r.shares["float32, all rows"].value for r in restricted)


def test_with_no_more_rows_than_chosen_nothing_is_missed(nano, heldout, monkeypatch):
    monkeypatch.setattr("orchestrator.evaluate.recall.QUERIES", 4)
    found = measure_recall(nano, [heldout.windows(1, 36)[0].tokens], 36)
    early = [r for r in found if nano.config.ratio(r.layer) == 2]
    assert all(r.visible == 18 for r in early)
    assert all(r.shares["best"].value > 0.8 for r in early)


def test_a_short_context_is_refused(nano):
    with pytest.raises(ValueError, match="context: got 50"):
        measure_recall(nano, [[1] * 50], 50)
    with pytest.raises(ValueError, match="tokens: got a text of 100"):
        measure_recall(nano, [[1] * 100], 200)
