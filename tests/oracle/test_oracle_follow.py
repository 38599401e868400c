"""Follow mode accepts right records, noisy ones included, and refuses every kind of tampering."""

from dataclasses import replace

import numpy as np
import pytest

from oracle import Oracle, Replay, judge
from oracle.choices import Own
from oracle.formats import INDEX, MAIN, WINDOW
from oracle.small import random_tensors, small_config

CONFIG = small_config()
N = 96
TENSORS = random_tensors(CONFIG)


@pytest.fixture(scope="module")
def oracle():
    return Oracle((CONFIG, TENSORS))


@pytest.fixture(scope="module")
def noisy():
    """The same model in float32: an honest implementation with its own rounding."""
    return Oracle((CONFIG, TENSORS), dtype=np.float32)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(5).integers(3, 60, N)


@pytest.fixture(scope="module")
def record(noisy, tokens):
    return noisy.forward(tokens).record()


def tampered(record, name, change):
    copy = dict(record)
    copy[name] = record[name].copy()
    change(copy[name])
    return copy


@pytest.mark.parametrize("cache", ["float", "quantised"])
def test_accepts_its_own_trace(oracle, tokens, cache):
    trace = oracle.forward(tokens, cache=cache)
    followed, report = oracle.follow(trace.record())
    assert report.passed, str(report)
    assert report.logit_error < 1e-5 and all(t.worst < 0.01 for t in report.kinds.values())
    if cache == "quantised":
        np.testing.assert_array_equal(followed.logits, trace.logits)
        assert all(t.differing == 0 for t in report.kinds.values())


@pytest.mark.parametrize("cache", ["float", "quantised"])
@pytest.mark.parametrize("tail", [None, CONFIG.keep_tokens])
def test_accepts_float32_noise(oracle, noisy, tokens, cache, tail):
    trace = noisy.forward(tokens, cache=cache, decoder_tail=tail)
    assert trace.logits.dtype == np.float32
    _, report = oracle.follow(trace.record())
    assert report.passed and report.logit_error < 1e-4, str(report)
    image = np.zeros(N, bool)
    image[40:50] = True
    _, report = oracle.follow(noisy.forward(tokens, cache=cache, image_mask=image).record(), image_mask=image)
    assert report.passed, str(report)


def test_accepts_float32_noise_after_a_prefix_hit(oracle, noisy, tokens, record):
    hit = 48
    cold = noisy.forward(tokens)
    warm = noisy.forward(tokens, decoder_tail=CONFIG.keep_tokens, encoder_replay=Replay.of(cold, hit))
    _, report = oracle.follow(warm.record(), hit=hit)
    assert report.passed, str(report)
    written = {}  # an engine exports only what it wrote, with the positions of the groups
    for name in (f"{kind}/{s}" for kind in ("main", "index") for s in CONFIG.kv_source_layer_ids):
        ratio = CONFIG.compress_ratios[int(name.split("/")[1])]
        first = hit // ratio
        written[name] = warm.record()[name][first:]
        written[f"{name}/positions"] = (first + np.arange(len(written[name]))) * ratio
    _, partial = oracle.follow(warm.record() | written, hit=hit, cached=cold.record())
    assert str(partial) == str(report)
    with pytest.raises(ValueError, match="lacks position 0"):
        oracle.follow(warm.record() | written, hit=hit)
    _, report = oracle.follow(warm.record() | {"window/2": warm.record()["window/1"]}, hit=hit)
    assert not report.passed


def expect_failure(oracle, record, kind, where):
    _, report = oracle.follow(record)
    assert not report.passed and report.kinds[kind].worst > 1, str(report)
    assert any(line.startswith(f"{kind} ") and where in line for line in report.failures), str(report)
    return report


@pytest.mark.parametrize(
    ("name", "form", "kind", "layer"),
    [("window/2", WINDOW, "window", 2), ("main/3", MAIN, "main", 3), ("index/4", INDEX, "index", 4)],
)
def test_rejects_flipped_codes_and_scales(oracle, record, name, form, kind, layer):
    dim = form.dim(record[name].shape[1])
    largest = int(np.abs(form.decode(record[name][7])).argmax())

    def flip_code(rows):
        if form.packed:
            rows[7, largest // 2] ^= 1 << (4 * (largest % 2))
        else:
            rows[7, largest] ^= 1

    def flip_sign(rows):
        rows[7, largest // 2 if form.packed else largest] ^= 8 << (4 * (largest % 2)) if form.packed else 128

    def move_scale(rows):
        rows[7, -1] += 1

    where = f"layer {layer} row 7 item {largest}"
    report = expect_failure(oracle, tampered(record, name, flip_code), f"{kind} code", where)
    # The first blame falls on the item itself. Others may follow: the rest of the record rests on the true byte.
    assert where in report.failures[0], str(report)
    expect_failure(oracle, tampered(record, name, flip_sign), f"{kind} code", where)
    last = (dim // form.group) - 1
    expect_failure(oracle, tampered(record, name, move_scale), f"{kind} scale", f"layer {layer} row 7 item {last}")


class Careless(Own):
    """Makes one mistake of each kind and carries on with it, as a faulty implementation would."""

    def window_rows(self, layer, positions, values):
        rows = super().window_rows(layer, positions, values)
        if layer == 2:
            rows[7, np.abs(values[7]).argmax()] ^= 1
        return rows

    def main_rows(self, layer, groups, values):
        return self.floored(layer == 3, super().main_rows(layer, groups, values))

    def index_rows(self, layer, groups, values):
        return self.floored(layer == 4, super().index_rows(layer, groups, values))

    def floored(self, here, rows):
        if here:
            rows[9, :2] = 0
        return rows

    def topk(self, layer, positions, scoring):
        ids = super().topk(layer, positions, scoring)
        if layer == 6:
            left = np.flatnonzero(scoring.scores[60] > -np.inf)
            ids[60, 0] = np.setdiff1d(left, ids[60])[0]
            ids[60].sort()
        return ids

    def candidates(self, layer, positions, scoring):
        blocks = super().candidates(layer, positions, scoring)
        blocks[80] = np.arange(blocks.shape[1])  # without the newest block
        return blocks

    def experts(self, layer, positions, biased, k):
        ids = super().experts(layer, positions, biased, k)
        if layer == 5:
            ids[50] = biased[50].argsort()[:k]
        return ids


def test_blames_exactly_the_mistakes(oracle, noisy, tokens):
    """What comes after a mistake rests on it in the oracle too, so nothing else is blamed and the logits agree."""
    trace = noisy.run(tokens, Careless(CONFIG, "quantised"), 0, 0)
    _, report = oracle.follow(trace.record())
    blamed = sorted({line.split(" item")[0].split(":")[0] for line in report.failures})
    assert blamed == [
        "candidates layer 4 row 80",
        "experts layer 5 row 50",
        "index code layer 4 row 9",
        "main code layer 3 row 9",
        "topk layer 6 row 60",
        "window code layer 2 row 7",
    ], str(report)
    assert report.logit_error < 1e-4


@pytest.mark.parametrize("cache", ["float", "quantised"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 7),
        ("rope_theta", 10100),
        ("compress_rope_theta", 10000),
        ("rope_factor", 1),
        ("routed_scaling_factor", 1.49),
        ("swiglu_limit", 1.0),
        ("hc_sinkhorn_iters", 2),
        ("hc_eps", 1e-4),
        ("engram_pad_token_id", 0),
        ("candidate_block_size", 5),
    ],
)
def test_rejects_wrong_semantics(oracle, tokens, cache, name, value):
    wrong = Oracle((replace(CONFIG, **{name: value}), TENSORS), dtype=np.float32)
    _, report = oracle.follow(wrong.forward(tokens, cache=cache).record())
    assert not report.passed


def test_rejects_nan_codes_and_nan_floats(oracle, noisy, tokens, record):
    expect_failure(
        oracle, tampered(record, "window/0", lambda r: r[3].__setitem__(5, 0x7F)), "window code", "row 3 item 5"
    )
    floats = noisy.forward(tokens, cache="float").record()
    expect_failure(oracle, tampered(floats, "main/1", lambda r: r[3].__setitem__(5, np.nan)), "main", "row 3 item 5")
    expect_failure(oracle, tampered(floats, "index/4", lambda r: r[9].__imul__(1.01)), "index", "layer 4 row 9")


@pytest.mark.parametrize("name", ["topk/1", "topk/4", "topk/6", "candidates/4"])
def test_rejects_wrong_selections(oracle, record, name):
    kind, layer = name.split("/")
    row = N - 2
    chosen = record[name][row]
    pool = set(range(row // CONFIG.candidate_block_size if kind == "candidates" else (row + 1) // 2 - 1))
    if name == "topk/6":
        block = CONFIG.candidate_block_size
        pool = {j for b in record["candidates/4"][row] for j in range(b * block, b * block + block) if j < row}
    other = max(pool - set(chosen.tolist()), key=lambda j: -j)

    def swap(rows):
        rows[row] = np.sort([other, *chosen[1:]])

    def unsorted(rows):
        rows[row] = chosen[::-1]

    def repeated(rows):
        rows[row, 0] = rows[row, 1]

    def short(rows):
        rows[row, -1] = -1

    def future(rows):
        rows[row, -1] = N - 1 if kind == "topk" else N // CONFIG.candidate_block_size

    for change in (swap, unsorted, repeated, short, future):
        expect_failure(oracle, tampered(record, name, change), kind, f"layer {layer} row {row}")


def test_rejects_a_topk_outside_of_the_pool(oracle, record):
    row, block = N - 2, CONFIG.candidate_block_size
    outside = next(j for j in range(row) if j // block not in record["candidates/4"][row])

    def leave(rows):
        rows[row] = np.sort([outside, *rows[row, 1:]])

    expect_failure(oracle, tampered(record, "topk/6", leave), "topk", f"layer 6 row {row}")


def test_rejects_wrong_experts(oracle, record):
    row = 50
    other = next(e for e in range(4) if e not in record["experts/5"][row])

    def wrong(ids):
        ids[row, 0] = other

    def twice(ids):
        ids[row] = ids[row, 0]

    def none(ids):
        ids[row, 1] = -1

    for change in (wrong, twice, none):
        expect_failure(oracle, tampered(record, "experts/5", change), "experts", f"layer 5 row {row}")

    def order(ids):  # the order of the chosen experts is free
        ids[row] = ids[row, ::-1].copy()

    assert oracle.follow(tampered(record, "experts/5", order))[1].passed


def test_rejects_wrong_logits(oracle, record):
    _, report = oracle.follow(tampered(record, "logits", lambda x: x[4].__setitem__(2, x[4, 2] + 0.01)))
    assert not report.passed and "position 4, token 2" in report.logit_where
    _, report = oracle.follow(tampered(record, "logits", lambda x: x[4].__setitem__(2, np.nan)))
    assert not report.passed


def test_incomplete_records_are_errors(oracle, record):
    for name in ("window/3", "main/1", "topk/6", "experts/7", "logits", "candidates/4/positions"):
        with pytest.raises(ValueError, match=name.split("/")[0]):
            oracle.follow({k: v for k, v in record.items() if k != name})
    with pytest.raises(ValueError, match="lacks position 95"):
        short = {"window/3": record["window/3"][:-1], "window/3/positions": record["window/3/positions"][:-1]}
        oracle.follow(record | short)
    with pytest.raises(ValueError, match="main/3 has"):
        oracle.follow(record | {"main/3": record["main/3"][:-1]})
    with pytest.raises(ValueError, match="index/4 is"):
        oracle.follow(record | {"index/4": record["index/4"][:, :-1]})


def test_zero_ties_must_take_the_lower_index():
    scores, radius = np.array([0.0, 0.0, 3.0, 0.0]), np.array([0.0, 0.0, 1e-6, 0.0])
    own = np.array([0, 2])
    assert judge.selection(np.array([0, 2]), own, scores, radius) == 0
    assert judge.selection(np.array([1, 2]), own, scores, radius) == np.inf
    radius[1] = 1e-9  # not surely zero: either order can be right
    assert judge.selection(np.array([1, 2]), own, scores, radius) == 0


def test_a_query_near_a_rounding_boundary_widens_its_scores():
    raw = np.zeros((1, 32))
    raw[0, 0], raw[0, 1] = 6, 2.5 + 1e-6
    for error, wide in ((np.array([[1e-7]]), False), (np.array([[1e-5]]), True)):
        low, high = judge.query_bounds(raw, error, quantised=True)
        assert (low[0, 1] == 2) == wide and high[0, 1] == 3
    low, high = judge.query_bounds(raw, np.array([[1e-5]]), quantised=True)
    assert high[0, 0] in (6.0, 8.0)  # one scale step up is possible at the very edge of a group's range
