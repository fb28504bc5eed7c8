"""Texts of special tokens in what users and tools say, which must not become those tokens."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class SpecialTexts:
    """The texts of a tokenizer's special tokens, and of other added tokens that its template names.

    One character is a letter of its own and no forgery.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.

    Attributes:
        tokens: their ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template, added = tokenizer.get_chat_template(), tokenizer.added_tokens_decoder
        self.tokens = {
            token.content: number
            for number, token in added.items()
            if len(token.content) > 1 and token.content.strip()
            if token.special or token.content in template
        }
        self._plain = {text for text, number in self.tokens.items() if not added[number].special}
        texts = sorted(self.tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def find(self, text: str) -> list[str]:
        """Return those that a text has, in its order; special tokens' alone if there are any."""
        found = self._pattern.findall(text)
        return [one for one in found if one not in self._plain] or found

    def hide(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Put signs of letters and digits, which templates leave alone, in the texts' places.

        Args:
            messages: of a chat.

        Returns:
            The messages, and the text that each sign stands for.
        """
        contents = list(_texts([dict(message) for message in messages]))
        special = sorted({text for content in contents for text in self._pattern.findall(content)})
        number = 0
        while any(f"zq{number}x" in content for content in contents):
            number += 1
        signs = {text: f"zq{number}x{i}q" for i, text in enumerate(special)}

        def replace(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(lambda match: signs[match[0]], value)
            if isinstance(value, dict):
                return {k: v if k == "role" else replace(v) for k, v in value.items()}
            return [replace(item) for item in value] if isinstance(value, list) else value

        return [replace(dict(m)) for m in messages], {sign: text for text, sign in signs.items()}

    def encode(self, text: str, signs: Mapping[str, str], *, after: str) -> list[int]:
        """Return the ids of a text that stands after a token.

        Args:
            text: with signs in it, whose texts become ordinary tokens.
            signs: as `hide` returns them.
            after: the text of the token. Some tokenizers encode a text's beginning otherwise.

        Raises:
            ValueError: the tokenizer knows a text as its special token only.
        """
        first, *rest = re.split(f"({'|'.join(signs)})", text) if signs else [text]
        ids = self._ids_after(after, first)
        for part in rest:
            ids += self._ordinary(signs[part]) if part in signs else self._ids(part)
        return ids

    def _ids_after(self, after: str, text: str) -> list[int]:
        if after:
            alone, both = self._ids(after), self._ids(after + text)
            if len(alone) == 1 and both[:1] == alone:
                return both[1:]
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _ordinary(self, text: str) -> list[int]:
        special = {*self.tokens.values()} - {self._tokenizer.unk_token_id}
        ids = encode_unmatched(self._tokenizer, text)
        if not special.isdisjoint(ids):
            ids = [token for letter in text for token in self._ids(letter)]
        if not special.isdisjoint(ids):
            raise ValueError(f"tokenizer: {text!r} is only a special token, expected plain pieces")
        return ids


def encode_unmatched(tokenizer: Any, text: str) -> list[int]:
    """Encode a text in which the texts of added tokens are letters as any others.

    Threads share a tokenizer, and `split_special_tokens` would set a flag of it for all of them.

    Args:
        tokenizer: a `transformers` tokenizer.
        text: to encode.
    """
    if not tokenizer.is_fast:  # its flag is an argument, not its state
        return list(
            tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        )
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [(text, (0, len(text)))]
    if backend.pre_tokenizer is not None:
        words = backend.pre_tokenizer.pre_tokenize_str(text)
    return [token.id for word, _ in words for token in backend.model.tokenize(word)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
