"""Pieces of the oracle against numbers known of the published model."""

import numpy as np

from oracle import engram, indexer, moe
from oracle.mhc import coefficients
from oracle.rope import frequencies, rotate
from oracle.small import random_tensors, small_config
from oracle.weights import Weights


def production_engram():
    return small_config(
        engram_layer_ids=[1, 14], engram_vocab_size=16_000_000, engram_n_heads=8, engram_compressed_vocab_size=99092
    )


def test_primes_and_table_sizes():
    config = production_engram()
    primes = engram.bucket_primes(config) - 16_000_000
    assert primes[0, 0].tolist() == [57, 79, 81, 97, 121, 129, 133, 183]
    assert primes[0, 2].tolist() == [339, 381, 393, 399, 403, 409, 447, 463]
    assert primes[1, 2].tolist() == [781, 799, 813, 819, 841, 877, 879, 889]
    assert config.engram_num_embeddings == (384006168, 384016682)


def test_multipliers():
    first = [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    second = [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    assert engram.multipliers(1, 99092).tolist() == first
    assert engram.multipliers(14, 99092).tolist() == second


def test_hash_stops_at_start_and_at_dead_positions():
    config = small_config()
    hasher = engram.Hasher(config)
    tokens, pad = np.array([5, 9, 7, 8, 11, 3]), config.engram_pad_token_id
    dead = np.array([False, False, True, False, False, False])
    rows = hasher.rows(1, tokens, dead)
    assert np.all(rows[2] == -1) and np.all(rows[[0, 1, 3, 4, 5]] >= 0)
    assert rows.max() < config.engram_num_embeddings[0]
    # What lies behind a dead position reads as padding: the same rows as a fresh sequence gives.
    assert np.array_equal(rows[3:], hasher.rows(1, tokens[3:], dead[3:]))
    odd, primes = engram.multipliers(1, config.vocab_size), hasher.primes[0]
    expected = (int(tokens[1]) * int(odd[0])) ^ (int(tokens[0]) * int(odd[1]))
    assert rows[1, 0] == expected % primes[0, 0]
    expected ^= pad * int(odd[2])
    assert rows[1, 3] == expected % primes[1, 1] + primes[0].sum() + primes[1, 0]


def test_yarn_ramp_bounds_of_production():
    config = small_config(
        rope_scaling={"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
    )
    plain, scaled = frequencies(64, 160000.0), frequencies(64, 160000.0, config)
    ratio = scaled.astype(np.float64) / plain
    np.testing.assert_allclose(ratio[:16], 1, rtol=1e-6)  # low = 15: the ramp starts after it
    assert ratio[16] < 0.99 and ratio[24] > 1.05 / 16
    np.testing.assert_allclose(ratio[25:], 1 / 16, rtol=1e-6)


def test_rope_angle_is_rounded_to_float32_and_inverse_undoes_it():
    freqs = frequencies(8, 10000.0)
    position = np.array([1_000_003])
    x = np.zeros((1, 12))
    x[0, 4::2] = 1
    turned = rotate(x, position, freqs)
    angle = np.float32(1_000_003) * freqs
    np.testing.assert_array_equal(turned[0, 4::2], np.cos(angle.astype(np.float64)))
    np.testing.assert_array_equal(turned[0, 5::2], np.sin(angle.astype(np.float64)))
    assert np.all(turned[0, :4] == 0)
    np.testing.assert_allclose(rotate(turned, position, freqs, inverse=True), x, atol=1e-15)


def test_stream_mixing_is_doubly_stochastic():
    config = small_config()
    weights = Weights(random_tensors(config))
    streams = np.random.default_rng(0).normal(size=(5, config.hc_mult, config.hidden_size))
    pre, post, comb = coefficients(config, weights, "layers.2.hc_ffn", streams)
    np.testing.assert_allclose(comb.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(comb.sum(2), 1, atol=1e-2)
    assert np.all((pre > 0) & (pre < 1.001)) and np.all((post > 0) & (post < 2))


def test_ties_take_the_lower_index():
    scores = np.array([[1.0, 2.0, 2.0, 1.0, -np.inf]])
    assert indexer.best(scores, 3).tolist() == [[0, 1, 2]]
    assert indexer.best(scores, 6).tolist() == [[0, 1, 2, 3, -1, -1]]
    assert moe.choose(np.array([[1.0, 3.0, 3.0, 1.0]]), 3).tolist() == [[1, 2, 0]]


def test_candidate_pool_keeps_the_newest_block():
    scores = np.array([[5.0, 0, 4, 0, 3, 0, 0, 0]])
    visible = np.array([7])
    masked = indexer.mask_scores(scores, visible, None, 2)
    blocks = indexer.block_scores(masked, visible, 2)
    assert blocks.tolist() == [[5, 4, 3, np.inf]]
    pool = indexer.best(blocks, 2)
    assert pool.tolist() == [[0, 3]]
    assert np.isfinite(indexer.mask_scores(scores, visible, pool, 2)).tolist() == [
        [True] * 2 + [False] * 4 + [True, False]
    ]


def test_router_bias_depends_on_the_image_span_and_not_on_weights():
    config = small_config()
    weights = Weights(random_tensors(config))
    x = np.random.default_rng(0).normal(size=(2, config.hidden_size))
    x[1] = x[0]
    scores, biased = moe.router_scores(weights, "layers.0.ffn", x, np.array([False, True]))
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(biased[0] - scores[0], biased[0] - scores[1])
    assert np.abs(biased[0] - biased[1]).max() > 0.1
    gates = moe.gate_weights(scores, moe.choose(biased, 2), 1.5)
    np.testing.assert_allclose(gates.sum(-1), 1.5)
