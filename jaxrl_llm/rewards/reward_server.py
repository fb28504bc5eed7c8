"""A reward model behind a server: its score of a reply, by the /classify of vLLM."""

import asyncio
import functools
import math
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rollout.servers import ServerError, lock_of, post
from jaxrl_llm.workers.protocol import finite_number, short_repr

SWITCHES = ("use_activation", "activation")
"""What vLLM calls the key that leaves a score as the model gives it; the newer name first."""

PROBES = ("0", "1")


async def classify(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None,
    *,
    url: str,
    model: str,
    tokenizer: str | None = None,
) -> float:
    """Score a reply by a reward model with one label that a server of vLLM holds.

    The server renders the chat with the model's own template and scores the last token. With
    `tokenizer` it gets token ids instead: the templated prompt, the reply and the end token, as
    `jaxrl_llm.prefer` trains a reward model.

    Args:
        data_source: not used.
        solution_str: the reply.
        ground_truth: not used.
        extra_info: with the row's messages as `prompt`; of an agent's episode with `messages`.
        url: of the server, such as http://localhost:8000.
        model: its name there.
        tokenizer: Hugging Face directory of the reward model's tokenizer; null sends messages.

    Returns:
        The score as the model gives it, without a sigmoid.

    Raises:
        ServerError: the server gave no score.
        ValueError: it may have applied a sigmoid; or the reply's prompt has no messages.
    """
    info = extra_info or {}
    chat = list(info.get("messages") or ())
    if not chat:
        prompt = info.get("prompt")
        if not prompt:
            raise ValueError("classify: extra_info has no messages as 'prompt'")
        chat = [*prompt, {"role": "assistant", "content": solution_str}]
    body = {"model": model} | await _readable(chat, tokenizer)
    return await _score(url, body | {await _switch(url, model): False})


async def _readable(chat: Sequence[dict[str, Any]], tokenizer: str | None) -> dict[str, Any]:
    """Return a request's part that holds the chat: messages, or token ids."""
    if tokenizer is None:
        return {"messages": list(chat)}
    if chat[-1].get("role") != "assistant":
        raise ValueError(f"classify: the chat ends with a message of {chat[-1].get('role')!r}")
    async with lock_of("tokenizer", tokenizer):  # to load one takes seconds, which others go on in
        return {"input": await asyncio.to_thread(_token_ids, tokenizer, chat)}


def _token_ids(path: str, chat: Sequence[dict[str, Any]]) -> list[int]:
    prompt, answer = _template(path).answer(chat)
    return prompt + answer


@functools.cache
def _template(path: str) -> Any:
    from jaxrl_llm.data.chat import (
        ChatTemplate,
        load_tokenizer,  # transformers: only where it is asked for
    )

    return ChatTemplate(load_tokenizer(path))


_SWITCHES_SEEN: dict[tuple[str, str], str] = {}


async def _switch(url: str, model: str) -> str:
    """Return the key that turns a server's sigmoid off, once it is seen to do that."""
    async with lock_of("switch", url, model):  # the others wait for what the first one sees
        if (url, model) not in _SWITCHES_SEEN:
            _SWITCHES_SEEN[url, model] = await _find_switch(url, model)
        return _SWITCHES_SEEN[url, model]


async def _find_switch(url: str, model: str) -> str:
    """Compare a server's scores with a key on and off.

    A server passes over a key that it does not know, and its scores then are those of a sigmoid,
    which look like any others. A score outside of 0 and 1 is none of a sigmoid's; another one is
    believed where the server's own sigmoid of it is another number, and the right one.

    Raises:
        ValueError: no key is seen to turn the sigmoid off.
    """
    for key in SWITCHES:
        for text in PROBES:
            body = {"model": model, "input": text}
            plain, squashed = [await _score(url, body | {key: is_on}) for is_on in (False, True)]
            if not 0 <= plain <= 1:
                return key
            sigmoid = 1 / (1 + math.exp(-plain))
            if abs(squashed - plain) > 1e-3 and abs(squashed - sigmoid) < 1e-3:
                return key
    raise ValueError(
        f"classify: scores of {model!r} are the same with {' and with '.join(SWITCHES)} on and "
        "off, and lie between 0 and 1: the server may apply a sigmoid; serve the model by a newer "
        "vLLM"
    )


async def _score(url: str, body: dict[str, Any]) -> float:
    response = await post(url, "/classify", body)
    try:
        (entry,) = response.json()["data"]
        (score,) = entry["probs"]
        if (number := finite_number(score)) is None:
            raise ValueError(f"got {short_repr(score)}")
        return number
    except (LookupError, TypeError, ValueError) as error:
        raise ServerError(
            response,
            "one item with one number as data[0].probs, which a model of one label gives",
        ) from error
