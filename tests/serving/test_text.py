import dataclasses
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.token_bytes import BYTE_OF, AnswerText, decode_after, text_decoder
from jaxrl_llm.rollout.openai_api.requests import BYTES, COMPOSED, APIError, TextLimit, text_limit
from tests.data.real_templates import build
from tests.serving.conftest import sentencepiece

ALPHABET = "ab é世🙂\ufffd"


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
    whole = "".join(pieces)
    assert text.startswith(whole)
    assert not any(stop in whole for stop in stops)
    if not (starts and ends):  # an engine ends a piece with the token that completes a stop text
        assert whole == text[: min(starts, default=None)]


def test_nothing_incomplete_is_shown_and_all_else_is_at_once(tokenizer):
    text = "é世🙂!"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode())  # each token is a byte
    pieces, _ = streamed(tokenizer.decode, tokens, range(len(tokens)))
    assert pieces == ["", "é", "", "", "世", "", "", "", "🙂", "!", ""]
    cuts, _ = streamed(tokenizer.decode, tokens[:4], [3])
    assert cuts == ["é", "", "\ufffd"]  # the model broke off inside a character


PARTS = st.sampled_from([" the", "the", " world", " ", "\n", "é", "世", "🙂", "x"])


@pytest.mark.parametrize("kind", ["llama 2", "qwen3"])
@given(st.lists(PARTS, max_size=12), st.integers(0, 40), st.lists(st.integers(0, 30), max_size=5))
@example([" the", " world"], 0, [1])
@example(["x", " the", " world"], 2, [1])
@example([" the"], 2, [])  # the prompt is <s> and ▁, which has no text alone
def test_an_answer_reads_as_it_does_after_its_prompt(kind, words, cut_at, ends):
    """The oracle is the tokenizer on prompt and answer together, wherever these are parted."""
    tokenizer = sentencepiece() if kind == "llama 2" else build(kind)[0]
    decode, tokens = text_decoder(tokenizer), tokenizer("".join(words))["input_ids"]
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


GREEK = "α\u0313\u0300\u0345"  # four code points, which NFC makes one of


def wrapped(model, normalizer=None, pre_tokenizer=None, **end):
    made = Tokenizer(model)
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    made.add_special_tokens([AddedToken("<e>", **end)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def of_bytes(normalizer=None, pre_tokenizer=None, **end):
    """As Qwen's and Llama 3's: each letter is a byte; three of a Greek one are a token."""
    first, second, third = (next(k for k, v in BYTE_OF.items() if v == b) for b in b"\xe1\xbe\x82")
    tokens = [*BYTE_OF, first + second, first + second + third]
    merges = [(first, second), (first + second, third)]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizer, last] if pre_tokenizer else [last]
    return wrapped(model, normalizer, pre_tokenizers.Sequence(steps), **end)


def with_bytes(normalizer, **end):
    """As Llama 2's and Gemma's: letters, and bytes for those that are unknown."""
    tokens = ["<unk>", "▁", "a", "b", "aa", "aaa", *sorted(BYTES)]
    merges = [("a", "a"), ("aa", "a")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return wrapped(model, normalizer, **end)


SPACE = normalizers.Replace(" ", "▁")
LOWER = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
BOUNDED = {
    **{"quickstart": None, "bytes, NFC": of_bytes(normalizers.NFC())},
    **{"bytes, NFKC, lowercase": of_bytes(LOWER), "bytes, rstrip": of_bytes(rstrip=True)},
    "bytes, split": of_bytes(None, pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated")),
    "fallback": with_bytes(normalizers.Sequence([normalizers.Prepend("▁"), SPACE])),
    "fallback, strip": with_bytes(normalizers.Sequence([normalizers.Strip(), SPACE])),
}
LETTERS = st.sampled_from(["a", "aaa", "B", " ", "\t\n  ", "é", GREEK, "ﷺ", "🙂", "<e>", "\xa0"])


@pytest.fixture(params=BOUNDED)
def bounded(request, tokenizer):
    return BOUNDED[request.param] or tokenizer


def test_a_text_that_fits_is_never_refused(bounded):
    limit = text_limit(bounded, 1)

    @given(st.lists(LETTERS, max_size=30).map("".join))
    @example(GREEK * 50)
    @example("a" * 300)
    @example("<e>" + " " * 300)
    @example(" " * 300 + "a" + "\n" * 300)
    def fits(text):
        ids = bounded(text, add_special_tokens=False)["input_ids"]
        dataclasses.replace(limit, tokens=max(1, len(ids))).check(text, "prompt")

    fits()


def test_a_text_that_can_not_fit_is_refused(bounded):
    limit = text_limit(bounded, 10)
    most = 10 * limit.longest
    limit.check("a" * most, "prompt")
    with pytest.raises(APIError, match=r"^prompt") as no:
        limit.check("a" * (most + 1), "prompt")
    assert (no.value.status, no.value.code) == (400, "context_length_exceeded")
    with pytest.raises(APIError):
        limit.check("é" * (most * limit.composed + 1), "prompt")


def test_the_limits_of_tokenizers(tokenizer):
    assert text_limit(tokenizer, 256) == TextLimit(256, len("<|assistant|>"), 1, spaces=True)
    assert text_limit(BOUNDED["bytes, NFC"], 9) == TextLimit(9, 3, COMPOSED, spaces=True)
    for name in ("bytes, rstrip", "fallback, strip"):
        assert not text_limit(BOUNDED[name], 9).spaces


WORDS = {"[UNK]": 0, "a": 1}
ONE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
UNBOUNDED = {
    "no byte of a space": wrapped(models.BPE({"a": 0}, []), None, ONE_LEVEL),
    "words": wrapped(models.WordLevel(WORDS, unk_token="[UNK]"), None, pre_tokenizers.Whitespace()),
    "unigram": wrapped(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    "joined": wrapped(models.BPE(WORDS, [], unk_token="[UNK]", fuse_unk=True)),
    "collapsed": of_bytes(normalizers.Replace(Regex(" +"), " ")),
    "accents": of_bytes(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "removed": of_bytes(None, pre_tokenizers.Split(" ", "removed")),
}


def test_where_characters_may_vanish_there_is_no_limit():
    for name, tokenizer in UNBOUNDED.items():
        text = "a" + ("\u0301" if name == "accents" else " é" if name == "words" else " " * 9) * 20
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) < len(text) and text_limit(tokenizer, 9) is None, name
