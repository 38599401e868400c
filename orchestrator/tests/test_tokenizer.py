import json
import platform
from types import SimpleNamespace

import deepseek_recipe
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.text import Tokenizer, load_tokenizer, specials, write_tokenizer
from orchestrator.text.corpus import corpus_digest, read_corpus
from orchestrator.text.files import bundled_tokenizer
from orchestrator.text.train import DATA, train

NAMES = tuple(specials.SMALL_VOCABULARIES)


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request):
    return bundled_tokenizer(request.param)


def test_layout_follows_the_rules_of_the_configuration(tokenizer):
    size = tokenizer.vocab_size
    assert size in specials.SMALL_VOCABULARIES.values()
    assert [tokenizer.token_bytes(i).decode() for i in (0, 1, 2)] == [specials.BOS, specials.EOS, specials.PAD]
    assert tokenizer.special_id(specials.SYSTEM) == size - 3
    assert tokenizer.special_id(tokenizer.image_spelling) == size - 2
    assert tokenizer.eos_ids == (1,) and tokenizer.bos_id == 0
    assert sorted(tokenizer.token_bytes(i) for i in range(3, 259)) == [bytes([b]) for b in range(256)]


def test_every_special_token_of_the_recipe_is_one_id(tokenizer):
    kinds = [getattr(deepseek_recipe.SpecialToken, name) for name in dir(deepseek_recipe.SpecialToken)]
    spellings = [kind.default_str() for kind in kinds if hasattr(kind, "default_str")]
    assert len(spellings) == 18
    for spelling in spellings:
        assert tokenizer.encode_with_specials(spelling) == [tokenizer.special_id(spelling)]


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_text_survives_and_never_yields_added_tokens(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.added_ids)


@pytest.mark.parametrize("spelling", [s.text for s in (*specials.LEADING, *specials.TRAILING)])
def test_typed_control_tokens_stay_text(tokenizer, spelling):
    ids = tokenizer.encode(f"a {spelling} b")
    assert not set(ids) & set(tokenizer.added_ids)
    assert tokenizer.decode(ids) == f"a {spelling} b"
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer.recipe)
    user = deepseek_recipe.Conversation([deepseek_recipe.UserMessage(spelling)], thinking_mode=False)
    assert encoding.encode(user)[2:-2] == tokenizer.encode(spelling)


def test_empty_user_turn_is_four_ids(tokenizer):
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer.recipe)
    conversation = deepseek_recipe.Conversation([deepseek_recipe.UserMessage("")], thinking_mode=False)
    names = (specials.BOS, specials.USER, specials.ASSISTANT, specials.THINK_END)
    assert encoding.encode(conversation) == [tokenizer.special_id(name) for name in names]


def test_control_tokens_are_hidden_and_markup_is_shown(tokenizer):
    ids = tokenizer.encode_with_specials(f"{specials.BOS}a{specials.THINK_END}b{specials.EOS}")
    assert tokenizer.decode(ids) == "a</think>b"
    assert tokenizer.decode(ids, skip_control=False).startswith(specials.BOS)


def test_partial_characters_become_replacement_characters(tokenizer):
    ids = tokenizer.encode("é")
    assert tokenizer.decode(ids[:1]) == ("é" if len(ids) == 1 else "\ufffd")


def test_files_round_trip(tmp_path):
    write_tokenizer(tmp_path, SimpleNamespace(vocab_size=512, max_position_embeddings=4096))
    again = load_tokenizer(tmp_path)
    assert again.text == bundled_tokenizer("v41-nano").text
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 4096


def test_unknown_size_is_refused_before_writing(tmp_path):
    with pytest.raises(ValueError, match="4096, 512"):
        write_tokenizer(tmp_path / "new", SimpleNamespace(vocab_size=1000))
    assert not (tmp_path / "new").exists()


def test_errors_name_the_file_and_the_next_step(tmp_path):
    with pytest.raises(FileNotFoundError, match="copy the tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_out_of_range_ids_are_refused(tokenizer):
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="token_id"):
            tokenizer.token_bytes(bad)


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size"):
        train(100, ["text"])
    with pytest.raises(ValueError, match="varied"):
        train(400, ["text"])


def test_training_again_gives_the_same_files():
    made_with = json.loads((DATA / "provenance.json").read_text())
    here = {"python": platform.python_version(), "tokenizers": tokenizers.__version__}
    if here != {key: made_with[key] for key in here}:
        pytest.skip(f"made with {made_with}; this is {here}, whose corpus or trainer may differ")
    texts = read_corpus()
    if corpus_digest(texts) != made_with["corpus_sha256"]:
        pytest.skip("this Python's library sources are not the ones the files were made from")
    for name, size in specials.SMALL_VOCABULARIES.items():
        assert train(size, texts) + "\n" == (DATA / f"{name}.json").read_text()


def test_decoding_in_one_piece_equals_bytes_of_the_ids(tokenizer):
    ids = list(range(tokenizer.vocab_size))
    joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", errors="replace")
    assert tokenizer.decode(ids, skip_control=False) == joined
    assert isinstance(tokenizer, Tokenizer)
