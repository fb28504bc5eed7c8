"""A reward model behind a server: its score of a reply, by the /classify of vLLM."""

import functools
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.workers.answers import shorten

SWITCHES = ("use_activation", "activation")
"""What vLLM calls the key that leaves a score as the model gives it; the newer name first."""

PROBES = ("0", "1")
TRIES = 3
RETRIED = (408, 429, *range(500, 600))
PAUSE_S = 0.5


class ServerError(Exception):
    """A server that gave no score.

    Args:
        message: what it did.
        may_pass: whether it may do better when it is asked again.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def classify(
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
        ServerError: the server gave no score, or one to which it may have applied a sigmoid.
        ValueError: the reply's prompt has no messages.
    """
    info = extra_info or {}
    chat = list(info.get("messages") or ())
    if not chat:
        prompt = info.get("prompt")
        if not prompt:
            raise ValueError("classify: extra_info has no messages as 'prompt'")
        chat = [*prompt, {"role": "assistant", "content": solution_str}]
    body = {"model": model} | _readable(chat, tokenizer)
    return _score(url, body | {_switch(url, model): False})


def _readable(chat: Sequence[dict[str, Any]], tokenizer: str | None) -> dict[str, Any]:
    """Return a request's part that holds the chat: messages, or token ids."""
    if tokenizer is None:
        return {"messages": list(chat)}
    *prompt, last = chat
    if last.get("role") != "assistant":
        raise ValueError(f"classify: the chat ends with a message of {last.get('role')!r}")
    return {"input": _token_ids(tokenizer, prompt, str(last.get("content") or ""))}


def _token_ids(path: str, prompt: Sequence[dict[str, Any]], text: str) -> list[int]:
    from jaxrl_llm.data.chat import encode_prompt  # transformers: only where it is asked for

    loaded = _tokenizer(path)
    answer = loaded(text, add_special_tokens=False)["input_ids"]
    return [*encode_prompt(loaded, prompt), *answer, loaded.eos_token_id]


@functools.cache
def _tokenizer(path: str) -> Any:
    from jaxrl_llm.data.chat import load_tokenizer

    return load_tokenizer(path)


@functools.cache
def _switch(url: str, model: str) -> str:
    """Return the key that turns a server's sigmoid off, once it is seen to do that.

    A server passes over a key that it does not know, and its scores then are those of a sigmoid,
    which look like any others. A score outside of 0 and 1 is none of a sigmoid's; another one is
    believed where the server's own sigmoid of it is another number, and the right one.

    Raises:
        ServerError: no key is seen to do that.
    """
    for key in SWITCHES:
        for text in PROBES:
            body = {"model": model, "input": text}
            plain, squashed = (_score(url, body | {key: is_on}) for is_on in (False, True))
            if not 0 <= plain <= 1:
                return key
            sigmoid = 1 / (1 + math.exp(-plain))
            if abs(squashed - plain) > 1e-3 and abs(squashed - sigmoid) < 1e-3:
                return key
    raise ServerError(
        f"{url}: scores of {model!r} are the same with {' and with '.join(SWITCHES)} on and off, "
        "and lie between 0 and 1: the server may apply a sigmoid; serve the model by a newer vLLM"
    )


def _score(url: str, body: dict[str, Any]) -> float:
    reply = _post(f"{url.rstrip('/')}/classify", body)
    try:
        (entry,) = reply["data"]
        (score,) = entry["probs"]
    except (LookupError, TypeError, ValueError) as error:
        raise ServerError(
            f"{url}: expected one item with one number as data[0].probs, which a model of one "
            f"label gives, got {shorten(json.dumps(reply), 200)}"
        ) from error
    return float(score)


def _post(url: str, body: dict[str, Any]) -> Any:
    """Return what a server answers; ask again where that may help."""
    tries = 0
    while True:
        try:
            return _post_once(url, body)
        except ServerError as error:
            tries += 1
            if not error.may_pass or tries == TRIES:
                raise
        time.sleep(PAUSE_S * 2 ** (tries - 1))


def _post_once(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            text = shorten(error.read().decode(errors="replace"), 200)
        said = f"{url}: status {error.code}: {text}"
        raise ServerError(said, may_pass=error.code in RETRIED) from error
    except (OSError, ValueError) as error:
        said = f"{url}: {type(error).__name__}: {error}"
        raise ServerError(said, may_pass=isinstance(error, OSError)) from error
