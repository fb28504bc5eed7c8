"""What tests of episodes share: the agents' tokenizer, and an engine that follows a script."""

import asyncio
import random
from pathlib import Path

import numpy as np

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.data.chat import encode_prompt, load_tokenizer, stop_ids
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rollout.agents.sampler import EpisodeSampler
from jaxrl_llm.rollout.engine import Completion, Engine, SamplingParams

MODEL = Path(__file__).parents[1] / "configs" / "agents" / "model"
TOKENIZER = load_tokenizer(MODEL)
STOPS = stop_ids(TOKENIZER, MODEL)
PROMPT_TOKENS = 40


def ids(text):
    """Return the token ids of a text, special tokens included."""
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Scripted(Engine):
    """An engine that answers with what a function makes of the stream so far and the seed.

    Args:
        respond: (text of the stream, seed) -> the turn's text, which a stop token follows.
    """

    def __init__(self, respond):
        self.respond, self.version = respond, 0
        self.batches = []

    def sample(self, requests):
        self.batches.append(list(requests))
        return [self.answer(request) for request in requests]

    async def generate(self, request):
        await asyncio.sleep(0)
        return self.answer(request)

    def answer(self, request):
        text = self.respond(TOKENIZER.decode(request.prompt), request.seed)
        tokens = [*ids(text), STOPS[0]]
        cut = tokens[: request.sampling.max_new_tokens]
        stopped = len(cut) == len(tokens)
        rng = np.random.default_rng((request.seed, len(request.prompt)))
        logprobs = -rng.random(len(cut)).astype(np.float32)
        versions = np.full(len(cut), self.version, np.int32)
        finish, stopped_by = ("stop", STOPS[0]) if stopped else ("length", None)
        return Completion(np.array(cut, np.int32), logprobs, versions, finish, stopped_by)


def prompt(text, index=0, **extra_info):
    """Return a row's prompt, with this text as the user's message."""
    messages = [{"role": "user", "content": text}]
    return Prompt(
        index, tuple(encode_prompt(TOKENIZER, messages)), "test", "7", extra_info, messages
    )


def config(*, agent=None, tools=(), environment=None, workers=0, **keys):
    """Return the config of episodes; functions are given as such, or by name."""

    def spec(function):
        return FunctionSpec.of(function) if callable(function) else function

    process = {"workers": workers, "timeout_s": 5.0} | keys.pop("tool_process", {})
    return AgentConfig(
        agent=agent and spec(agent),
        tools=tuple(spec(tool) for tool in tools),
        environment=environment and spec(environment),
        tool_process=process,
        **keys,
    )


def sampler(configured, example=None):
    """Return what samples episodes of a config; the caller closes it."""
    return EpisodeSampler(
        configured,
        TOKENIZER,
        STOPS,
        template_kwargs={},
        prompt_tokens=PROMPT_TOKENS,
        example=example,
    )


def play(engine, prompts, *, samples=1, seed=(0, 1), tokens=60, journal=None, **keys):
    """Sample episodes of a config once."""
    episodes = sampler(config(**keys))
    try:
        sampling = SamplingParams(max_new_tokens=tokens, stop_ids=STOPS)
        return episodes.sample(
            engine, prompts, sampling, samples=samples, seed=seed, journal=journal
        )
    finally:
        episodes.close()


def picture(episode):
    """Return an episode's pieces as texts, those that were told in brackets."""
    texts = [(TOKENIZER.decode(piece.tokens), piece.drawn) for piece in episode.pieces]
    return [text if drawn else f"<{text}>" for text, drawn in texts]


def same(one, other):
    """Tell whether two samples have the same streams bit for bit."""
    return all(
        a.prompt == b.prompt
        and a.finish == b.finish
        and a.rewards == b.rewards
        and all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for name in ("tokens", "logprobs", "versions", "turn_ids")
        )
        for a, b in zip(one.episodes, other.episodes, strict=True)
    )


def shuffled(seconds=0.02):
    """Return a random pause, other each time."""
    return random.SystemRandom().random() * seconds
