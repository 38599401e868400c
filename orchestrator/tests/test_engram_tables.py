"""Engram constants against published numbers, and the token map's rules."""

from __future__ import annotations

import dataclasses

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from orchestrator.model.engram_tables import (
    EngramTables,
    bucket_primes,
    check_engram_rows,
    compressed_vocab_size,
    token_map_of,
)
from orchestrator.model.presets import v41_flash, v41_mini, v41_nano


@pytest.mark.parametrize("config", [v41_flash(), v41_mini(), v41_nano()], ids=["flash", "mini", "nano"])
def test_bucket_sums(config):
    check_engram_rows(config)
    assert bucket_primes(config).sum(-1).tolist() == list(config.engram_num_embeddings)


def test_flash_primes():
    first, second = (bucket_primes(v41_flash()) - 16_000_000).tolist()
    assert first[:8] == [57, 79, 81, 97, 121, 129, 133, 183] and first[-1] == 463
    assert second[:3] == [477, 487, 499] and second[-1] == 889


def test_flash_multipliers():
    from orchestrator.model.engram_tables import _layers

    layers = _layers(v41_flash())
    assert layers[1].multipliers.tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert layers[14].multipliers.tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    for layer, row in layers.items():
        assert row.offsets[0] == 0
        assert int(row.offsets[-1] + row.primes[-1]) == v41_flash().engram_rows(layer)
    # The product with any mapped id stays below 2^63.
    assert max(layers[1].multipliers.tolist() + layers[14].multipliers.tolist()) * 99091 < 2**63


def test_wrong_rows():
    config = dataclasses.replace(v41_nano(), engram_num_embeddings=(3252, 3500))
    with pytest.raises(ValueError, match=r"engram_num_embeddings: got \[3252, 3500\], allowed is the sums of"):
        check_engram_rows(config)
    with pytest.raises(ValueError, match="engram_num_embeddings"):
        EngramTables.build(config)


def make_tokenizer(tokens, special=()):
    """Byte-level vocabulary of the given token strings (as the library spells bytes: a space is Ġ, a newline Ċ)."""
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def test_token_map_rules():
    tokens = ["a", "A", "Ġa", "Ä", "Ãī", "e", "Ġ", "ĠĠ", "Ċ", "ĉĠ", "Ã", "Â", "ï¼¡", "b", "aĠb", "aĊĊb", "Ì", "ÌĢ"]
    index = {token: i for i, token in enumerate(tokens)}
    mapped = token_map_of(make_tokenizer(tokens, ["<end>"]), len(tokens) + 3).tolist()

    def same(*names):
        return len({mapped[index[name]] for name in names}) == 1

    assert mapped[0] == 0 and sorted(set(mapped)) == list(range(max(mapped) + 1))  # first seen, without gaps
    assert same("a", "A", "Ġa", "ï¼¡")  # case, outer space, full-width form (ï¼¡ is U+FF21)
    assert same("Ãī", "e")  # É is an e with an accent
    assert same("Ġ", "ĠĠ", "Ċ", "ĉĠ") and not same("Ġ", "a")  # white space alone is one space, and kept
    assert same("aĠb", "aĊĊb") and not same("aĠb", "b")  # runs of white space inside
    assert not same("Ã", "Â") and not same("Ã", "Ä")  # parts of a character go by their own spelling
    combining = mapped[index["ÌĢ"]]  # U+0300 alone normalises to nothing and stands for itself
    assert mapped.count(combining) == 1
    assert len({*mapped[len(tokens) :]}) == 3 and not {*mapped[len(tokens) :]} & {*mapped[: len(tokens)]}


def test_bundled_tokenizers():
    """Sizes that checkpoints of the small models were made for; a new version of `tokenizers` must not move them."""
    from orchestrator.text.files import bundled_tokenizer

    for name, vocab, size in (("v41-nano", 512, 412), ("v41-mini", 4096, 2740)):
        tokenizer = Tokenizer.from_str(bundled_tokenizer(name).text)
        assert compressed_vocab_size(tokenizer, vocab) == size


def test_build():
    tables = EngramTables.build(v41_nano())
    assert tables.token_map.tolist() == list(range(512)) and tables.mapped_pad == 2
    assert sorted(tables.layers) == [1, 4]
    assert tables.layer(4).primes.tolist() == bucket_primes(v41_nano())[1].tolist()
    assert tables.layer(1).multipliers.shape == (4,) and tables.layer(1).offsets.shape == (6,)


def test_map_must_fit():
    config = dataclasses.replace(v41_nano(), engram_compressed_vocab_size=400)
    message = r"tokenizer: got the identity map \(no tokenizer\.json\) of 512 ids, allowed is engram_comp"
    with pytest.raises(ValueError, match=message):
        EngramTables.build(config)
    tokenizer = make_tokenizer(["a", "A"])
    with pytest.raises(ValueError, match=r"got the map of this tokenizer of 511 ids, .* \(400\); use the tok"):
        EngramTables.build(config, tokenizer)
    assert EngramTables.build(dataclasses.replace(config, engram_compressed_vocab_size=511), tokenizer).mapped_pad == 1


def test_without_engram():
    config = dataclasses.replace(v41_nano(), engram_layer_ids=(), engram_num_embeddings=())
    assert EngramTables.build(config).layers == {}
