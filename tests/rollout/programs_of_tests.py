"""Programs that tests of the gateway run, as rows name them in `do`; none is the library's."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": NUMBERS}
FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
ADD = {"type": "function", "function": FUNCTION}


def main(base_url, api_key, model, row, messages, extra_info, *, scale=1.0):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)

    def ask(chat, **more):
        return client.chat.completions.create(model=model, messages=chat, **more).choices[0]

    value = globals()[extra_info["do"]](ask, list(messages), client)
    return scale * value if isinstance(value, int | float) else value


def tools(ask, chat, client):
    """Run calls until there are none, and echo history as other libraries write it."""
    while True:
        message = ask(chat, tools=[ADD]).message
        if not message.tool_calls:
            return float(message.content)
        calls, results = [], []
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            swapped = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))
            function = {"name": call.function.name, "arguments": swapped}
            calls.append({"id": call.id, "type": "function", "function": function})
            content = [{"type": "text", "text": str(sum(arguments.values()))}]
            results.append({"role": "tool", "tool_call_id": call.id, "content": content})
        content = f"{message.content or ''} "
        chat += [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


def goes_on(ask, chat, text, said="{}"):
    """Ask, and say something to the answer."""
    answer = said.format(ask(chat).message.content)
    chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]


def turns(ask, chat, client):
    """Ask three times, after a while of another length each time."""
    for number in range(3):
        time.sleep(0.1 * os.urandom(1)[0] / 256)
        goes_on(ask, chat, str(number))


def rewrites(ask, chat, client):
    goes_on(ask, chat, "on", said="not {}")
    ask(chat)


def branches(ask, chat, client):
    """Go on from one answer in two ways."""
    goes_on(ask, chat, "left")
    ask(chat)
    ask([*chat[:-1], {"role": "user", "content": "right"}])


def streams(ask, chat, client):
    options = {"stream_options": {"include_usage": True}, "tools": [ADD], "stream": True}
    chunks = list(client.chat.completions.create(model="gpt-4o", messages=chat, **options))
    return float(chunks[-1].usage.completion_tokens)


def responses(ask, chat, client):
    """Do what `tools` does by the Responses API, with a stream at the end."""
    tool = {"type": "function", **FUNCTION}
    items = [{"role": "user", "content": "tools"}]
    first = client.responses.create(model="m", input=items, tools=[tool])
    items += first.output
    for call in [item for item in first.output if item.type == "function_call"]:
        total = str(sum(json.loads(call.arguments).values()))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": total})
    with client.responses.stream(model="m", input=items, tools=[tool]) as stream:
        stream.until_done()
        return float(stream.get_final_response().output_text)


def parallel(ask, chat, client):
    chats = [[*chat, {"role": "user", "content": text}] for text in ("x", "y", "x")]
    with ThreadPoolExecutor(3) as pool:
        answers = [answer.message.content for answer in pool.map(ask, chats)]
    return float(answers[0] != answers[2])


def retries(ask, chat, client):
    """Give an answer up before it comes, and ask again."""
    impatient = client.with_options(timeout=0.3, max_retries=20)
    answer = impatient.chat.completions.create(model="m", messages=chat)
    return float(answer.choices[0].message.content)


def short(ask, chat, client):
    answer = ask(chat, max_tokens=2)
    stopped = ask([*chat, {"role": "user", "content": "on"}], stop="!")
    return float(answer.finish_reason == "length") + 2 * (stopped.message.content == "a")


def endless(ask, chat, client):
    while True:
        goes_on(ask, chat, "more")


def fills(ask, chat, client):
    try:
        endless(ask, chat, client)
    except openai.BadRequestError as error:
        return float(error.code == "context_length_exceeded")


def stubborn(ask, chat, client):
    """Ask on even when the episode is over, and remember how that was said."""
    seen = set()
    for _ in range(6):
        try:
            goes_on(ask, chat, "more")
        except openai.APIStatusError as error:
            seen.add((error.status_code, error.code))
    return float(seen == {(410, "episode_over")})


def refused(ask, chat, client):
    """Ask for what is refused; return how often it was."""
    asked = [{"n": 2}, {"logit_bias": {"1": 5}}, {"logprobs": True}]
    asked += [{"presence_penalty": 0.5}, {"extra_body": {"guided_regex": "a"}}]
    count = 0
    for more in asked:
        try:
            ask(chat, **more)
        except openai.BadRequestError:
            count += 1
    ask(chat)
    return count


def elsewhere(ask, chat, client):
    """Ask at the address of another; return whether that is refused."""
    assert [model.id for model in client.models.list()] == ["policy"]
    ask(chat)
    secret = str(client.base_url).rstrip("/").split("/")[-2]
    other = client.with_options(base_url=str(client.base_url).replace(secret, secret[::-1]))
    try:
        other.models.list()
    except openai.NotFoundError:
        return 1.0


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


def forges(ask, chat, client):
    """Write a result that is none to the pipe that is for results."""
    ask(chat)
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b'{"value": [1], "error": null}')
    os._exit(0)


def silent(ask, chat, client):
    return 1.0


def once(ask, chat, client):
    ask(chat)


def images(ask, chat, client):
    """Ask about the row's image, and then about it and another one; a wrong one is refused."""
    again = {"type": "image_url", "image_url": {"url": chat[0]["content"][0]["image_url"]["url"]}}
    goes_on(ask, chat, [{"type": "text", "text": "and "}, again])
    wrong = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    with contextlib.suppress(openai.BadRequestError):
        ask([{"role": "user", "content": [wrong]}])
        return -1.0
    ask(chat)
    return 2.0
