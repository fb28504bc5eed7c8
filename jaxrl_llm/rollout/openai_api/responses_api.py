"""OpenAI's Responses API in terms of its chats: requests to those of chats, and answers back."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.rollout.openai_api.requests import NEUTRAL, NOTHING_CHANGES, APIError, Fields, shown

SAME = {"model", "stream", "temperature", "top_p", "tool_choice", "parallel_tool_calls"}
SAME |= {"top_k", "min_p", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids"}
SAME |= {"ignore_eos", "chat_template_kwargs"} | NOTHING_CHANGES
"""Fields that chats have, too."""

ASK_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that are not supported, and the values that ask for nothing."""

TEXTS = ("input_text", "output_text", "text")


def chat_request(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of `/v1/chat/completions` that asks for the same.

    Args:
        tree: a request of `/v1/responses`.

    Raises:
        APIError: a field is wrong, unknown or not supported.

    >>> chat_request({"input": "Hi", "instructions": "Be brief."})["messages"][0]
    {'role': 'system', 'content': 'Be brief.'}
    """
    fields = Fields({name: value for name, value in tree.items() if name not in SAME})
    for name in ("previous_response_id", "conversation"):
        if (given := fields.any_of(name)) is not None:
            raise fields.refuse(name, given, "none: answers are not stored, send the whole input")
    instructions = fields.take("instructions", str)
    given = fields.any_of("input")
    if not isinstance(given, str | list) or not given:
        raise fields.refuse("input", given, "a text or a list of items")
    tools = [_chat_tool(tool, index) for index, tool in enumerate(fields.take("tools", list, []))]
    chat = {name: value for name, value in tree.items() if name in SAME}
    chat |= {"max_completion_tokens": fields.between("max_output_tokens", int, None, 1, 2**31)}
    fields.end({**NEUTRAL, **ASK_FOR_NOTHING})
    system = [{"role": "system", "content": instructions}] if instructions else []
    asked = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    return chat | {"messages": [*system, *asked], "tools": tools}


def _chat_tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise APIError(f"tools[{index}]: got {shown(tool)}, expected a function", param="tools")
    named = {key: tool.get(key) for key in ("name", "description", "parameters")}
    return {"type": "function", "function": named}


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a chat of items; those that follow each other in one turn are one message.

    Reasoning is kept with the message that it led to.
    """
    messages = list[dict[str, Any]]()

    def turn(free: str) -> dict[str, Any]:
        """Return the message of the assistant's turn, another where `free` is said already."""
        if not messages or messages[-1]["role"] != "assistant" or messages[-1].get(free):
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for index, item in enumerate(items):
        where = f"input[{index}]"
        fields = Fields(item if isinstance(item, dict) else {}, f"{where}.")
        kind = fields.take("type", str, "message" if fields.has("role") else "")
        if kind == "message":
            role, text = fields.take("role", str, ""), _content(fields, "content", where)
            if role == "assistant":
                turn("content")["content"] = text
            else:
                messages.append({"role": role, "content": text})
        elif kind == "reasoning":
            parts = [*fields.take("summary", list, []), *fields.take("content", list, [])]
            texts = [part.get("text", "") for part in parts if isinstance(part, dict)]
            turn("content")["reasoning_content"] = "\n".join(map(str, texts))
        elif kind == "function_call":
            named = {key: fields.take(key, str, "") for key in ("name", "arguments")}
            call = {"id": fields.take("call_id", str), "type": "function", "function": named}
            turn("").setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            told = {"role": "tool", "tool_call_id": fields.take("call_id", str, "")}
            messages.append(told | {"content": _content(fields, "output", where)})
        else:
            raise APIError(
                f"{where}: got {shown(item)}, expected the type message, function_call, "
                "function_call_output or reasoning",
                param=where,
            )
    return messages


def _content(fields: Fields, name: str, where: str) -> str | list[dict[str, Any]]:
    """Return a text that may come in parts, or the parts of a chat's message where some are images.

    What an image's part holds is checked with the chat.
    """
    given = fields.any_of(name)
    if isinstance(given, str):
        return given
    parts = list[dict[str, Any]]()
    for part in given if isinstance(given, list) else [given]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "input_image" and part.get("file_id") is None:
            image = {"url": part.get("image_url"), "detail": part.get("detail")}
            parts.append({"type": "image_url", "image_url": image})
        else:
            raise APIError(
                f"{where}.{name}: got {shown(part)}, expected a text, or parts of text and images "
                "(input_image with an image_url)",
                param=where,
            )
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


class ResponseEnvelope:
    """What stands around the answer to one request of `/v1/responses`; as `Envelope` for chats.

    Args:
        request: as it came.
        model: its name.
        prompt_tokens: how many the prompt has.
    """

    def __init__(self, request: Mapping[str, Any], model: str, prompt_tokens: int) -> None:
        """Draw an id."""
        self._prompt_tokens, self._number = prompt_tokens, 0
        self._finish: str | None = None
        self._item: dict[str, Any] | None = None  # that is not done yet
        self._response: dict[str, Any] = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": request.get("instructions"),
            "max_output_tokens": request.get("max_output_tokens"),
            "metadata": request.get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": _or(request.get("temperature"), 1.0),
            "text": {"format": {"type": "text"}},
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": request.get("tools") or [],
            "top_p": _or(request.get("top_p"), 1.0),
            "truncation": "disabled",
            "usage": None,
        }

    def answer(self, choices: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
        """Return a whole answer.

        Args:
            choices: one, as chats have it.
            tokens: that it has.
        """
        self._take(choices[0]["message"], choices[0]["finish_reason"])
        self._complete(tokens)
        return self._response

    def chunk(self, choice: Mapping[str, Any], *, first: bool) -> str:
        """Return the events of a piece.

        Args:
            choice: as in a chunk of a chat.
            first: whether it is the first one.
        """
        begun = ["response.created", "response.in_progress"] if first else []
        events = [self._event(kind, response=self._response) for kind in begun]
        return "".join([*events, *self._take(choice["delta"], choice["finish_reason"])])

    def end(self, tokens: int) -> str:
        """Return the events that end a stream."""
        return "".join(self._complete(tokens))

    def _take(self, delta: Mapping[str, Any], finish: str | None) -> list[str]:
        """Return the events of what is new."""
        self._finish = finish or self._finish
        events = list[str]()
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if delta.get(name):
                events += self._add_text(kind, delta[name])
        for call in delta.get("tool_calls") or ():
            events += [*self._close(), *self._add_call(call)]
        if finish and not self._response["output"] and self._item is None:
            events += self._add_text("message", "")
        return [*events, *self._close()] if finish else events

    def _add_text(self, kind: str, text: str) -> list[str]:
        events = list[str]()
        if self._item is None or self._item["type"] != kind:
            events += self._close()
            part = {"type": "reasoning_text", "text": ""}
            item: dict[str, Any] = {"type": kind, "id": _new_id("rs"), "summary": []}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"type": kind, "id": _new_id("msg"), "role": "assistant"}
            events.append(self._open(item | {"status": "in_progress", "content": []}))
            events.append(self._of_item("response.content_part.added", part=part, content_index=0))
            self._item = item | {"status": "in_progress", "content": [part]}
        assert self._item is not None, "it is open"
        part = self._item["content"][0]
        part["text"] += text
        more = {"logprobs": []} if kind == "message" else {}
        name = f"response.{part['type']}.delta"
        return [*events, self._of_item(name, delta=text, content_index=0, **more)]

    def _add_call(self, call: Mapping[str, Any]) -> list[str]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"], "name": name}
        events = [self._open(item | {"arguments": "", "status": "in_progress"})]
        self._item = item | {"arguments": arguments, "status": "in_progress"}
        changed = "response.function_call_arguments"
        events.append(self._of_item(f"{changed}.delta", delta=arguments))
        return [*events, self._of_item(f"{changed}.done", arguments=arguments, name=name)]

    def _open(self, item: dict[str, Any]) -> str:
        self._item = item
        place = len(self._response["output"])
        return self._event("response.output_item.added", item=item, output_index=place)

    def _close(self) -> list[str]:
        """Return the events that end the open item, if there is one."""
        if self._item is None:
            return []
        events = list[str]()
        for part in self._item.get("content", ()):
            more = {"logprobs": []} if part["type"] == "output_text" else {}
            done = f"response.{part['type']}.done"
            events.append(self._of_item(done, text=part["text"], content_index=0, **more))
            events.append(self._of_item("response.content_part.done", part=part, content_index=0))
        self._item["status"] = "incomplete" if self._finish == "length" else "completed"
        place = len(self._response["output"])
        self._response["output"].append(self._item)
        events.append(self._event("response.output_item.done", item=self._item, output_index=place))
        self._item = None
        return events

    def _complete(self, tokens: int) -> list[str]:
        """Return the event that ends the stream."""
        is_cut, prompt = self._finish == "length", self._prompt_tokens
        self._response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + tokens,
            },
        }
        return [self._event(f"response.{self._response['status']}", response=self._response)]

    def _of_item(self, kind: str, **fields: Any) -> str:
        assert self._item is not None, "it is open"
        place = len(self._response["output"])
        return self._event(kind, item_id=self._item["id"], output_index=place, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        tree = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(tree)}\n\n"


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given
