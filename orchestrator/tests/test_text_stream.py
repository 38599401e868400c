import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.engine.text_stream import TextStream
from orchestrator.text.files import bundled_tokenizer

NANO = bundled_tokenizer("v41-nano")
BYTE_ID = {NANO.token_bytes(i): i for i in range(3, 259)}
ALPHABET = st.sampled_from(["a", "b", "é", "漢", "🎉", "\n", "<", "/", "｜"])


def byte_ids(data: bytes) -> list[int]:
    return [BYTE_ID[data[i : i + 1]] for i in range(len(data))]


def run(ids, stop=()):
    stream, pieces = TextStream(NANO, stop), []
    for token_id in ids:
        delta = stream.push(token_id)
        pieces.append(delta.text)
        if delta.stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream.stopped


def expected(text: str, stops) -> tuple[str, str | None]:
    """Plain search: the stop string that is complete first, the longest of those complete together."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(data=st.binary(max_size=40))
@example(data="🎉".encode()[:3])
@example(data=b"\xf0\x9f\x8e\xff\xe6\xbc")
@settings(deadline=None)
def test_any_bytes_split_at_every_byte(data):
    pieces, _ = run(byte_ids(data))
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


@given(text=st.text(ALPHABET, max_size=30), stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4))
@settings(max_examples=300, deadline=None)
def test_stop_strings_across_byte_borders(text, stops):
    pieces, stopped = run(byte_ids(text.encode()), stops)
    assert ("".join(pieces), stopped) == expected(text, stops)


@given(text=st.text(ALPHABET, max_size=30), stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3))
@settings(deadline=None)
def test_merged_tokens_give_the_same_text(text, stops):
    whole, stopped = run(NANO.encode(text), stops)
    assert ("".join(whole), stopped) == expected(text, stops)


@given(ids=st.lists(st.integers(0, NANO.vocab_size - 1), max_size=40))
@settings(deadline=None)
def test_any_ids_decode_as_in_one_piece(ids):
    pieces, _ = run(ids)
    assert "".join(pieces) == NANO.decode(ids)


def test_text_leaves_as_soon_as_it_is_certain():
    stream = TextStream(NANO, ["END"])
    assert [stream.push(i).text for i in byte_ids(b"xENxEN")] == ["x", "", "", "ENx", "", ""]
    assert stream.finish() == "EN"


def test_character_waits_for_its_last_byte():
    stream = TextStream(NANO)
    assert [stream.push(i).text for i in byte_ids("é漢".encode())] == ["", "é", "", "", "漢"]


def test_stop_at_first_byte_and_after_stop():
    stream = TextStream(NANO, ["a"])
    assert stream.push(BYTE_ID[b"a"]) == stream.push(BYTE_ID[b"b"])
    assert stream.stopped == "a" and stream.finish() == ""


def test_stop_completed_by_an_unfinished_character():
    pieces, stopped = run(byte_ids(b"x\xf0\x9f"), ["\ufffd"])
    assert ("".join(pieces), stopped) == ("x", "\ufffd")


@pytest.mark.parametrize("bad", ["abc", [""], [1]])
def test_bad_stop_is_refused(bad):
    with pytest.raises(ValueError, match="stop"):
        TextStream(NANO, bad)
