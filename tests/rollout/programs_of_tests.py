"""Programs that the tests of the gateway run; nothing in them is this library's.

A program does what its row says: `do` names one of the functions below.
"""

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def main(base_url, api_key, model, row, messages, extra_info, *, scale=1.0):
    """Do what the row says, with a client."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)

    def ask(chat, **more):
        return client.chat.completions.create(model=model, messages=chat, **more).choices[0]

    value = globals()[extra_info["do"]](ask, list(messages), client)
    return scale * value if isinstance(value, int | float) else value


def once(ask, chat, client):
    ask(chat)


def score(ask, chat, client):
    return float(ask(chat, temperature=0.2, user="me").message.content)


def tools(ask, chat, client):
    """Run calls until there are none, and echo history as other libraries write it."""
    while True:
        message = ask(chat, tools=[ADD]).message
        if not message.tool_calls:
            return float(message.content)
        calls = []
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            swapped = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
            calls.append(
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": swapped},
                }
            )
        chat.append(
            {"role": "assistant", "content": f"{message.content or ''} ", "tool_calls": calls}
        )
        for call in message.tool_calls:
            total = sum(json.loads(call.function.arguments).values())
            chat.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": [{"type": "text", "text": str(total)}],
                }
            )


def turns(ask, chat, client):
    """Ask three times."""
    for number in range(3):
        answer = ask(chat).message.content
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": str(number)}]


def pauses(ask, chat, client):
    """Ask three times, after a while of another length each time."""
    for number in range(3):
        time.sleep(int.from_bytes(os.urandom(1), "little") / 256 * 0.1)
        answer = ask(chat).message.content
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": str(number)}]


def rewrites(ask, chat, client):
    """Ask twice, the second time with another history."""
    answer = ask(chat).message.content
    chat += [{"role": "assistant", "content": f"not {answer}"}, {"role": "user", "content": "on"}]
    ask(chat)


def branches(ask, chat, client):
    """Go on from one answer in two ways."""
    chat.append({"role": "assistant", "content": ask(chat).message.content})
    for text in ("left", "right"):
        ask([*chat, {"role": "user", "content": text}])


def spaces(ask, chat, client):
    """Go on from two histories that differ in a space."""
    chats = [[{"role": "user", "content": text}] for text in ("spaces", "spaces ")]
    answers = [ask(asked).message.content for asked in chats]
    for asked, answer in zip(chats, answers, strict=True):
        ask([*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": "on"}])


def streams(ask, chat, client):
    """Ask with a stream."""
    create = client.chat.completions.create
    options = {"include_usage": True}
    text, used = "", None
    for chunk in create(
        model="gpt-4o", messages=chat, tools=[ADD], stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            text += "".join(c.function.arguments for c in choice.delta.tool_calls or ())
        used = chunk.usage or used
    print(text, used)
    return float(used.completion_tokens)


def responses(ask, chat, client):
    """Do the same by the Responses API, with a stream at the end."""
    tool = {"type": "function", **ADD["function"]}
    items = [{"role": "user", "content": "tools"}]
    first = client.responses.create(model="m", input=items, tools=[tool])
    calls = [item for item in first.output if item.type == "function_call"]
    items += first.output
    for call in calls:
        total = str(sum(json.loads(call.arguments).values()))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": total})
    with client.responses.stream(model="m", input=items, tools=[tool]) as stream:
        stream.until_done()
        return float(stream.get_final_response().output_text)


def parallel(ask, chat, client):
    """Ask the same and other things at once."""
    own = openai.AsyncOpenAI(base_url=str(client.base_url), api_key=client.api_key)

    async def one(text):
        content = [*chat, {"role": "user", "content": text}]
        answer = await own.chat.completions.create(model="any", messages=content)
        return answer.choices[0].message.content

    async def several():
        return await asyncio.gather(*(one(text) for text in ("x", "y", "x")))

    answers = asyncio.run(several())
    return float(answers[0] != answers[2])


def retries(ask, chat, client):
    """Give an answer up before it comes, and ask again."""
    impatient = client.with_options(timeout=0.3, max_retries=20)
    answer = impatient.chat.completions.create(model="m", messages=chat)
    return float(answer.choices[0].message.content)


def short(ask, chat, client):
    """Ask for less than the run allows; return what that was said to be."""
    answer = ask(chat, max_tokens=2)
    stopped = ask([*chat, {"role": "user", "content": "on"}], stop="!")
    return float(answer.finish_reason == "length") + 2 * (stopped.message.content == "a")


def fills(ask, chat, client):
    """Ask until there is no room."""
    try:
        endless(ask, chat, client)
    except openai.BadRequestError as error:
        return float(error.code == "context_length_exceeded")


def refused(ask, chat, client):
    """Ask for what is refused; return how often it was."""
    asked = [{"presence_penalty": 0.5}, {"n": 2}, {"logit_bias": {"1": 5}}, {"logprobs": True}]
    asked += [{"response_format": {"type": "json_object"}}, {"extra_body": {"guided_regex": "a"}}]
    count = 0
    for more in asked:
        try:
            ask(chat, **more)
        except openai.BadRequestError as error:
            count += "expected" in str(error) or "not supported" in str(error)
    ask(chat)
    return count


def rubbish(ask, chat, client):
    """Send what is no request, and one that breaks off; return how many were refused."""
    base = client.base_url
    bodies = [
        ("chat/completions", rb'{"messages": [{"role": "user", "content": "\ud800"}]}'),
        ("chat/completions", rb'{"messages": [{"role": "user", "content": "a", "name": NaN}]}'),
        ("responses", rb'{"input": "Hi", "metadata": {"a": "\ud800"}}'),
        ("responses", b'{"input": "Hi", "metadata": {"a": NaN}}'),
        ("responses", b'{"input": "Hi", "temperature": 1e999}'),
    ]
    count = 0
    for path, body in bodies:
        count += httpx2.post(f"{base}{path}", content=body).status_code == 400
    with socket.create_connection((base.host, base.port)) as connection:
        path = f"{base.path}chat/completions"
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
    ask(chat)
    return count


def elsewhere(ask, chat, client):
    """Ask at addresses of others; return how often that is refused."""
    base, count = str(client.base_url), 0
    secret = base.rstrip("/").split("/")[-2]
    for other in ("0-" + "a" * 40, "x", secret[:-1] + ("0" if secret[-1] != "0" else "1")):
        try:
            client.with_options(base_url=base.replace(secret, other)).models.list()
        except openai.NotFoundError:
            count += 1
    assert [model.id for model in client.models.list()] == ["policy"]
    ask(chat)
    return count


def endless(ask, chat, client):
    """Ask on, whatever the answer is, until there is none."""
    while True:
        answer = ask(chat).message.content
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]


def stubborn(ask, chat, client):
    """Ask on even when the episode is over, and remember how that was said."""
    seen = set()
    for _ in range(6):
        try:
            answer = ask(chat).message.content
        except openai.APIStatusError as error:
            seen.add((error.status_code, error.code))
            continue
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    return float(seen == {(410, "episode_over")})


def hangs(ask, chat, client):
    """Start another process, and never end."""
    ask(chat)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with Path(os.environ["GATEWAY_TEST_FILE"]).open("a") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    time.sleep(600)


def raises(ask, chat, client):
    ask(chat)
    raise KeyError("no such thing")


def wrong(ask, chat, client):
    ask(chat)
    return float("nan")


def another(ask, chat, client):
    ask(chat)
    return {"score": 1.0}


def forges(ask, chat, client):
    """Write a result that is none to the pipe that is for results."""
    ask(chat)
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b'{"value": [1], "error": null}')
    os._exit(0)


def dies(ask, chat, client):
    ask(chat)
    os._exit(3)


def silent(ask, chat, client):
    return 1.0


def images(ask, chat, client):
    """Ask about the row's image, and then about it and another one; a wrong one is refused."""
    answer = ask(chat).message.content
    url = chat[0]["content"][0]["image_url"]["url"]
    again = {"type": "image_url", "image_url": {"url": url}}
    chat += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [{"type": "text", "text": "and "}, again]},
    ]
    with contextlib.suppress(openai.BadRequestError):
        wrong = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        ask([{"role": "user", "content": [wrong]}])
        return -1.0
    ask(chat)
    return 2.0
