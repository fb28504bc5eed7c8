"""From checked rows to token ids in memory, and to batches whose position can be saved."""

import functools
import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxrl_llm.data.chat import ChatTemplate, Message, Tokenizer
from jaxrl_llm.data.row_fields import Row, map_rows, normalize_messages
from jaxrl_llm.data.visuals.rows import RowPictures, RowVisuals
from jaxrl_llm.models.inputs import Visual

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt with all that a reward function may want to know about it.

    Attributes:
        index: the row's position in the dataset, counted from 0.
        tokens: token ids.
        data_source: by which a reward function knows what is asked.
        ground_truth: the reference answer.
        extra_info: more about the row.
        messages: the chat, if it is one.
        tools: schemas of the row's tools, which the chat template shows.
        visuals: images and videos of the chat, in the order of their placeholder tokens.
        load: decodes them; None: there are none, or they are decoded.
    """

    index: int
    tokens: tuple[int, ...]
    data_source: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    visuals: tuple[Visual, ...] = ()
    load: RowPictures | None = field(default=None, compare=False, repr=False)

    def loaded(self) -> "Prompt":
        """Return the prompt with its images and videos decoded.

        Raises:
            RowError: one is damaged.
        """
        return self if self.load is None else replace(self, visuals=self.load(), load=None)


def load_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts with their images and videos decoded, several at a time.

    Raises:
        RowError: one is damaged.
    """
    if not any(prompt.load for prompt in prompts):
        return list(prompts)
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as threads:
        return list(threads.map(Prompt.loaded, prompts))


PromptLike: TypeAlias = Prompt | str | Sequence[Message] | Sequence[int]
"""A prompt, a text that is a chat's only message, the messages of a chat, or token ids."""


@dataclass(frozen=True)
class Example:
    """A tokenized supervised example.

    Attributes:
        tokens: of a chat.
        mask: of each token, whether the loss falls on it: those of answers that are trained.
        load: decodes the images and videos; None: there are none.
    """

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    load: RowPictures | None = field(default=None, compare=False, repr=False)


def tokenize_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    filter_overlong: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    encode: Callable[..., Sequence[int]] | None = None,
    visuals: RowVisuals | None = None,
    vocab_size: int | None = None,
) -> tuple[list[Prompt], int]:
    """Tokenize rows through the chat template.

    Args:
        rows: checked rows in verl's schema.
        tokenizer: with a chat template.
        max_prompt_tokens: the longest prompt allowed, in tokens.
        filter_overlong: drop longer prompts (counted and logged) instead of refusing them.
        template_kwargs: variables for the chat template.
        encode: (messages, tools of the row) -> token ids, instead of the chat template with these
            variables.
        visuals: reads the rows' images and videos; None: rows that have some are refused.
        vocab_size: of the model, whose token ids are below it; None: they are not compared.

    Returns:
        The prompts, whose images are not decoded yet, and how many rows were dropped.

    Raises:
        RowError: of rows, a prompt is too long and `filter_overlong` is off, the chat template does
            not fit, an image can't be used, or the model does not have a token.
        ValueError: no prompt is left.

    >>> from jaxrl_llm.data.chat import load_tokenizer
    >>> tokenizer = load_tokenizer("configs/quickstart")
    >>> chat = [{"role": "user", "content": "12"}]
    >>> row = {"prompt": chat, "data_source": "sums", "reward_model": {"ground_truth": "3"}}
    >>> prompts, dropped = tokenize_prompts([row], tokenizer, max_prompt_tokens=9)
    >>> tokenizer.decode(prompts[0].tokens), dropped
    ('<|user|>12<|end|><|assistant|>', 0)
    """
    encode = encode or ChatTemplate(tokenizer, template_kwargs).prompt
    visuals = visuals or RowVisuals()

    def tokenized(index: int, row: Row) -> Prompt | None:
        tools = row.get("tools") or []
        with_tools = functools.partial(encode, tools=tools)
        messages, tokens, load = visuals.prompt(row, index, with_tools, tokenizer)
        if not fits(len(tokens), max_prompt_tokens, "max_prompt_tokens", filter_overlong, load):
            return None
        check_ids(tokens, vocab_size, tokenizer)
        about = row["data_source"], row["reward_model"]["ground_truth"], row.get("extra_info") or {}
        return Prompt(index, tuple(tokens), *about, messages, tools, load=load)

    prompts = [prompt for prompt in map_rows(tokenized, rows) if prompt is not None]
    return prompts, count_dropped(len(rows), len(prompts), "max_prompt_tokens", max_prompt_tokens)


def as_prompts(
    prompts: Sequence[PromptLike],
    tokenizer: Tokenizer,
    *,
    vocab_size: int | None = None,
    **template_kwargs: Any,
) -> list[Prompt]:
    """Return tokenized prompts, from any of the forms that a prompt may have.

    Args:
        prompts: each a `Prompt`, a text that is a chat's only message, the messages of a chat, or
            token ids, which are taken as they are.
        tokenizer: with a chat template, if a prompt is a text or a chat.
        vocab_size: as for `tokenize_prompts`.
        **template_kwargs: variables for the chat template.

    Raises:
        RowError: a prompt is empty, the chat template does not fit, or the model does not have a
            token.

    >>> from jaxrl_llm.data.chat import load_tokenizer
    >>> tokenizer = load_tokenizer("configs/quickstart")
    >>> [tokenizer.decode(prompt.tokens) for prompt in as_prompts(["12", [16, 17]], tokenizer)]
    ['<|user|>12<|end|><|assistant|>', '12']
    """
    template = functools.cache(lambda: ChatTemplate(tokenizer, template_kwargs))

    def made(index: int, prompt: PromptLike) -> Prompt:
        one = _as_prompt(index, prompt, template)
        check_ids(one.tokens, vocab_size, tokenizer)
        return one

    return map_rows(made, prompts, name=lambda index, _: f"prompt {index}")


def _as_prompt(index: int, prompt: Any, template: Callable[[], ChatTemplate]) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    is_text = isinstance(prompt, str)
    chat: list[Any] = [{"role": "user", "content": prompt}] if is_text else list(prompt)
    if not chat:
        raise ValueError(f"expected a text, messages or token ids, got {prompt!r}")
    if not isinstance(chat[0], Mapping):
        return Prompt(index, tuple(map(operator.index, chat)))
    chat = normalize_messages([*map(dict, chat)], "messages", parts=True)
    return Prompt(index, tuple(template().prompt(chat)), messages=chat)


def tokenize_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    filter_overlong: bool = False,
    train_on: Literal["all", "last"] = "all",
    template_kwargs: Mapping[str, Any] | None = None,
    visuals: RowVisuals | None = None,
    vocab_size: int | None = None,
) -> tuple[list[Example], int]:
    """Tokenize supervised rows: conversations, or prompts with a response.

    An answer is what `ChatTemplate.conversation` says. A conversation is one example, or several
    where the template rewrites earlier answers when more follows; each answer is trained once.

    Args:
        rows: checked supervised rows.
        tokenizer: with a chat template.
        max_tokens: the longest example allowed, in tokens.
        filter_overlong: drop longer examples (counted and logged) instead of refusing them.
        train_on: which answers of a conversation are trained: all, or the last one.
        template_kwargs: variables for the chat template.
        visuals: as for `tokenize_prompts`.
        vocab_size: as there.

    Returns:
        The examples, and how many were dropped.

    Raises:
        RowError: as there, or an answer has a token of images.
        ValueError: as there.

    >>> from jaxrl_llm.data.chat import load_tokenizer
    >>> tokenizer = load_tokenizer("configs/quickstart")
    >>> row = {"prompt": [{"role": "user", "content": "1+1="}], "response": "2"}
    >>> (example,), _ = tokenize_examples([row], tokenizer, max_tokens=9)
    >>> tokenizer.decode([t for t, sampled in zip(example.tokens, example.mask) if sampled])
    '2<|end|>'
    """
    template, visuals = ChatTemplate(tokenizer, template_kwargs), visuals or RowVisuals()

    def tokenized(index: int, row: Row) -> list[Example | None]:
        chat = row.get("messages")
        encode = functools.partial(
            template.conversation,
            tools=row.get("tools") or (),
            last_only=chat is None or train_on == "last",
        )
        chat = [*row["prompt"], as_answer(row["response"])] if chat is None else chat
        made = []
        for tokens, mask, load in visuals.conversation(row, chat, index, encode, tokenizer):
            check_ids(tokens, vocab_size, tokenizer)
            is_short = fits(len(tokens), max_tokens, "max_tokens", filter_overlong, load)
            made.append(Example(tokens, mask, load) if is_short else None)
        return made

    made = [example for of_row in map_rows(tokenized, rows) for example in of_row]
    examples = [example for example in made if example is not None]
    return examples, count_dropped(len(made), len(examples), "max_tokens", max_tokens)


def as_answer(answer: str | Message) -> Message:
    """Return an answer as the assistant's message."""
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


def fits(
    length: int,
    limit: int,
    name: str,
    filter_overlong: bool,
    load: RowPictures | None = None,
) -> bool:
    """Return whether a row is short enough; raise ValueError unless longer ones are dropped."""
    if length > limit and not filter_overlong:
        images = f" ({sum(load.tokens)} are of images: lower data.max_pixels)" if load else ""
        raise ValueError(
            f"expected at most {name}={limit} tokens, got {length}; raise it, or set "
            f"filter_overlong to drop such rows{images}"
        )
    return length <= limit


def check_ids(
    tokens: Sequence[int] | np.ndarray, vocab_size: int | None, tokenizer: Any = None
) -> None:
    """Raise ValueError for a token id that a model does not have, whose embedding would be zeros.

    Args:
        tokens: ids.
        vocab_size: of the model; None: any id may be.
        tokenizer: that has made them; None: it is not known.

    >>> check_ids([3, 9], 8)
    Traceback (most recent call last):
    ValueError: token id 9 is not in the model's vocabulary of 8: resize its embedding, or use the \
model's own tokenizer
    """
    ids = np.asarray(tokens)
    if vocab_size is None or not (beyond := (ids < 0) | (ids >= vocab_size)).any():
        return
    token = int(ids[beyond][0])
    known = token >= 0 and hasattr(tokenizer, "convert_ids_to_tokens")
    text = f" ({tokenizer.convert_ids_to_tokens(token)!r})" if known else ""
    raise ValueError(
        f"token id {token}{text} is not in the model's vocabulary of {vocab_size}: resize its "
        "embedding, or use the model's own tokenizer"
    )


def count_dropped(rows: int, kept: int, name: str, limit: int) -> int:
    """Return how many rows were dropped, and log it; raise ValueError where none is left."""
    if not rows:
        raise ValueError("dataset: expected rows, got a file without any")
    if not kept:
        raise ValueError(f"dataset: none of {rows} rows is left under {name}={limit}")
    if kept < rows:
        log.warning("dropped %d of %d rows longer than %s=%d", rows - kept, rows, name, limit)
    return rows - kept


def batches(
    items: Sequence[Any],
    *,
    batch_size: int,
    seed: int,
    shuffle: bool = True,
    epochs: int | None = None,
    drop_remainder: bool = False,
) -> Any:
    """Iterate over lists of items, epoch after epoch, from a position that can be saved.

    Every item comes exactly once per epoch; each epoch has its own order, fixed by `seed`. A batch
    may span the border of two epochs. `get_state()` gives the position as a small JSON-able dict
    and `set_state()` returns to it exactly.

    Args:
        items: prompts, examples, or indices.
        batch_size: items per batch.
        seed: of the shuffle, in [0, 2³²).
        shuffle: False keeps the order of `items`.
        epochs: how often to go through the items; None never ends.
        drop_remainder: with finite epochs, leave out a last batch that is not full.

    Returns:
        A `grain.DatasetIterator`.

    Raises:
        ValueError: no items; a batch size or an epoch count below one; a seed out of range; every
            batch would be dropped.

    >>> list(batches("abcde", batch_size=2, seed=0, shuffle=False, epochs=2))
    [['a', 'b'], ['c', 'd'], ['e', 'a'], ['b', 'c'], ['d', 'e']]
    """
    if not items:
        raise ValueError("batches: expected one item or more, got none")
    if batch_size < 1 or (epochs is not None and epochs < 1):
        raise ValueError(
            f"batches: expected at least 1 each, got batch_size={batch_size}, epochs={epochs}"
        )
    if not 0 <= seed < 2**32:
        raise ValueError(f"batches: expected 0 <= seed < 2**32, got {seed}")
    if drop_remainder and epochs is not None and len(items) * epochs < batch_size:
        raise ValueError(
            f"batches: {len(items)} items for {epochs} epochs never fill a batch of {batch_size}"
        )
    import grain

    dataset = grain.MapDataset.source(items)
    if shuffle:
        dataset = dataset.shuffle(seed=seed)
    drop_remainder |= epochs is None  # there is none; grain would count the batches
    dataset = dataset.repeat(epochs).batch(batch_size, drop_remainder=drop_remainder, batch_fn=list)
    # The items are in memory: reading them needs no threads.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
