"""verl's tools: classes of a YAML file, which live for an episode."""

import asyncio
import json

import pytest
import yaml

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.session import Journal
from tests.episodes import Scripted, picture, play, prompt
from tests.tool_pools import open_tools

TOOLS = '''
import json
import pathlib
from types import SimpleNamespace


class Guess:
    """As verl's BaseTool, and derived from nothing."""

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.log = pathlib.Path(config["log"])
        self.secrets, self.guesses = {}, {}

    def note(self, *event):
        with self.log.open("a") as file:
            file.write(json.dumps(event) + "\\n")

    async def create(self, instance_id=None, secret=None, **kwargs):
        assert secret == kwargs.get("create_kwargs", {}).get("secret")
        if secret is None:
            raise ValueError("no secret")
        self.note("create", secret)
        self.secrets[instance_id], self.guesses[instance_id] = secret, 0
        return instance_id, SimpleNamespace(text=None)

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["number"] > 99:
            raise ValueError("too large")
        self.guesses[instance_id] += 1
        text = f"{self.guesses[instance_id]}:{parameters['number'] == self.secrets[instance_id]}"
        return SimpleNamespace(text=text, image=None, video=None), -0.25, {"calls": 1}

    async def calc_reward(self, instance_id, **kwargs):
        return 2 * self.guesses[instance_id]

    async def release(self, instance_id, **kwargs):
        self.note("release", self.secrets.pop(instance_id))


class Says:
    """A tool that has its schema by itself, and nothing to keep."""

    def __init__(self, config, tool_schema):
        assert tool_schema is None
        self.tool_schema = {"type": "function", "function": {"name": "says", "description": "Say."}}

    async def create(self, instance_id=None, **kwargs):
        return instance_id

    async def execute(self, instance_id, parameters):
        return "said"

    async def calc_reward(self, instance_id):
        return None

    async def release(self, instance_id):
        pass
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess a number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "the guess."}},
            "required": ["number"],
        },
    },
}


@pytest.fixture
def written(tmp_path):
    """(entries of a file of verl's) -> the spec of its tools."""
    (tmp_path / "my_tools.py").write_text(TOOLS)
    file, log = f"{tmp_path / 'my_tools.py'}", f"{tmp_path / 'log.jsonl'}"
    default = [
        {
            "class_name": f"{file}:Guess",
            "config": {"type": "native", "log": log},
            "tool_schema": SCHEMA,
        },
        {"class_name": f"{file}:Says", "config": {"type": "native"}},
    ]

    def write(entries=default):
        path = tmp_path / "tools.yaml"
        path.write_text(yaml.safe_dump({"tools": entries}).replace("FILE", file))
        return FunctionSpec("verl_tools", {"path": str(path)})

    return write


def row(secret=7):
    create = {} if secret is None else {"create_kwargs": {"secret": secret}}
    return EpisodeRow(0, extra_info={"tools_kwargs": {"guess": create}})


def events(tmp_path):
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


def run(spec, numbers, *, workers=0, journal=None, given=None):
    """Return the results of an episode's calls, and what there is at its end."""

    async def episode(pool):
        session = pool.open(0, given or row(), 1, journal)
        try:
            called = [await session.call(ToolCall("guess", {"number": n})) for n in numbers]
            return called, await session.end()
        finally:
            await session.close()

    with open_tools([spec], workers=workers) as pool:
        return asyncio.run(episode(pool))


def test_a_file_gives_tools_with_schemas_of_their_own(written):
    with open_tools([FunctionSpec("calculator"), written()], workers=0) as pool:
        calculator, guess, says = pool.schemas
    assert calculator["function"]["name"] == "calculator" and guess == SCHEMA
    assert says["function"]["name"] == "says" and not says["function"]["parameters"]["properties"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tool_lives_as_long_as_its_episode(written, tmp_path, workers):
    called, end = run(written(), [3, 100, 7], workers=workers)
    assert [each.text for each in called] == ["1:False", "error: ValueError: too large", "2:True"]
    assert [result.reward for result in called] == [-0.25, 0.0, -0.25]
    assert (end.reward, end.failure) == (4.0, None)
    assert events(tmp_path) == [("create", 7), ("release", 7)]


def test_an_episode_without_calls_has_no_tool(written, tmp_path):
    assert run(written(), [])[1].reward == 0.0
    assert not (tmp_path / "log.jsonl").exists()


def test_a_journal_has_the_reward_of_the_end(written, tmp_path):
    with Journal(tmp_path / "journal.jsonl", config="x") as journal:
        first = run(written(), [3, 7], journal=journal)
    with Journal(tmp_path / "journal.jsonl", config="x") as journal:
        assert run(written(), [3, 7], journal=journal) == first
    assert events(tmp_path) == [("create", 7), ("release", 7)], "nothing has run again"


def test_a_tool_that_can_not_be_created_is_no_fault_of_the_policy(written):
    called, _ = run(written(), [1], given=row(None))
    assert called[0].failure == "broken" and "no secret" in called[0].text


def test_a_policy_calls_them_in_episodes(written):
    def respond(text, seed):
        return "done" if text.count("<|tool|>") == 2 else "[guess(number=7)]"

    kwargs = {"guess": {"create_kwargs": {"secret": 7}}}
    rollouts = play(Scripted(respond), [prompt("x", tools_kwargs=kwargs)], tools=[written()])
    (episode,) = rollouts.episodes
    assert [p for p in picture(episode) if p.startswith("<<|tool|>")] == [
        "<<|tool|>1:True<|end|><|assistant|>>",
        "<<|tool|>2:True<|end|><|assistant|>>",
    ]
    assert episode.rewards[:2] == (-0.25, -0.25)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"class_name": "x"}, r"expected 'tools: \[\{class_name"),
        ([{"config": {}}], r"expected 'tools: \[\{class_name"),
        ([{"class_name": "FILE:Gues"}], "did you mean|no function 'Gues'"),
        ([{"class_name": "FILE:Says", "config": {"type": "mcp"}}], "'mcp', expected 'native'"),
        ([{"class_name": "FILE:Guess", "tool_schema": SCHEMA}], "KeyError: 'log'"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(written, entries, message):
    spec = written(entries)
    with pytest.raises(ConfigError, match=message):
        run(spec, [1])
