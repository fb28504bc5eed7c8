"""The text of each token of an answer, also where a character takes several tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl_llm.config.errors import RELATIVE
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.models.hf.hub import HUB_ID

REPLACEMENT = "\ufffd"
"""What stands for bytes that are no whole character."""

LONGEST_CHARACTER = 8
"""Tokens that are tried at most until they make a whole character."""

Decode = Callable[[list[int]], str]


def decoder(model: str) -> Decode:
    """Return a function from token ids to text, special tokens included.

    Nothing is downloaded: a model of the hub must be in its cache.

    Args:
        model: a directory or a hub repository, as `model.path` names it.

    Raises:
        ValueError: its tokenizer is not on this machine, or can't be read.
    """
    path = Path(model)
    if not path.is_dir():
        path = _cached(model)
    if (path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer  # takes a hundredth of the time of transformers

        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # it raises nothing more special
            raise ValueError(f"{path / 'tokenizer.json'} can't be read: {error}") from error
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    slow = load_tokenizer(path)
    return lambda ids: slow.decode(ids, clean_up_tokenization_spaces=False)


def _cached(model: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    if match := HUB_ID.fullmatch(model):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            found = try_to_load_from_cache(match["repo"], name, revision=match["revision"])
            if isinstance(found, str):
                return Path(found).parent
    hint = "" if Path(model).is_absolute() else f" ({RELATIVE})"
    raise ValueError(f"the tokenizer of {model!r} is not on this machine{hint}")


class TokenTexts:
    """Splits token ids into texts that together are the text of all.

    Args:
        decode: token ids -> text.
    """

    def __init__(self, decode: Decode) -> None:
        """Know nothing yet."""
        self._decode = decode
        self._known = dict[tuple[int, ...], str]()

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, as it reads after the one before.

        Of a character that takes several tokens, the first has the character and the others are
        empty.

        >>> byte = lambda ids: bytes(ids).decode("utf-8", "replace")
        >>> TokenTexts(byte)([0x61, 0xC3, 0xBC, 0x21])
        ['a', 'ü', '', '!']
        """
        texts = list[str]()
        while (at := len(texts)) < len(ids):
            before = tuple(ids[max(at - 1, 0) : at])
            taken, text = 1, ""
            for count in range(1, min(LONGEST_CHARACTER, len(ids) - at) + 1):
                tried = self._after(before, tuple(ids[at : at + count]))
                if count == 1 or tried == REPLACEMENT or not tried.endswith(REPLACEMENT):
                    taken, text = count, tried
                if not tried.endswith(REPLACEMENT):
                    break
            texts += [text] + [""] * (taken - 1)
        return texts

    def _after(self, before: tuple[int, ...], ids: tuple[int, ...]) -> str:
        """Return what token ids add to the text of the one before them."""
        key = (*before, -1, *ids)
        if key not in self._known:
            start = self._decode(list(before)) if before else ""
            whole = self._decode([*before, *ids])
            self._known[key] = whole[len(start) :]
        return self._known[key]
