import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.token_bytes import BYTE_OF
from jaxrl_llm.rollout.openai_api.requests import BYTES, COMPOSED, APIError, TextLimit, text_limit

GREEK = "α\u0313\u0300\u0345"  # four code points, which NFC makes one of


def wrapped(model, normalizer=None, pre_tokenizer=None, **end):
    made = Tokenizer(model)
    if normalizer:
        made.normalizer = normalizer
    if pre_tokenizer:
        made.pre_tokenizer = pre_tokenizer
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
    **{"quickstart": None, "bytes": of_bytes(), "bytes, NFC": of_bytes(normalizers.NFC())},
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
    "letters": wrapped(models.BPE({"a": 0}, [])),
    "joined": wrapped(models.BPE(WORDS, [], unk_token="[UNK]", fuse_unk=True)),
    "collapsed": of_bytes(normalizers.Replace(Regex(" +"), " ")),
    "shortened": of_bytes(normalizers.Replace("  ", " ")),
    "accents": of_bytes(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "removed": of_bytes(None, pre_tokenizers.Split(" ", "removed")),
}


def test_where_characters_may_vanish_there_is_no_limit():
    for name, tokenizer in UNBOUNDED.items():
        text = "a" + ("\u0301" if name == "accents" else " é" if name == "words" else " " * 9) * 20
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) < len(text) and text_limit(tokenizer, 9) is None, name
