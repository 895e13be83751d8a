"""Text that grows token by token."""

from hypothesis import given
from hypothesis import strategies as st

from replayssm_jax.text import TextStream, decode
from tests.replayssm_jax.chain_model import byte_tokenizer

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def feed(tokens, sizes, stop_strings=()):
    """The pieces that come out of tokens pushed in groups, and the stream."""
    stream = TextStream(TOKENIZER, stop_strings)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(stream.push(tokens[start : start + size]))
        start += size
    pieces.append(stream.push(tokens[start:]))
    return [*pieces, stream.finish()], stream


def test_no_piece_splits_a_character():
    text = "naïve – 日本 👩‍🚀!"
    pieces, stream = feed(ids(text), [1] * len(ids(text)))
    assert stream.text == "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_never_become_a_character_come_at_the_end():
    half = ids("é")[:1]
    pieces, stream = feed([*ids("a"), *half], [1, 1])
    assert pieces == ["a", "", "", "\ufffd"]
    assert stream.text == "a\ufffd"


def test_special_tokens_are_no_text():
    pieces, _ = feed([*ids("ab"), TOKENIZER.eos_token_id, *ids("c")], [1, 1, 1, 1])
    assert "".join(pieces) == "abc"


@given(tokens=st.lists(st.integers(0, 255), max_size=40), sizes=st.lists(st.integers(0, 5), max_size=20))
def test_any_bytes_in_any_groups_join_to_the_whole(tokens, sizes):
    pieces, stream = feed(tokens, sizes)
    assert "".join(pieces) == stream.text == decode(TOKENIZER, tokens)


@given(
    text=st.text(alphabet="abé", max_size=30),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_wherever_tokens_lie(text, stops):
    pieces, stream = feed(ids(text), [1] * len(ids(text)), stops)
    # Token by token, the stop string that is complete first wins, and the text ends where it begins.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    first = min((end for end, _ in ends), default=None)
    expected = text if first is None else text[: min(begin for end, begin in ends if end == first)]
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == bool(ends)


def test_text_that_may_begin_a_stop_string_is_held_back():
    stream = TextStream(TOKENIZER, ["\n\nUser:"])
    assert stream.push(ids("Yes.\n\nUs")) == "Yes."
    assert stream.push(ids("ually\n")) == "\n\nUsually"
    assert stream.push(ids("\nUser: hi")) == ""
    assert stream.stopped
    assert stream.text == "Yes.\n\nUsually"
    assert stream.push(ids("more")) == "" == stream.finish()


def test_long_texts_need_no_long_decodes(monkeypatch):
    lengths = []
    plain = TOKENIZER.decode

    def counted(self, tokens, **options):
        lengths.append(len(tokens))
        return plain(tokens, **options)

    monkeypatch.setattr(type(TOKENIZER), "decode", counted)
    tokens = ids("plain text " * 100)
    feed(tokens, [1] * len(tokens))
    assert max(lengths) <= 2
