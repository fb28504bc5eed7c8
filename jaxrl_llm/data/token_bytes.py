"""What tokens stand for: texts and bytes of single ones, and the text of an answer as it comes."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int

UNFINISHED = "\ufffd"
"""What a character is decoded to while bytes of it are missing."""

LONGEST_HELD = 1024
"""So many unfinished characters in a row are none."""

CONTEXT_TOKENS = 6
"""So many tokens of a prompt are decoded with its answer, or more where they hold no text."""

MOST_CONTEXT = 2048

Decode = Callable[[Sequence[int]], str]
"""From token ids to text."""


class Vocabulary:
    """Single tokens as texts and bytes.

    Args:
        tokenizer: of `transformers`.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer; nothing is decoded yet."""
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return what a token stands for, a part of a character included."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def text_of(self, token: int) -> str:
        """Return a token's text, or as OpenAI `bytes:\\xe2\\x82` for a part of a character."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _find(self, token: int) -> bytes:
        text = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if UNFINISHED in text:
            if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
                return bytes.fromhex(byte[1])
            if all(letter in BYTE_OF for letter in piece):
                return bytes(BYTE_OF[letter] for letter in piece)
        if f" {text}" == piece.replace("▁", " "):
            text = f" {text}"  # decoded alone, a word loses its first space
        return text.encode()


def byte_letters() -> dict[str, int]:
    """Return the letters by which byte-level BPE writes bytes (GPT-2's `bytes_to_unicode`).

    >>> byte_letters()["Ġ"]
    32
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = byte_letters()


def text_decoder(tokenizer: Any, *, skip_special_tokens: bool = True) -> Decode:
    """Return the function from token ids to their text, whose spaces stay as they are.

    Args:
        tokenizer: of `transformers`; some would drop the space before a full stop.
        skip_special_tokens: whether special tokens are left out.
    """
    return functools.partial(
        tokenizer.decode,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


def decode_after(prompt: Sequence[int], decode: Decode) -> Decode:
    """Return the function from an answer's tokens to the text that they add to their prompt's.

    Decoded alone, an answer may lose its first space: the decoders of SentencePiece's tokenizers
    drop it where a text begins. So the prompt's last tokens are decoded with it, as vLLM does.

    Args:
        prompt: token ids.
        decode: token ids -> text.

    >>> words = ["hello", " the", " world"]
    >>> decode = lambda tokens: "".join(words[token] for token in tokens).removeprefix(" ")
    >>> decode([1, 2]), decode_after([0], decode)([1, 2])
    ('the world', ' the world')
    """
    if not prompt:
        return decode
    size = CONTEXT_TOKENS
    context = [*prompt[-size:]]
    known = decode(context)
    while size < min(len(prompt), MOST_CONTEXT) and known[:1] in ("", UNFINISHED):
        size *= 4
        context = [*prompt[-size:]]
        known = decode(context)
    finished = known.rstrip(UNFINISHED)

    def text_of(tokens: Sequence[int]) -> str:
        whole = decode([*context, *tokens])
        return whole[len(known if whole.startswith(known) else finished) :]

    return text_of


def special_stop_ids(stops: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of those stop texts that are special tokens, which no decoded text shows.

    Args:
        stops: texts that end an answer.
        tokenizer: of `transformers`.

    Raises:
        ValueError: a stop text holds a special token and other text.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {token.content: number for number, token in added if token.special}
    for stop in stops:
        inside = [text for text in special if len(text) > 1 and text in stop]
        if inside and stop not in special:
            raise ValueError(
                f"stop: {stop!r} holds the special token {max(inside, key=len)!r}, which is no text"
                " of an answer; expected the token alone, or none"
            )
    return tuple(special[stop] for stop in stops if stop in special)


class AnswerText:
    """The text of one answer, as its tokens come: complete characters only, and no stop text.

    A window of the last tokens is decoded, from a border between characters on. What may still
    become another character, or a stop text, is held back.

    Args:
        decode: token ids -> text.
        stops: texts that end the answer and are no part of it.
        signs: single characters in what `decode` returns that stand for longer texts, and these.

    Attributes:
        stopped_by: the stop text that ended it, if one did.
        length: characters so far, with those that are held back.

    >>> words = AnswerText(lambda tokens: bytes(tokens).decode(errors="replace"), ["END"])
    >>> words.push([0x20, 0xE2, 0x82]), words.push([0xAC, 0x45]), words.push([0x4E, 0x44])
    (' ', '€', '')
    >>> words.stopped_by
    'END'
    """

    def __init__(
        self, decode: Decode, stops: Sequence[str], signs: Mapping[str, str] | None = None
    ) -> None:
        self._decode, self._stops, self._signs = decode, stops, signs or {}
        self._before: list[int] = []  # tokens of the window whose text is known
        self._after: list[int] = []
        self._known = 0  # characters of the window's text
        self._held = ""
        self.length = 0
        self.stopped_by: str | None = None

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Take the next tokens and return the text that is now certain.

        Args:
            tokens: any number of them.
            last: nothing follows: give all.
        """
        if self.stopped_by is not None:
            return ""
        fresh = self._read(tokens, last)
        self.length += len(fresh)
        text = self._held + fresh
        written = "".join(self._signs.get(letter, letter) for letter in text)
        starts = {stop: start for stop in self._stops if (start := written.find(stop)) >= 0}
        if starts:
            self.stopped_by, self._held = min(starts, key=starts.__getitem__), ""
            count, rest = self._place(text, starts[self.stopped_by])
            return text[:count] + rest
        keep = 0 if last else longest_beginning(written, self._stops)
        count, _ = self._place(text, len(written) - keep)
        self._held = text[count:]
        return text[:count]

    def _read(self, tokens: Sequence[int], last: bool) -> str:
        self._after = [*self._after, *tokens]
        whole = self._decode(self._before + self._after)
        certain = whole if last else whole.rstrip(UNFINISHED)
        if len(whole) - len(certain) > LONGEST_HELD:
            certain = whole
        fresh = certain[self._known :]
        self._known = max(self._known, len(certain))
        if len(certain) == len(whole) and (known := len(self._decode(self._after))):
            self._before, self._after, self._known = self._after, [], known
        return fresh

    def _place(self, text: str, length: int) -> tuple[int, str]:
        """Return how many characters fit into a length as written, and what fits of the next."""
        if not self._signs:
            return length, ""
        for count, letter in enumerate(text):
            word = self._signs.get(letter, letter)
            if len(word) > length:
                return count, word[:length]
            length -= len(word)
        return len(text), ""


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which a stop text begins.

    >>> longest_beginning("so the EN", ["END"])
    2
    """
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(stop.startswith(text[len(text) - size :]) for stop in stops):
            return size
    return 0


UNALIGNED = -1
"""The span of a token that no tokens of the other tokenizer stand against."""


class Alignment(NamedTuple):
    """Which tokens of two tokenizers cover the same bytes.

    A span is as short as it can be: no two tokens end together inside of it. Its tokens stand side
    by side.

    Attributes:
        left: number of the span of each token, from 0; `UNALIGNED` where there is none.
        right: the same of the other tokenizer's tokens.
    """

    left: Int[np.ndarray, " n"]
    right: Int[np.ndarray, " m"]

    @property
    def spans(self) -> int:
        """Return the number of spans."""
        return int(self.left.max(initial=UNALIGNED)) + 1

    def join(self) -> "Alignment":
        """Return the same with a token more on each side, which stand against each other."""
        return Alignment(np.append(self.left, self.spans), np.append(self.right, self.spans))

    def without(self, dropped: Int[np.ndarray, " k"]) -> "Alignment":
        """Return the same with some spans taken away, by number; the others keep theirs."""
        left, right = (
            np.where(np.isin(side, dropped), UNALIGNED, side).astype(np.int32) for side in self
        )
        return Alignment(left, right)


def align_bytes(left: Sequence[bytes], right: Sequence[bytes]) -> Alignment:
    """Find the shortest spans of tokens that cover the same bytes.

    Two tokens that end after the same number of bytes end a span, so tokens may split a character.
    From where the bytes differ on, no token has a span.

    Args:
        left: what each token stands for.
        right: the same of the other tokenizer.

    >>> align_bytes([b"un", b"known"], [b"unk", b"no", b"wn"]).left.tolist()
    [0, 0]
    >>> align_bytes([b"a ", b"cat"], [b"a", b" ", b"cat"]).right.tolist()
    [0, 0, 1]
    """
    ends, others = (
        np.cumsum([len(token) for token in side], dtype=np.int64) for side in (left, right)
    )
    shared = np.intersect1d(ends, others)
    shared = shared[(shared > 0) & (shared <= _count_equal(b"".join(left), b"".join(right)))]

    def number(end: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        spans = np.searchsorted(shared, end)
        return np.where(spans < len(shared), spans, UNALIGNED).astype(np.int32)

    return Alignment(number(ends), number(others))


def _count_equal(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts begin alike with."""
    size = min(len(one), len(other))
    unequal = np.flatnonzero(
        np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    )
    return int(unequal[0]) if unequal.size else size


def spread_logprobs(
    left: Float32[np.ndarray, " n"], right: Float32[np.ndarray, " m"], alignment: Alignment
) -> Float32[np.ndarray, " n"]:
    r"""Return the log-probs on the right as ones of the tokens on the left, span by span.

    A span of n tokens on the left with the sums $\Sigma_l$ and $\Sigma_r$ of log-probs gives its
    token i

    $$\log \pi_{l,i} - (\Sigma_l - \Sigma_r) / n$$

    so the tokens of a span share its difference equally, and the sum over them is $\Sigma_r$. One
    number alone is no log-prob: it may be above 0.

    Args:
        left: log-probs of the tokens on the left, in nats.
        right: the same on the right.
        alignment: of the tokens.

    Returns:
        In nats; 0 on tokens without a span.

    >>> both = align_bytes([b"un", b"known"], [b"unk", b"no", b"wn"])
    >>> given = np.float32([-1, -2]), np.float32([-0.5, -0.25, -0.25])
    >>> spread_logprobs(*given, both).tolist()
    [0.0, -1.0]
    """
    spans, aligned = alignment.spans, alignment.left != UNALIGNED
    if spans == 0:
        return np.zeros(len(left), np.float32)
    inside = alignment.right != UNALIGNED
    sums = np.bincount(alignment.left[aligned], left[aligned].astype(np.float64), spans)
    others = np.bincount(alignment.right[inside], right[inside].astype(np.float64), spans)
    sizes = np.bincount(alignment.left[aligned], minlength=spans)
    shares = (sums - others) / np.maximum(sizes, 1)
    spread = left - shares[np.where(aligned, alignment.left, 0)]
    return np.where(aligned, spread, 0.0).astype(np.float32)
