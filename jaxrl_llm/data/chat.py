"""Tokenizers and chat templates: from messages to token ids.

Tokenizers come from a local directory (a Hugging Face snapshot or one of our exports), or from the
snapshot of a hub repository that the model itself comes from.
"""

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxrl_llm.data.call_formats import (
    ToolCall,
    count_common,
    dump_json,
    is_harmony,
    joined_contents,
    with_thinking,
)
from jaxrl_llm.models.hf.hub import resolve


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


log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Tools = Iterable[Mapping[str, Any]]
USER: Message = {"role": "user", "content": "Hello."}
PROBE = ToolCall("get_weather", {"place": "Zürich", "days": 3}, "call00000")
"""A call that templates are tried with."""

REFUSALS = (TypeError, ValueError, LookupError, AttributeError)
"""What templates raise, besides their own errors, for messages that they were not written for."""

OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")
"""Variables of templates that are set here."""

OPEN_THOUGHT = re.compile(r"<think>\s*$")
REASONING = ("reasoning_content", "thinking")
UNSHOWN = {"tool": ("name", "tool_call_id"), "user": ("as_tokens",)}
"""Keys of a role that a template need not show; the last marks what an agent gave as tokens."""

MOST_FORMS = 4096


def write_calls(
    calls: Sequence[ToolCall], text: str = "", *, as_text: bool = False
) -> dict[str, Any]:
    """Return the message of an assistant that calls tools.

    Args:
        calls: at least one.
        text: that comes with them.
        as_text: whether arguments are a text of JSON instead of an object.
    """
    written = []
    for call in calls:
        arguments = dump_json(call.arguments) if as_text else call.arguments
        function = {"name": call.name, "arguments": arguments}
        written.append({"id": call.id, "type": "function", "function": function})
    return {"role": "assistant", "content": text, "tool_calls": written}


class Close(NamedTuple):
    """How a chat template ends the turn of an assistant.

    Attributes:
        text: of the token that a model samples there.
        after: what the template writes behind it at the end of a chat, which no model samples.
        inside: whether the template writes the token at the end of a chat. Else it is the one that
            begins the next message.
    """

    text: str
    after: str
    inside: bool


class ChatTemplate:
    """A tokenizer's chat template, which turns messages into text and token ids.

    Messages have `role`, `content` (a text or typed parts) and what OpenAI's chats have besides:
    `tool_calls`, whose arguments are objects or a text of JSON, `tool_call_id`, `name` and
    `reasoning_content`. They become what the template asks for: `developer` is `system` where it
    knows no developer, and calls, texts and typed parts have the form that it reads.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.
        template_kwargs: variables of the template, such as Qwen3's `enable_thinking`.

    Raises:
        ValueError: there is no template, or it has no such variable.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.source = _chat_template(tokenizer)
        self._kwargs = dict(template_kwargs or {})
        for name in self._kwargs:
            if name in OWN_VARIABLES or not re.search(rf"\b{re.escape(name)}\b", self.source):
                raise ValueError(f"chat template: it has no variable {name!r}; remove the keyword")
        self._closes = dict[bool, Close]()
        self._lost = dict[Any, list[tuple[str, str]]]()

    # from messages to text and ids

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of a chat up to where the assistant's answer begins.

        Args:
            messages: the chat.
            tools: schemas of tools that the model may call.

        Raises:
            ValueError: the template refuses the chat, or leaves a part of it out.
        """
        return self.ids(self.prompt_text(messages, tools))

    def prompt_text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Return the text of `prompt`.

        Args:
            messages: as there.
            tools: as there.

        Raises:
            ValueError: as there.
        """
        text = self.render(messages, generation=True, tools=tools)
        self._check_kept(messages, tools, "prompt")
        return text

    def chat(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of a chat, with what the template writes after its end.

        Args:
            messages: the chat.
            tools: as for `prompt`.

        Raises:
            ValueError: as there.
        """
        text = self.render(messages, generation=False, tools=tools)
        self._check_kept(messages, tools, "chat")
        return self.ids(text)

    def answer(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[list[int], list[int]]:
        """Return the ids of a chat's prompt, and those of its last message as an answer to it.

        An answer is the text between the rendered prompt and the rendered chat, up to the token
        that ends the assistant's turn.

        Args:
            messages: the chat; the last one is the assistant's.
            tools: as for `prompt`.

        Raises:
            ValueError: as `prompt`; the last message is another's; the template writes it otherwise
                than its own prompt begins.
        """
        _check_ends_in_answer(messages)
        prompt, answers = self.answers(messages[:-1], messages[-1:], tools)
        return prompt, answers[0]

    def answers(
        self, messages: Sequence[Message], answers: Sequence[Message], tools: Tools = ()
    ) -> tuple[list[int], list[list[int]]]:
        """Return the ids of a prompt, and those of several answers to it; see `answer`.

        Args:
            messages: the prompt.
            answers: messages of the assistant.
            tools: as for `prompt`.

        Raises:
            ValueError: as for `answer`.
        """
        prompt = self.render(messages, generation=True, tools=tools)
        asked = self.special.encode(prompt, {}, after="")
        texts = [self._kept_answer([*messages, answer], tools, prompt) for answer in answers]
        return asked, [self._answer_ids(asked, prompt, text, after="") for text in texts]

    def answer_text(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[str, str]:
        """Return the texts of `answer`.

        Args:
            messages: as there.
            tools: as there.

        Raises:
            ValueError: as there.
        """
        _check_ends_in_answer(messages)
        prompt = self.render(messages[:-1], generation=True, tools=tools)
        return prompt, self._kept_answer(messages, tools, prompt)

    def _kept_answer(self, messages: Sequence[Message], tools: Tools, prompt: str) -> str:
        answer = self._answer(messages, tools, prompt)
        self._check_kept(messages, tools, "answer")
        last = messages[-1]
        for key in ("content", "reasoning_content"):
            if isinstance(last.get(key), str) and not _stands_in(last[key], answer):
                raise _lost_error(f"messages[{len(messages) - 1}].{key}", "assistant")
        return answer

    def conversation(
        self, messages: Sequence[Message], tools: Tools = (), *, last_only: bool = False
    ) -> list[tuple[list[int], list[bool]]]:
        """Return a chat as sequences to train on: ids, and a mask that is true on the answers.

        Each answer follows the prompt that the template writes for it. As long as the prompt
        of the next one begins with what has been written, it goes on in the same sequence. Where
        the template rewrites earlier turns, as by dropping the reasoning of earlier answers,
        another sequence begins.

        Args:
            messages: the chat; the last one is the assistant's.
            tools: as for `prompt`.
            last_only: whether the last answer alone is trained.

        Raises:
            ValueError: as `answer`.
        """
        _check_ends_in_answer(messages)
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        sequences = list[tuple[list[int], list[bool]]]()
        text = close = ""
        for place in places[-1:] if last_only else places:
            prompt, answer = self.answer_text(messages[: place + 1], tools)
            if not sequences or not prompt.startswith(text):
                sequences.append(([], []))
                text = close = ""
            new = prompt[len(text) :]
            asked = self.special.encode(new, {}, after=close)
            for ids, sampled in (
                (asked, False),
                (self._answer_ids(asked, new, answer, after=close), True),
            ):
                sequences[-1][0].extend(ids)
                sequences[-1][1].extend([sampled] * len(ids))
            text, close = prompt + answer, self.close(messages[place]).text
        return sequences

    def render(self, messages: Sequence[Message], *, generation: bool, tools: Tools = ()) -> str:
        """Return the text of a chat, as the template writes it.

        Args:
            messages: the chat.
            generation: whether the opening of the assistant's next answer follows.
            tools: as for `prompt`.

        Raises:
            ValueError: the template refuses the chat, or knows no tools.
        """
        if tools and not self.knows_tools:
            raise ValueError("chat template: it shows no tools, expected none beside the messages")
        return self._apply(self.prepared(messages), generation=generation, tools=tools)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens stand as themselves."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _apply(self, messages: Sequence[Message], *, generation: bool, tools: Tools = ()) -> str:
        from jinja2 import TemplateError

        variables = self._kwargs | ({"tools": list(tools)} if tools else {})
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation, **variables
            )
        except (TemplateError, *REFUSALS) as error:
            roles = [message.get("role") for message in messages]
            raise ValueError(
                f"chat template: it refuses a chat with roles {roles}: {error}"
            ) from error

    # what an answer is

    @functools.cached_property
    def special(self) -> SpecialTexts:
        """What texts of special tokens there are."""
        return SpecialTexts(self.tokenizer)

    @property
    def closing_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, and one that calls tools.

        Raises:
            ValueError: no token does.
        """
        ends = {self._close(False).text}
        if self.style is not None:
            with contextlib.suppress(ValueError):  # a template that lets none end
                ends.add(self._close(True).text)
        return tuple(sorted(self.special.tokens[text] for text in ends))

    def close(self, message: Message) -> Close:
        """Return how the turn of a message ends.

        Raises:
            ValueError: no token ends it.
        """
        return self._close(bool(message.get("tool_calls") and self.style))

    def _close(self, calls: bool) -> Close:
        if calls not in self._closes:
            self._closes[calls] = self._find_close(calls)
        return self._closes[calls]

    def _find_close(self, calls: bool) -> Close:
        """Find the token that ends an answer.

        The candidates stand behind an answer both at the end of a chat and before another message.
        The tokenizer's end-of-sequence token comes first, then the first candidate. Behind calls,
        whose own markers are tokens, too, it is the one that ends other answers, or else the last
        candidate. A template may write it only at the end of a chat, or not at all.
        """
        reply: dict[str, Any] = {"role": "user", "content": "zqtold"}
        answer: dict[str, Any] = {"role": "assistant", "content": "zqsaid"}
        usual = self._close(False) if calls else None
        if calls:
            assert self.style is not None, "there are calls"
            answer = self.style([ToolCall("zqcall", {"zqkey": "zqsaid"}, PROBE.id)])
            reply |= {"role": "tool", "name": "zqcall", "tool_call_id": PROBE.id}
        alone = self._behind([answer], generation=False)
        try:
            followed = self._behind([answer, reply], generation=True)
        except ValueError:  # the template lets nothing follow
            followed = alone
        found = self.special.find(alone[: count_common(alone, followed)])
        if usual is None:
            ends = [text for text in found if text == self.tokenizer.eos_token]
            end = next(iter(ends or found or self.special.find(alone)), None)
        elif usual.text in found or not usual.inside:
            end = usual.text if usual.inside else None
        else:
            end = self._check_ends_calls(found[-1] if found else None)
        if end is not None:
            at = alone.rindex(end) if calls else alone.index(end)
            return Close(end, alone[at + len(end) :], inside=True)
        opened = self.special.find(followed[len(alone) :] if followed.startswith(alone) else "")
        if not opened and self.tokenizer.eos_token is None:
            raise ValueError("chat template: no token ends an answer, and there is no eos token")
        return Close([*opened, self.tokenizer.eos_token][0], "", inside=False)

    def _check_ends_calls(self, end: str | None) -> str:
        """Return what ends an answer with a call; raise ValueError if it ends each of two."""
        assert self.style is not None, "there are calls"
        calls = [ToolCall("zqcall", {"zqkey": text}, PROBE.id) for text in ("zqsaid", "zqmore")]
        two = self._behind([self.style(calls)], generation=False)
        if end is None or two.count(end) > 1:
            raise ValueError("chat template: no token ends an answer that calls tools")
        return end

    def _behind(self, messages: Sequence[Message], *, generation: bool) -> str:
        """Return what follows an answer in the text of a chat."""
        text = self.render([USER, *messages], generation=generation)
        _, said, behind = text.rpartition("zqsaid")
        if not said:
            raise ValueError(f"chat template: it drops an answer: expected it in {text!r}")
        return behind

    def _answer(self, messages: Sequence[Message], tools: Tools, prompt: str) -> str:
        """Return an answer to a rendered prompt; what the template leaves out is not looked for."""
        last, close = dict(messages[-1]), self.close(messages[-1])
        opens = OPEN_THOUGHT.search(prompt)
        content, reasoning = last.get("content"), last.get("reasoning_content") or ""
        if opens and not reasoning and isinstance(content, str) and "</think>" in content:
            reasoning, _, content = content.removeprefix("<think>").partition("</think>")
            reasoning, content = reasoning.strip("\n"), content.lstrip("\n")
            last |= {"reasoning_content": reasoning, "content": content}
        chat_text = self.render([*messages[:-1], last], generation=False, tools=tools)
        end = close.text + close.after if close.inside else ""
        if not chat_text.endswith(end):
            raise ValueError(
                f"chat template: expected the chat to end in {end!r}, got {chat_text[-80:]!r}"
            )
        chat_text = chat_text[: len(chat_text) - len(end)] + close.text
        if chat_text.startswith(prompt):
            return chat_text[len(prompt) :]
        head = prompt[: opens.start()] if opens else prompt
        if not chat_text.startswith(head):
            chat = self.prepared(messages[:-1])
            # where an answer follows, gpt-oss's drops reasoning, Mistral's the system prompt
            plain = [{k: v for k, v in m.items() if k not in REASONING} for m in chat]
            plain = [m for m in chat if m["role"] != "system"] if plain == chat else plain
            if plain != chat:
                shorter = self.render(plain, generation=True, tools=tools)
                return self._answer([*plain, last], tools, shorter)
            common = count_common(prompt, chat_text)
            raise ValueError(
                f"messages[{len(messages) - 1}]: the answer does not fit the chat template's "
                f"prompt: after {prompt[:common][-40:]!r} the chat goes on with "
                f"{chat_text[common:][:40]!r}, the prompt with {prompt[common:][:40]!r}: set "
                "variables of the template with which both agree"
            )
        answer = chat_text[len(head) :]
        if answer.startswith("<think>"):
            return answer.removeprefix("<think>")
        return f"{reasoning}\n</think>\n\n{answer}"

    def _answer_ids(
        self, asked: Sequence[int], prompt: str, answer: str, *, after: str
    ) -> list[int]:
        """Return the ids of an answer to a prompt, whose ids are `asked`, behind a token.

        They are those that it has behind the prompt, unless letters at the border would be one
        token.
        """
        both = self.special.encode(prompt + answer, {}, after=after)
        if both[: len(asked)] == asked:
            return both[len(asked) :]
        for before in (":", "x", "\n"):
            alone, both = self.ids(before), self.ids(before + answer)
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        raise ValueError(f"tokenizer: the answer {answer[:40]!r} has no tokens of its own")

    # what the template asks for

    @functools.cached_property
    def knows_tools(self) -> bool:
        """Whether the template mentions tools."""
        return bool(re.search(r"\btools\b", self.source))

    @functools.cached_property
    def style(self) -> Callable[..., dict[str, Any]] | None:
        """How the template wants calls; None: it writes none."""
        for as_text in (False, True):
            style = functools.partial(write_calls, as_text=as_text)
            text = self._tried([self._in_form(USER), style([PROBE])])
            if PROBE.name in text and "Zürich" in text:
                return style
        return None

    @functools.cached_property
    def takes_several_calls(self) -> bool:
        """Whether the template takes several calls in one message; Llama 3's takes one."""
        if self.style is None:
            return True
        calls = [PROBE._replace(name=f"probe{i}", id=f"call0000{i}") for i in (1, 2)]
        text = self._tried([USER, self.style(calls)])
        return "probe1" in text and "probe2" in text

    @functools.cached_property
    def has_tool_role(self) -> bool:
        """Whether the template shows messages of tools; else they are shown as the user's."""
        answer: Message = {"role": "assistant", "content": "Sure."}
        if self.style is not None:
            answer = self.style([PROBE])
        result = {
            "role": "tool",
            "content": "zqprobe",
            "name": PROBE.name,
            "tool_call_id": PROBE.id,
        }
        try:
            text = self._apply([self._in_form(m) for m in (USER, answer, result)], generation=True)
            if "zqprobe" in text:
                return True
            reason = "drops them"
        except ValueError as error:
            reason = f"refuses them: {error}"
        log.warning("messages of tools are told as the user's: the chat template %s", reason)
        return False

    @functools.cached_property
    def shows_reasoning(self) -> bool:
        """Whether the template writes the reasoning of an answer."""
        answer = {"role": "assistant", "content": "Sure.", "reasoning_content": "zqprobe"}
        try:
            prompt = self.render([USER], generation=True)
            return "zqprobe" in self._answer([USER, answer], (), prompt)
        except ValueError:
            return False

    @functools.cached_property
    def _is_harmony(self) -> bool:
        return is_harmony(self.tokenizer)

    @functools.cached_property
    def _knows_developer(self) -> bool:
        shown = self._tried([{"role": "developer", "content": "zqprobe"}, USER])
        return "developer" in self.source and "zqprobe" in shown

    @functools.cached_property
    def _content_forms(self) -> tuple[bool, bool]:
        """Whether contents may be texts, and whether they may be typed parts."""
        text, parts = (
            self._tried([{"role": "user", "content": content}])
            for content in ("zqprobe", [{"type": "text", "text": "zqprobe"}])
        )
        reads_parts = "zqprobe" in parts and not re.search("['\"]type['\"]", parts)
        return "zqprobe" in text or not reads_parts, reads_parts

    def _tried(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat; an empty one if the template refuses it."""
        try:
            return self._apply(messages, generation=True)
        except ValueError:
            return ""

    def prepared(
        self, messages: Sequence[Message], calls: Sequence[ToolCall] = ()
    ) -> list[dict[str, Any]]:
        """Return messages as the template asks for them.

        Args:
            messages: of a chat, or what follows an answer.
            calls: those of the answer that the first ones follow.

        Raises:
            ValueError: arguments of a call are no JSON; a content has images, and the template
                shows texts alone.
        """
        made, calls, waiting, joins = list[dict[str, Any]](), list(calls), iter(calls), False
        for index, given in enumerate(messages):
            message = {key: value for key, value in given.items() if value is not None}
            role, joined = message["role"], joins
            joins = role == "tool" and not self.has_tool_role
            message = {"content": ""} | message
            if role == "assistant":
                calls = read_calls(message, f"messages[{index}]")
                waiting = iter(calls)
                message = with_thinking(message) if self._is_harmony else message
                if calls and self.style is not None:
                    message |= self.style(calls, message["content"])
            elif role == "tool" and not joins:
                call = next(waiting, ToolCall("tool", {}, PROBE.id))
                named = [c for c in calls if c.id and c.id == message.get("tool_call_id")]
                call = named[0] if named else call
                ids = {"name": call.name or "tool", "tool_call_id": call.id or PROBE.id}
                message = ids | {k: v for k, v in message.items() if v or k == "content"}
            elif joins:
                message = {"role": "user", "content": message["content"]}
            elif role == "developer" and not self._knows_developer:
                message["role"] = "system"
            last = made[-1] if made else {}
            if last.get("role") == message["role"] == "user" and (joins or joined):
                last["content"] = joined_contents(last["content"], message["content"])
            else:
                made.append(message)
        return [self._in_form(message, f"messages[{i}]") for i, message in enumerate(made)]

    def _in_form(self, message: Message, where: str = "") -> dict[str, Any]:
        """Return a message whose content is a text, or typed parts, as the template reads it."""
        content, (takes_text, takes_parts) = message.get("content"), self._content_forms
        if isinstance(content, str) and not takes_text:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not takes_parts:
            if any(part.get("type") != "text" for part in content):
                raise ValueError(f"{where}: the chat template shows texts, expected no other parts")
            content = "\n".join(part["text"] for part in content)
        return {**message, "content": content}

    # what it leaves out

    def _check_kept(self, messages: Sequence[Message], tools: Tools, kind: str) -> None:
        """Raise ValueError if the template leaves out what a message says.

        It renders a chat of the same form in which every text is replaced by a unique marker,
        once for each form. A template may drop the reasoning of earlier answers, and names and ids
        of tools' messages.
        """
        form = json.dumps([_form(message) for message in messages], default=repr)
        key = form, bool(tools), kind
        if key not in self._lost:
            signs = dict[str, tuple[str, str]]()
            chat = [_signed(m, f"messages[{i}]", signs) for i, m in enumerate(messages)]
            if kind == "answer":
                text = self.render(chat[:-1], generation=True, tools=tools)
                text += self._answer(chat, tools, text)
            else:
                text = self.render(chat, generation=kind == "prompt", tools=tools)
            last = None if kind == "prompt" else len(chat) - 1
            asked = tuple(f"messages[{last}].{name}" for name in REASONING)
            if len(self._lost) > MOST_FORMS:
                self._lost.clear()
            self._lost[key] = [
                (name, role)
                for sign, (name, role) in signs.items()
                if sign not in text and (name in asked or not name.endswith(REASONING))
            ]
        for name, role in self._lost[key]:
            raise _lost_error(name, role)


def _stands_in(content: str, answer: str) -> bool:
    """Return whether an answer has a content, in which templates may move tags of thoughts."""
    at = 0
    for piece in map(str.strip, re.split("<think>|</think>", content)):
        found = answer.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def _lost_error(name: str, role: str) -> ValueError:
    return ValueError(
        f"{name} (role {role!r}): the chat template leaves it out, so the model would never see "
        "it: use a role and keys that the template shows, or another template"
    )


def _check_ends_in_answer(messages: Sequence[Message]) -> None:
    last = messages[-1]["role"] if messages else "nobody"
    if last != "assistant":
        raise ValueError(
            f"messages[{len(messages) - 1}]: expected the chat to end with an assistant's answer, "
            f"got a message of {last!r}"
        )


def read_calls(message: Message, name: str) -> list[ToolCall]:
    """Return the calls of a message, whose arguments may be a text of JSON.

    Args:
        message: the assistant's.
        name: of the message, for errors.

    Raises:
        ValueError: arguments are no JSON, or no object.
    """
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function, where = call.get("function") or call, f"{name}.tool_calls[{number}]"
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(f"{where}: arguments are no JSON: {error}") from error
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{where}: expected an object as arguments, got {arguments!r}")
        calls.append(ToolCall(function["name"], dict(arguments), call.get("id") or PROBE.id))
    return calls


def _says(value: Any) -> bool:
    return (
        value is not None
        and value not in ("", [], {})
        and not (isinstance(value, str) and not value.strip())
    )


def _form(message: Message) -> Any:
    """Return which keys of a message hold something: what decides whether a template shows it."""

    def of(key: str, value: Any) -> Any:
        if key == "role":
            return value
        if key == "tool_calls":
            return [[bool(c.get("function", c).get("arguments")), len(c)] for c in value]
        if isinstance(value, list):
            return [
                [p.get("type"), _says(p.get("text"))] if isinstance(p, dict) else p for p in value
            ]
        return type(value).__name__

    return sorted((key, of(key, value)) for key, value in message.items() if _says(value))


def _signed(message: Message, where: str, signs: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Return a message in which each text is a sign; add the field of each to `signs`."""
    role = message["role"]

    def sign(name: str) -> str:
        text = f"zq{len(signs)}qz"
        signs[text] = (f"{where}.{name}", role)
        return text

    signed: dict[str, Any] = {"role": role}
    for key, value in message.items():
        if key == "role" or key in UNSHOWN.get(role, ()) or not _says(value):
            signed[key] = value
        elif key == "tool_calls":
            signed[key] = [
                {"type": "function", "id": call.get("id") or PROBE.id}
                | {
                    "function": {
                        "name": sign(f"{key}[{i}].name"),
                        "arguments": {sign(f"{key}[{i}].arguments"): sign(f"{key}[{i}].arguments")}
                        if call.get("function", call).get("arguments")
                        else {},
                    }
                }
                for i, call in enumerate(value)
            ]
        elif key == "content" and isinstance(value, list):
            signed[key] = [
                {**part, "text": sign(f"{key}[{i}]")} if _says(part.get("text")) else part
                for i, part in enumerate(value)
            ]
        else:
            signed[key] = sign(key)
    return signed


def _chat_template(tokenizer: Any) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ValueError(
            "chat template: the tokenizer has none; use an instruction-tuned model's tokenizer, or"
            " put a chat_template.jinja into its directory"
        ) from error


VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@runtime_checkable
class Tokenizer(Protocol):
    """What this library asks of a tokenizer; every `transformers` tokenizer fits."""

    eos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Return a mapping whose `input_ids` are the ids of `text`."""
        ...

    def get_chat_template(self) -> str:
        """Return the Jinja source of the chat template; ValueError if there is none."""
        ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Return the ids of the conversation under the chat template, or its text."""
        ...


def load_tokenizer(directory: str | Path) -> Any:
    """Load the `transformers` tokenizer of a model.

    Args:
        directory: holds `tokenizer.json` or the files of a slow tokenizer, its
            `tokenizer_config.json` and, where there is one, its chat template; or a hub
            repository, as `resolve` takes it.

    Returns:
        A `transformers` tokenizer; it satisfies `Tokenizer`.

    Raises:
        ValueError: there is no such directory or repository, or no tokenizer that can be read.

    >>> load_tokenizer("/no/such/model")
    Traceback (most recent call last):
    ValueError: tokenizer: expected a local model or one of the hub: no directory '/no/such/model'
    """
    try:
        path = resolve(directory)
    except FileNotFoundError as error:
        raise ValueError(f"tokenizer: expected a local model or one of the hub: {error}") from error
    from transformers import AutoTokenizer

    try:
        if not any((path / name).is_file() for name in VOCABULARIES):
            # transformers would make an empty tokenizer of the model's type
            raise ValueError(f"there is none of {', '.join(VOCABULARIES)}")
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        files = ", ".join(sorted(p.name for p in path.iterdir())[:12]) or "no files"
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"tokenizer: can't load one from {str(path)!r} (it holds {files}): {reason}"
        ) from error


def encode_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools = (), **template_kwargs: Any
) -> list[int]:
    """Return the ids of a chat up to where the assistant's reply begins.

    Args:
        tokenizer: its chat template must be set.
        messages: the chat, as `ChatTemplate` takes it.
        tools: schemas of tools that the model may call.
        **template_kwargs: variables of the chat template itself, such as Qwen3's
            `enable_thinking`. A name that the template never mentions is refused.

    Returns:
        The token ids, ending in the template's generation prompt.

    Raises:
        ValueError: no chat template; a variable that it does not have; the template refuses the
            chat, or leaves out something that it says.

    >>> encode_prompt(load_tokenizer("configs/quickstart"), [{"role": "user", "content": "042"}])
    [259, 15, 19, 17, 257, 260]
    """
    return ChatTemplate(tokenizer, template_kwargs).prompt(messages, tools)


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools = (), **template_kwargs: Any
) -> str:
    """Return the text whose ids `encode_prompt` returns.

    Args:
        tokenizer: as there.
        messages: as there.
        tools: as there.
        **template_kwargs: as there.

    Raises:
        ValueError: as there.

    >>> render_prompt(load_tokenizer("configs/quickstart"), [{"role": "user", "content": "042"}])
    '<|user|>042<|end|><|assistant|>'
    """
    return ChatTemplate(tokenizer, template_kwargs).prompt_text(messages, tools)


class PolicyTokens(NamedTuple):
    """A policy's tokenizer, and the tokens that end an answer."""

    tokenizer: Any
    stops: tuple[int, ...]


def stop_ids(
    tokenizer: Tokenizer, directory: str | Path, *, vocab_size: int | None = None
) -> tuple[int, ...]:
    """Return every token id that ends a reply, in rising order.

    They are the tokenizer's end-of-sequence token, those that `generation_config.json` names, or
    where it names none those of `config.json`, and those with which the chat template ends an
    answer: an instruction-tuned model often ends its turn with another token than a base model.

    Args:
        tokenizer: its `eos_token_id` may be None, and it may have no chat template.
        directory: the model's directory or hub repository; both files may be missing in it.
        vocab_size: of the model, which samples ids below it; None: it is not known.

    Raises:
        ValueError: one of the files can't be read, or nothing names a stop token that the model
            can sample.
        FileNotFoundError: there is no such directory or repository.

    >>> stop_ids(load_tokenizer("configs/quickstart"), "/")
    (257,)
    """
    tokens = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    folder = resolve(directory)
    generation = _configured_stop_ids(folder / "generation_config.json")
    tokens |= generation or _configured_stop_ids(folder / "config.json")
    try:
        tokens |= {*ChatTemplate(tokenizer).closing_ids}
    except ValueError as error:  # a base model has no template
        log.info("stop tokens: none of a chat template: %s", error)
    if not tokens:
        raise ValueError(
            "stop tokens: the tokenizer has no eos token, and neither generation_config.json nor "
            f"config.json in {str(folder)!r} names an eos_token_id, so a reply could never end"
        )
    if vocab_size is not None and min(tokens) >= vocab_size:
        raise ValueError(
            f"stop tokens: expected one below {vocab_size}, the model's vocabulary, got "
            f"{sorted(tokens)}, so a reply could never end"
        )
    return tuple(sorted(tokens))


def load_policy_tokens(path: str, *, vocab_size: int | None = None) -> PolicyTokens:
    """Load the tokenizer of a directory, and what ends an answer; see `stop_ids`."""
    tokenizer = load_tokenizer(path)
    return PolicyTokens(tokenizer, stop_ids(tokenizer, path, vocab_size=vocab_size))


def _configured_stop_ids(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"stop tokens: can't read {str(path)!r}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"stop tokens: can't read {str(path)!r}: it holds no JSON object")
    value = config.get("eos_token_id")
    if value is None:
        value = (config.get("text_config") or {}).get("eos_token_id")
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise ValueError(
            f"stop tokens: expected an id or a list of ids as eos_token_id in {str(path)!r}, "
            f"got {value!r}"
        )
    return set(listed)
