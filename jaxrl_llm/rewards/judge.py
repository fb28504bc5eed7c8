"""A language model that judges answers, asked by HTTP as OpenAI's chat completions are."""

import asyncio
import functools
import json
import os
import weakref
from collections.abc import AsyncGenerator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.rewards.judge_prompt import Case, JudgeSettings, Verdict, settings_of
from jaxrl_llm.rewards.reply_cache import ReplyCache, request_key
from jaxrl_llm.rewards.worker import Unscored
from jaxrl_llm.workers.answers import shorten

CACHE_FILE = "judge.sqlite"
"""In the run's folder: what a judge has replied."""

_NO_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info", "run_dir")


async def judge(  # noqa: PLR0913
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None,
    *,
    url: str,
    model: str,
    prompt: str | None = None,
    pattern: str | None = None,
    low: float = 0.0,
    high: float = 10.0,
    verdicts: dict[str, int | float] | None = None,
    max_tokens: int = 1024,
    api_key_env: str | None = None,
    both_orders: bool = False,
    reference: str = "ground_truth",
    reasoning_end: str | None = "</think>",
    request: dict[str, Any] | None = None,
    run_dir: str | None = None,
) -> dict[str, Any]:
    """Score a reply by the verdict of a language model; docs/judges.md says more.

    Args:
        data_source: not used.
        solution_str: the reply.
        ground_truth: the reference answer.
        extra_info: with the row's messages as `prompt`.
        url: of an API like OpenAI's, such as http://localhost:8000/v1.
        model: its name there.
        prompt: text with `{answer}` or, for both orders, `{first}` and `{second}`; or a file of it.
        pattern: regular expression; group 1 of its last match in a reply is the verdict.
        low: the number that is score 0.
        high: the number that is score 1.
        verdicts: scores of the words that are verdicts, if these are no numbers.
        max_tokens: of the judge's reply.
        api_key_env: environment variable that has the key; `reward.pass_env` must name it.
        both_orders: compare with a reference, in both orders; a contradiction is a tie.
        reference: `ground_truth`, or what the reference's text is called in `extra_info`.
        reasoning_end: what ends the policy's reasoning, which is hidden; null shows all.
        request: more fields of the request; null takes one out.
        run_dir: folder in which replies are kept, so that nothing is asked twice.

    Returns:
        The score, with the `verdict` and the whole `reply`.

    Raises:
        Unscored: the judge has given no verdict.
    """
    given = {name: value for name, value in locals().items() if name not in _NO_KEYWORDS}
    settings = settings_of(json.dumps(given))
    case, ask = Case(solution_str, ground_truth, extra_info or {}), _Asking(settings, run_dir)
    if settings.both_orders:
        answer_first = await ask(case.compared(settings, answer_first=True))
        return settings.settle(answer_first, await ask(case.compared(settings, answer_first=False)))
    verdict = await ask(case.rated(settings))
    return {"score": verdict.score, "verdict": verdict.text, "reply": verdict.reply}


def check_judge(keywords: Mapping[str, Any]) -> None:
    """Refuse keywords of a judge that make no sense, before it is asked.

    Raises:
        ConfigError: they don't, or the package for requests is not there.
    """
    words = keywords.get("verdicts") or ()
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"reward.function: judge: verdicts: expected words, got {[*words]}; YAML takes yes and "
            "no for true and false where they are not quoted"
        )
    settings_of(json.dumps({k: v for k, v in keywords.items() if k not in _NO_KEYWORDS}))
    if find_spec("httpx2") is None:
        raise ConfigError("reward.function: judge needs httpx2; pip install 'jaxrl_llm[judge]'")


class JudgeError(Exception):
    """The judge's server has refused a request; `response` says by which status.

    Args:
        response: of the server.
    """

    def __init__(self, response: Any) -> None:
        super().__init__(
            f"the judge replied with status {response.status_code}: "
            f"{shorten(repr(response.text), 200)}"
        )
        self.response = response


class _Asking:
    """Asks a judge, or looks up what it has replied before."""

    def __init__(self, settings: JudgeSettings, run_dir: str | None) -> None:
        self._settings = settings
        self._cache = None if run_dir is None else _cache(run_dir)

    async def __call__(self, content: str) -> Verdict:
        """Return the verdict on a message; only replies that have one are kept."""
        body = self._settings.body(content)
        if self._cache is None:
            return self._settings.read(await self._request(body))
        key = request_key(self._settings.url, body)
        lock = _LOCKS.setdefault(key, asyncio.Lock())
        async with lock:  # the same answer may be asked about twice at once
            reply = await asyncio.to_thread(self._cache.get, key)
            if reply is None:
                reply = await self._request(body)
                self._settings.read(reply)
                reply = await asyncio.to_thread(self._cache.keep, key, reply)
        return self._settings.read(reply)

    async def _request(self, body: dict[str, Any]) -> str:
        variable = self._settings.api_key_env
        headers = {}
        if variable is not None:
            if variable not in os.environ:
                raise LookupError(f"judge: api_key_env: there is no {variable} in the environment")
            headers["Authorization"] = f"Bearer {os.environ[variable]}"
        client = await _client()
        address = f"{self._settings.url.rstrip('/')}/chat/completions"
        response = await client.post(address, json=body, headers=headers)
        if response.status_code != 200:
            raise JudgeError(response)
        try:
            choice = response.json()["choices"][0]
            text, finish = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError):
            shown = shorten(repr(response.text), 120)
            raise Unscored(f"the judge's server sent no completion but {shown}") from None
        if not isinstance(text, str) or finish not in ("stop", None):
            limit = f" (max_tokens={body.get('max_tokens')})" if finish == "length" else ""
            raise Unscored(f"the judge's reply is not whole: it ended by {finish!r}{limit}")
        return text


_LOCKS: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
_CLIENTS: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=4)
def _cache(run_dir: str) -> ReplyCache:
    return ReplyCache(Path(run_dir) / CACHE_FILE)


async def _client() -> Any:
    """Return the client of this event loop, which closes it at its end, as all its generators."""
    loop = asyncio.get_running_loop()
    if loop not in _CLIENTS:
        generator = _open_client()
        _CLIENTS[loop] = await anext(generator), generator
    return _CLIENTS[loop][0]


async def _open_client() -> AsyncGenerator[Any, None]:
    import httpx2

    limits = httpx2.Limits(max_connections=None)  # the pool limits the calls, and their time
    async with httpx2.AsyncClient(timeout=None, limits=limits) as client:
        yield client
    _CLIENTS.pop(asyncio.get_running_loop(), None)
