import functools
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.token_bytes import AnswerText, Vocabulary, decode_after, text_decoder
from tests.data.real_templates import build
from tests.serving.conftest import sentencepiece

ALPHABET = "ab é世🙂\ufffd"


@functools.cache
def wordpiece():
    """A tokenizer that puts spaces between words."""
    vocab = {"[UNK]": 0, "the": 1, "world": 2, "x": 3, "##x": 4, "xthe": 5}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece("##", False)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def streamed(decode, tokens, ends, stops=()):
    """Return the pieces of a text whose tokens are cut at these places, and whether it stopped."""
    words = AnswerText(decode, stops)
    ends = sorted({min(end, len(tokens)) for end in ends} | {0, len(tokens)})
    pieces = [words.push(tokens[a:b]) for a, b in itertools.pairwise(ends)]
    return [*pieces, words.push([], last=True)], words.stopped_by is not None


@given(
    st.text(ALPHABET, max_size=12),
    st.lists(st.integers(0, 30)),
    st.lists(st.text("ab 世🙂", min_size=1, max_size=3), max_size=2),
)
def test_pieces_make_up_the_text_before_the_first_stop_text(text, ends, stops):
    pieces, stopped = streamed(
        lambda tokens: bytes(tokens).decode(errors="replace"), list(text.encode()), ends, stops
    )
    starts = [text.find(stop) for stop in stops if stop in text]
    assert stopped == bool(starts)
    if len(ends) == 0:  # an engine ends a piece with the token that completes a stop text
        assert "".join(pieces) == (text[: min(starts)] if starts else text)
    else:
        whole = "".join(pieces)
        assert text.startswith(whole)
        assert not any(stop in whole for stop in stops)
        assert starts or whole == text


def test_nothing_incomplete_is_shown_and_all_else_is_at_once(tokenizer):
    text = "é世🙂!"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode())  # each token is a byte
    pieces, _ = streamed(tokenizer.decode, tokens, range(len(tokens)))
    assert pieces == ["", "é", "", "", "世", "", "", "", "🙂", "!", ""]
    cuts, _ = streamed(tokenizer.decode, tokens[:4], [3])
    assert cuts == ["é", "", "\ufffd"]  # the model broke off inside a character


@pytest.mark.parametrize("kind", ["llama 2", "qwen3", "bert"])
@given(
    st.lists(
        st.sampled_from([" the", "the", " world", " ", "\n", "é", "世", "🙂", "x"]), max_size=12
    ),
    st.integers(0, 40),
    st.lists(st.integers(0, 30), max_size=5),
)
@example([" the", " world"], 0, [1])
@example(["x", " the", " world"], 2, [1])
@example([" the"], 2, [])  # the prompt is <s> and ▁, which has no text alone
def test_an_answer_reads_as_it_does_after_its_prompt(kind, words, cut_at, ends):
    """The oracle is the tokenizer on prompt and answer together, wherever these are parted."""
    tokenizer = {"llama 2": sentencepiece, "qwen3": lambda: build("qwen3")[0], "bert": wordpiece}
    decode = text_decoder(tokenizer[kind]())
    tokens = tokenizer[kind]()("".join(words))["input_ids"]
    prompt, answer = tokens[:cut_at], tokens[cut_at:]
    pieces, _ = streamed(decode_after(prompt, decode), answer, ends)
    before, whole = decode(prompt), decode(tokens)
    if whole.startswith(before):  # else the prompt ends inside a character
        assert before + "".join(pieces) == whole
    else:
        assert whole.endswith("".join(pieces))
        assert before.rstrip("\ufffd") + "".join(pieces) == whole


def test_what_may_become_a_stop_text_is_held_back():
    words = AnswerText(lambda tokens: "".join(map(chr, tokens)), ["STOP", "OPERA"])
    pieces = [words.push([ord(c)]) for c in "xSTOOPENd"]
    assert pieces == ["x", "", "", "", "STO", "", "", "OPEN", "d"]
    assert words.push([ord(c) for c in "STO"], last=True) == "STO"


def test_a_token_alone_shows_its_bytes(tokenizer):
    vocabulary = Vocabulary(tokenizer)
    tokens = tokenizer("a世", add_special_tokens=False)["input_ids"]
    texts = ["a", "bytes:\\xe4", "bytes:\\xb8", "bytes:\\x96"]
    assert [vocabulary.text_of(t) for t in tokens] == texts
    assert b"".join(map(vocabulary.bytes_of, tokens)) == "a世".encode()
    assert [vocabulary.text_of(t) for t in (257, 263)] == ["<|end|>", ""]
