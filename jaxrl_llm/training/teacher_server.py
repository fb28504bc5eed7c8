"""A teacher behind a URL, and the tokens of a teacher with another tokenizer."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec

from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.types import ScoredTokens
from jaxrl_llm.sharding import distributed
from jaxrl_llm.training.sequence_teacher import SequenceTeacher
from jaxrl_llm.training.stages.rollout import PolicyTokens
from jaxrl_llm.training.teacher_tokens import Retokenizer

API_KEY_OF_TEACHER = "JAXRL_LLM_TEACHER_API_KEY"


@activity("opening a teacher")
def open_server_teacher(
    config: TrainConfig,
    url: str,
    own: str | None,
    model: str | None,
    tokens: PolicyTokens,
    stack: ExitStack,
) -> SequenceTeacher:
    """Connect to a server, and compare its tokens with those that it will be sent.

    The first process of a run asks it for all.

    Args:
        config: of the run.
        url: of its API.
        own: directory of the teacher's tokenizer; None: it has the policy's.
        model: its name there; None: the only one.
        tokens: of the policy.
        stack: closes the connection at the run's end.

    Raises:
        ConfigError: the server takes no sequence as long as the run's, or a package is missing.
        ScoringError: the server can't be reached, or its tokens are others.
    """
    if find_spec("httpx2") is None:
        raise ConfigError("teacher.url needs httpx2; pip install 'jaxrl_llm[client]'")
    from jaxrl_llm.serving.client import RequestLimits, ScoringClient

    asked, top = config.teacher, config.teacher.top_k or 0
    retokenize = None if own is None else open_retokenizer(config, own, tokens)
    limits = RequestLimits(asked.concurrency, asked.timeout_s, asked.retries)
    key = asked.api_key or os.environ.get(API_KEY_OF_TEACHER) or None
    client = ScoringClient(url, model, api_key=key, limits=limits)
    stack.callback(client.close)
    room = distributed.run_on_first(client.open)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if own is not None:
        longest = longest_for_teacher(config, None if room is None else room - 1)
    elif room is not None and room < longest + 1:
        raise ConfigError(
            f"teacher.url: {url} takes {room} tokens, expected data.max_prompt_tokens + "
            f"rollout.max_new_tokens + 1 = {longest + 1} or more"
        )
    tokenizer = tokens.tokenizer if retokenize is None else retokenize.teacher

    def check() -> None:
        client.check_tokens(lambda text: tokenizer(text)["input_ids"], longest=room, top=top)

    def submit(sequences: Sequence[Sequence[int]]) -> Callable[[], list[ScoredTokens]]:
        if not distributed.is_first():
            return lambda: distributed.run_on_first(list)
        future = client.submit(sequences, top)
        return lambda: distributed.run_on_first(future.result)

    distributed.run_on_first(check)
    return SequenceTeacher(name=url, submit=submit, retokenize=retokenize, longest=longest, top=top)


def open_retokenizer(config: TrainConfig, own: str, tokens: PolicyTokens) -> Retokenizer:
    """Load a teacher's tokenizer, and build what writes the policy's answers in its tokens."""
    with config_errors_at("teacher.tokenizer"):
        tokenizer = load_tokenizer(own)
        theirs = PolicyTokens(tokenizer, stop_ids(tokenizer, own))
        return Retokenizer(tokens, theirs, config.teacher.chat_template_kwargs)


def longest_for_teacher(config: TrainConfig, room: int | None) -> int:
    """Return the longest sequence of a teacher with a tokenizer of its own, in its tokens.

    Args:
        config: of the run.
        room: the longest sequence that it can be given; None where it does not say.

    Raises:
        ConfigError: more is asked for.
    """
    asked = config.teacher.max_tokens
    if asked is not None and room is not None and asked > room:
        raise ConfigError(
            f"teacher.max_tokens={asked}, but the longest sequence that it can be given has {room} "
            "tokens: by its positions, its server or batch.max_tokens_per_device"
        )
    wanted = asked or 2 * (config.data.max_prompt_tokens + config.rollout.max_new_tokens)
    return wanted if room is None else min(wanted, room)
