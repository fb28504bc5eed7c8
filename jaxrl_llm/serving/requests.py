"""From the JSON of OpenAI's two APIs to what an engine is asked."""

import functools
import inspect
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.chat_template import REFUSALS
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.models.vision.inputs import Visual
from jaxrl_llm.rollout.types import Request, SamplingParams
from jaxrl_llm.serving.fields import APIError, Fields, is_a, shown
from jaxrl_llm.serving.length import TextLimit
from jaxrl_llm.serving.messages import image_reader, parse_messages, parse_tools, read_images

MOST_LOGPROBS = 20
MOST_STOPS = 16
DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI; a chat's answer may fill what is left


class ServedModel(NamedTuple):
    """The model that is served.

    Attributes:
        name: by which clients ask for it.
        tokenizer: of `transformers`.
        stop_ids: tokens that end an answer.
        vocab_size: token ids are below it.
        max_tokens: the longest sequence, prompt and answer.
        max_answers: the most that one request may ask for.
        text_limit: of prompts, if there is one.
        call_format: in which the model writes calls of tools, by name; None: unknown.
        processor: of images; None: the model reads text alone.
    """

    name: str
    tokenizer: Any
    stop_ids: tuple[int, ...]
    vocab_size: int
    max_tokens: int
    max_answers: int
    text_limit: TextLimit | None
    call_format: str | None = None
    processor: VisualProcessor | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """What one request asks for.

    Attributes:
        chat: whether the answer has the form of a chat's.
        prompts: token ids.
        sampling: of every answer.
        n: answers for each prompt.
        seed: of all answers together.
        logprobs: whether log-probs are reported.
        token_ids: whether token ids are.
        prompt_logprobs: how many of the likeliest tokens are told for each token of the prompts,
            beside its own log-prob; None tells none.
        stream: whether pieces are sent as they come.
        include_usage: whether a stream ends with a count of tokens.
        template: by which a chat's answers are taken apart; None: they are text and nothing else.
        visuals: images of a chat's prompt, in the order of their placeholder tokens.
    """

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    n: int
    seed: int
    logprobs: bool
    token_ids: bool
    prompt_logprobs: int | None
    stream: bool
    include_usage: bool
    template: TurnTemplate | None = None
    visuals: tuple[Visual, ...] = ()

    def requests(self) -> list[Request]:
        """Return the engine's requests, the answers to one prompt side by side."""
        count = self.n * len(self.prompts)
        seeds = choice_seeds(self.seed, count)
        return [
            Request(self.prompts[i // self.n], self.sampling, seeds[i], visuals=self.visuals)
            for i in range(count)
        ]

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts, each counted once."""
        return sum(map(len, self.prompts))


def choice_seeds(seed: int, count: int) -> list[int]:
    """Return the seed of each choice; that of a choice depends on its index and `seed` alone.

    >>> choice_seeds(7, 3)[:2] == choice_seeds(7, 2)
    True
    """
    return np.random.SeedSequence(seed % 2**64).generate_state(count).tolist()


def parse_completion(tree: Mapping[str, Any], served: ServedModel) -> GenerationRequest:
    """Translate a request of `/v1/completions`.

    Raises:
        APIError: a field is wrong, unknown or not supported, or the request does not fit the model.
    """
    fields = Fields(tree)
    check_model_name(fields, served)
    prompts = parse_prompts(fields, served)
    tops = fields.between("logprobs", int, None, 0, MOST_LOGPROBS)
    max_tokens = fields.between("max_tokens", int, DEFAULT_MAX_TOKENS, 1, math.inf)
    told = fields.between("prompt_logprobs", int, None, 0, MOST_LOGPROBS)
    common = fields, served, prompts, max_tokens
    return parse_common(*common, chat=False, tops=tops, prompt_tops=told)


def parse_chat(tree: Mapping[str, Any], served: ServedModel) -> GenerationRequest:
    """Translate a request of `/v1/chat/completions`.

    Raises:
        APIError: as `parse_completion`, or the chat template refuses the messages.
    """
    fields = Fields(tree)
    check_model_name(fields, served)
    messages = parse_messages(fields.take("messages", list, []))
    if not messages:
        raise fields.refuse("messages", [], "a list with a message or more")
    kwargs = parse_template_kwargs(fields)
    tools = parse_tools(fields.take("tools", list, []))
    choice = fields.any_of("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise fields.refuse("tool_choice", choice, "auto or none")
    template = open_template(served, tools if choice == "auto" else [], kwargs)
    prompt, visuals = tokenize_messages(messages, template, served)
    tops = fields.between("top_logprobs", int, None, 0, MOST_LOGPROBS)
    if not fields.take("logprobs", bool, False):
        if tops is not None:
            raise fields.refuse("top_logprobs", tops, "none, because logprobs is not true")
    elif tops is None:
        tops = 0
    older = fields.between("max_tokens", int, None, 1, math.inf)
    max_tokens = fields.between("max_completion_tokens", int, older, 1, math.inf)
    if older not in (None, max_tokens):
        raise fields.refuse("max_tokens", older, f"max_completion_tokens={max_tokens}, or none")
    left = max(1, served.max_tokens - len(prompt))
    reads = template.call_format or "</think>" in served.tokenizer.get_chat_template()
    common = fields, served, (prompt,), max_tokens or left
    request = parse_common(*common, chat=True, tops=tops, template=template if reads else None)
    return replace(request, visuals=visuals)


def parse_common(
    fields: Fields,
    served: ServedModel,
    prompts: tuple[tuple[int, ...], ...],
    max_new_tokens: int,
    *,
    chat: bool,
    tops: int | None,
    prompt_tops: int | None = None,
    template: TurnTemplate | None = None,
) -> GenerationRequest:
    """Read the fields that both APIs have, refuse all others, and check that it fits."""
    n = fields.between("n", int, 1, 1, math.inf)
    if n * len(prompts) > served.max_answers:
        count = n * len(prompts)
        raise APIError(f"got {count} answers to give, expected at most {served.max_answers}: see n")
    for prompt in prompts:
        check_fit(len(prompt), max_new_tokens, served.max_tokens)
    stream = fields.take("stream", bool, False)
    if stream and prompt_tops is not None:
        raise fields.refuse("prompt_logprobs", prompt_tops, "none, because stream is true")
    options = fields.take("stream_options", dict)
    if options is not None and not stream:
        raise fields.refuse("stream_options", options, "none, because stream is not true")
    streaming = Fields(options or {}, "stream_options.")
    streaming.take("include_obfuscation", bool)
    include_usage = streaming.take("include_usage", bool, False)
    streaming.end()
    request = GenerationRequest(
        chat=chat,
        prompts=prompts,
        sampling=parse_sampling(fields, served, max_new_tokens, tops or 0),
        n=n,
        seed=fields.take("seed", int, secrets.randbits(64)),
        logprobs=tops is not None,
        token_ids=fields.take("return_token_ids", bool, False),
        prompt_logprobs=prompt_tops,
        stream=stream,
        include_usage=include_usage,
        template=template,
    )
    fields.end()
    return request


def parse_sampling(
    fields: Fields, served: ServedModel, max_new_tokens: int, tops: int
) -> SamplingParams:
    """Read how to sample."""
    top_p = fields.between("top_p", float, 1.0, 0, 1)
    penalty = fields.between("repetition_penalty", float, 1.0, 0, math.inf)
    for name, value in (("top_p", top_p), ("repetition_penalty", penalty)):
        if value == 0:
            raise fields.refuse(name, value, "a number above 0")
    more = fields.take("stop_token_ids", list, [])
    check_tokens("stop_token_ids", more, served)
    known = () if fields.take("ignore_eos", bool, False) else served.stop_ids
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=fields.between("temperature", float, 1.0, 0, math.inf),
        top_p=top_p,
        top_k=max(0, fields.between("top_k", int, 0, -1, math.inf)),
        min_p=fields.between("min_p", float, 0.0, 0, 1),
        repetition_penalty=penalty,
        logit_bias=parse_logit_bias(fields, served),
        stop_ids=tuple(sorted({*known, *more})),
        stop=parse_stops(fields),
        top_logprobs=tops,
    )


def check_model_name(fields: Fields, served: ServedModel) -> None:
    """Refuse another model's name; none is good, too."""
    name = fields.take("model", str, served.name)
    if name != served.name:
        raise APIError(
            f"model: got {shown(name)}, expected {served.name!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def parse_prompts(fields: Fields, served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Read a text, a list of texts, token ids, or a list of lists of token ids."""
    given = fields.any_of("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and is_a(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise fields.refuse("prompt", given, "a text, token ids, or a list of one of these")
    if len(given) > served.max_answers:
        raise APIError(
            f"got {len(given)} prompts, expected at most {served.max_answers}", param="prompt"
        )
    return tuple(parse_prompt(one, served) for one in given)


def parse_prompt(given: Any, served: ServedModel) -> tuple[int, ...]:
    """Read a text or token ids."""
    if isinstance(given, str):
        if served.text_limit is not None:
            served.text_limit.check(given, "prompt")
        try:
            given = served.tokenizer(given, add_special_tokens=True)["input_ids"]
        except (ValueError, TypeError) as error:
            raise APIError(f"prompt: {shown(given)} is no text: {error}", param="prompt") from error
    elif isinstance(given, list):
        check_fit(len(given), 0, served.max_tokens)  # before each of them is looked at
        check_tokens("prompt", given, served)
    else:
        raise APIError(f"prompt: got {shown(given)}, expected a text or token ids", param="prompt")
    return tuple(given)


def open_template(
    served: ServedModel,
    tools: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> TurnTemplate:
    """Return the template of a chat with tools.

    Raises:
        APIError: there is none, it has no such variable, or nothing says how the model writes
            calls.
    """
    given = json.dumps([tools, template_kwargs])
    try:
        return _template(served.tokenizer, served.stop_ids, given, served.call_format)
    except ValueError as error:
        param = "tools" if tools else "messages"
        raise APIError(f"{param}: {error}", param=param) from error


@functools.lru_cache(maxsize=64)
def _template(
    tokenizer: Any, stops: tuple[int, ...], given: str, call_format: str | None
) -> TurnTemplate:
    tools, kwargs = json.loads(given)
    form = call_format if tools else None
    return TurnTemplate(tokenizer, stops, tools=tools, call_format=form, template_kwargs=kwargs)


def tokenize_messages(
    messages: Sequence[Mapping[str, Any]], template: TurnTemplate, served: ServedModel
) -> tuple[tuple[int, ...], tuple[Visual, ...]]:
    """Tokenise a chat, unless the text that the template makes of it is too long.

    Returns:
        The token ids, and the images whose placeholders they hold.
    """
    reader = image_reader(served.processor, served.max_tokens)
    messages, visuals = read_images(messages, reader)
    try:
        text = template.opening_text(messages)
        if served.text_limit is not None:
            served.text_limit.check(text, "messages")
        tokens = template.template.ids(text)
        if served.processor is not None:
            placeholders = served.processor.placeholders
            tokens = placeholders.expand(tokens, visuals, served.tokenizer)
        return tuple(tokens), visuals
    except REFUSALS as error:
        raise APIError(f"messages: {error}", param="messages") from error


def check_tokens(name: str, tokens: Sequence[Any], served: ServedModel) -> None:
    """Refuse what is no token id of the model."""
    for token in tokens:
        if not is_a(token, int) or not 0 <= token < served.vocab_size:
            raise APIError(
                f"{name}: got {shown(token)}, expected token ids from 0 to {served.vocab_size - 1}",
                param=name,
            )


def check_fit(prompt: int, max_new_tokens: int, most: int) -> None:
    """Refuse a prompt without tokens, and a sequence that is too long.

    >>> check_fit(10, 6, 16)
    """
    if prompt == 0:
        raise APIError("a prompt has no token, expected one or more", param="prompt")
    if prompt + max_new_tokens > most:
        raise APIError(
            f"a prompt of {prompt} tokens and an answer of {max_new_tokens} make "
            f"{prompt + max_new_tokens}, expected at most {most}",
            code="context_length_exceeded",
        )


def parse_stops(fields: Fields) -> tuple[str, ...]:
    """Read a stop text or a list of them."""
    given = fields.any_of("stop")
    stops = [given] if isinstance(given, str) else [] if given is None else given
    fits = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not fits or len(stops) > MOST_STOPS:
        raise fields.refuse("stop", given, f"a text, or a list of at most {MOST_STOPS}")
    return tuple(dict.fromkeys(stops))


def parse_template_kwargs(fields: Fields) -> dict[str, Any]:
    """Read variables of the chat template, none of which is another field's or the server's."""
    given = fields.take("chat_template_kwargs", dict, {})
    for name in not_variables().intersection(given):
        raise fields.refuse(
            f"chat_template_kwargs.{name}",
            given[name],
            "variables that only the chat template knows: what is said and the tools have fields "
            "of their own, and the server sets the rest",
        )
    return given


@functools.cache
def not_variables() -> frozenset[str]:
    """Return the names of what renders a chat, which no variable of a template can have."""
    from transformers import PreTrainedTokenizerBase

    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({"messages", *names} - {"documents", "kwargs"})


def parse_logit_bias(fields: Fields, served: ServedModel) -> tuple[tuple[int, float], ...]:
    """Read an object from token ids to what is added to their logits."""
    biases = {}
    for name, value in fields.take("logit_bias", dict, {}).items():
        if not name.isdecimal() or len(name) > 9 or not is_a(value, float) or abs(value) > 100:
            raise fields.refuse("logit_bias", {name: value}, "token ids and numbers of -100 to 100")
        check_tokens("logit_bias", [int(name)], served)
        biases[int(name)] = float(value)
    return tuple(sorted(biases.items()))
