"""Properties of the oracle's forward pass: two implementations agree, nothing leaks from the future, replay rules."""

import json

import numpy as np
import pytest

from oracle import Oracle, Replay
from oracle.drafter import Drafter
from oracle.incremental import Stepper
from oracle.small import random_tensors, small_config

CONFIG = small_config()
WINDOW = CONFIG.sliding_window


@pytest.fixture(scope="module")
def oracle():
    return Oracle((CONFIG, random_tensors(CONFIG)))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(3).integers(3, 60, 60)


@pytest.mark.parametrize("cache", ["float", "quantised"])
def test_batch_equals_token_by_token_with_images_and_rollbacks(oracle, tokens, cache):
    image = np.zeros(len(tokens), bool)
    image[11:18] = True
    trace = oracle.forward(tokens, cache=cache, image_mask=image)
    stepper, rng = Stepper(oracle, cache), np.random.default_rng(0)
    p = 0
    while p < len(tokens):
        np.testing.assert_allclose(stepper.step(tokens[p], image[p]), trace.logits[p], atol=1e-12)
        p += 1
        if p in (13, 30, 31, 45):  # a verify step of some wrong drafts, all rejected
            for _ in range(CONFIG.dspark_block_size):
                stepper.step(int(rng.integers(3, 60)))
            stepper.rollback(p)


def test_a_ring_too_short_for_a_rejected_step_fails(oracle, tokens):
    """The window plus the draft length is the least that is right; the engine has one row more."""
    stepper = Stepper(oracle, "float", ring_rows=WINDOW + CONFIG.dspark_block_size - 1)
    for token in tokens[:20]:
        stepper.step(token)
    with pytest.raises(LookupError):
        for _ in range(CONFIG.dspark_block_size + 1):
            stepper.step(5)
        stepper.rollback(20)
        stepper.step(tokens[20])


@pytest.mark.parametrize("cache", ["float", "quantised"])
def test_no_future_leakage(oracle, tokens, cache):
    whole = oracle.forward(tokens, cache=cache)
    for cut in (1, 13, 14, 37):
        changed = tokens.copy()
        changed[cut:] = (changed[cut:] + 1) % 60
        other = oracle.forward(changed, cache=cache)
        np.testing.assert_allclose(other.logits[:cut], whole.logits[:cut], atol=1e-12)
        assert np.abs(other.logits[cut] - whole.logits[cut]).max() > 1e-3
        prefix = oracle.forward(tokens[:cut], cache=cache)
        np.testing.assert_allclose(prefix.logits, whole.logits[:cut], atol=1e-12)


def test_selections_are_causal_subsets(oracle, tokens):
    trace = oracle.forward(tokens)
    block = CONFIG.candidate_block_size
    pool = trace.candidates[CONFIG.candidate_source_layer_id]
    assert sorted(trace.topk) == list(CONFIG.index_source_layer_ids)
    for layer, ids in trace.topk.items():
        visible = (trace.positions[layer] + 1) // CONFIG.compress_ratios[layer]
        assert np.all(ids < visible[:, None])
        for row, reach, blocks in zip(ids, visible, pool, strict=True):
            allowed = np.arange(reach)
            if CONFIG.uses_candidates(layer):
                allowed = allowed[np.isin(allowed // block, blocks)]
            chosen = row[row >= 0]
            assert np.isin(chosen, allowed).all() and len(chosen) == min(len(allowed), CONFIG.index_topk)
    assert any(np.any(trace.index_scores[6][t, : t + 1] == -np.inf) for t in range(len(tokens)))  # the pool binds


def test_decoder_tail(oracle, tokens):
    keep = CONFIG.keep_tokens
    assert keep == WINDOW + 12
    exact = oracle.forward(tokens[:keep])
    np.testing.assert_array_equal(oracle.forward(tokens[:keep], decoder_tail=keep).logits, exact.logits)
    full, tail = oracle.forward(tokens), oracle.forward(tokens, decoder_tail=keep)
    assert tail.logits_positions.tolist() == list(range(len(tokens) - keep, len(tokens)))
    assert np.abs(tail.logits - full.logits[-keep:]).max() > 1e-6  # an approximation beyond K
    for source in CONFIG.kv_source_layer_ids:  # all global rows are the same, the decoder's source included
        np.testing.assert_array_equal(tail.main_rows[source], full.main_rows[source])
        np.testing.assert_array_equal(tail.index_rows[source], full.index_rows[source])


def test_encoder_replay_keeps_cached_rows(oracle, tokens):
    hit = 32
    cold = oracle.forward(tokens)
    before = {s: (cold.main_rows[s].copy(), cold.index_rows[s].copy()) for s in cold.main_rows}
    warm = oracle.forward(tokens, encoder_replay=Replay.of(cold, hit))
    assert warm.positions[0][0] == hit - WINDOW
    for source, (main, index) in before.items():
        rows = hit // CONFIG.compress_ratios[source]
        assert warm.first_group[source] == rows
        np.testing.assert_array_equal(warm.main_rows[source][:rows], main[:rows])
        np.testing.assert_array_equal(warm.index_rows[source][:rows], index[:rows])
        np.testing.assert_array_equal(cold.main_rows[source], main)
        assert len(warm.main_rows[source]) == len(main)
    # Layer 0 has no attention below it, so its rebuilt rows are exact; later layers are approximate.
    np.testing.assert_array_equal(warm.window_rows[0], cold.window_rows[0][hit - WINDOW :])
    assert np.abs(warm.logits[-1] - cold.logits[-1]).max() > 1e-6
    # Rows of the cold run at or above the hit are never read.
    poisoned = {s: (m.copy(), i.copy()) for s, (m, i) in before.items()}
    for source, parts in poisoned.items():
        for part in parts:
            part[hit // CONFIG.compress_ratios[source] :] = 255
    again = Replay(hit, *({s: parts[i] for s, parts in poisoned.items()} for i in (0, 1)))
    np.testing.assert_array_equal(oracle.forward(tokens, encoder_replay=again).logits, warm.logits)


def test_replay_refuses_hits_that_cannot_be_resumed(oracle, tokens):
    cold = oracle.forward(tokens)
    for hit in (WINDOW, len(tokens)):
        with pytest.raises(ValueError, match="hit is"):
            oracle.forward(tokens, encoder_replay=Replay.of(cold, hit))


def test_image_spans_use_their_embeddings_and_skip_engram(oracle, tokens):
    image = np.zeros(len(tokens), bool)
    image[20:25] = True
    vectors = np.random.default_rng(0).normal(size=(len(tokens), CONFIG.hidden_size))
    a = oracle.forward(tokens, image_mask=image, embeddings=vectors)
    changed = tokens.copy()
    changed[20:25] = 1  # ids under an image have no influence
    b = oracle.forward(changed, image_mask=image, embeddings=vectors)
    np.testing.assert_array_equal(a.logits, b.logits)
    assert np.abs(a.logits[20] - oracle.forward(tokens).logits[20]).max() > 1e-3


def test_drafter_depends_on_the_window_and_the_past_only(oracle, tokens):
    trace, p = oracle.forward(tokens), 40
    drafter = Drafter(oracle)
    context = drafter.context(trace)
    draft = drafter.draft(context, p, anchor=7)
    assert draft.logits.shape == (CONFIG.dspark_block_size, CONFIG.vocab_size)
    assert np.array_equal(draft.tokens, draft.logits.argmax(-1)) and np.all(
        (draft.confidence > 0) & (draft.confidence < 1)
    )
    rows = context.rows[0].copy()
    rows[: p - WINDOW + 1] = 0xFF
    rows[p + 1 :] = 0xFF
    again = drafter.draft(type(context)(context.positions, [rows]), p, anchor=7)
    np.testing.assert_array_equal(again.logits, draft.logits)
    rows[p - WINDOW + 1] = WINDOW_ZERO
    moved = drafter.draft(type(context)(context.positions, [rows]), p, anchor=7)
    assert (
        np.abs(moved.base_logits - draft.base_logits).max(1).min() > 0
    )  # every input of the block sees the oldest row
    given = (draft.tokens + 1) % CONFIG.vocab_size
    forced = drafter.draft(context, p, anchor=7, given=given)
    np.testing.assert_array_equal(forced.base_logits, draft.base_logits)
    assert forced.confidence[0] == draft.confidence[0] and np.all(forced.confidence[1:] != draft.confidence[1:])
    tail = drafter.context(oracle.forward(tokens, decoder_tail=CONFIG.keep_tokens))
    assert len(tail.positions) == CONFIG.keep_tokens


WINDOW_ZERO = np.zeros(CONFIG.head_dim + CONFIG.head_dim // 32, np.uint8)


def test_reads_a_checkpoint_folder(oracle, tokens, tmp_path):
    text = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(CONFIG).items()}
    scaling = ("beta_fast", "beta_slow", "original_max_position_embeddings")
    text["rope_scaling"] = {"factor": text.pop("rope_factor"), **{k: text.pop(k) for k in scaling}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    header, payload = {}, b""
    for name, stored in oracle.weights.tensors.items():
        raw = stored.data.tobytes()
        offsets = [len(payload), len(payload) + len(raw)]
        header[name] = {"dtype": stored.dtype, "shape": list(stored.data.shape), "data_offsets": offsets}
        payload += raw
    encoded = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + payload)
    np.testing.assert_array_equal(Oracle(tmp_path).forward(tokens[:9]).logits, oracle.forward(tokens[:9]).logits)
