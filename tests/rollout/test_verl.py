import asyncio

import pytest
import yaml

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.agents.verl_agent import check_agent_rows
from jaxrl_llm.rollout.observation import EpisodeRow
from tests.episodes import STOPS, TOKENIZER, Scripted, picture, play, prompt
from tests.refusals import refuses
from tests.tool_pools import open_tools

LOOPS = '''
from types import SimpleNamespace

class Loop:
    """As verl's AgentLoopBase, and derived from nothing: asks twice, and says `more` in between."""
    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        self.config, self.server, self.tokenizer = trainer_config.config, server_manager, tokenizer
        self.kwargs, self.rollout_config = kwargs, self.config.actor_rollout_ref.rollout
    def encode(self, messages):
        options = {"add_generation_prompt": True, "tokenize": False}
        rendered = self.tokenizer.apply_chat_template(messages, **options)
        return self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    def sampling(self, params):
        return params
    def rewritten(self, tokens):
        return tokens
    async def run(self, sampling_params, **row):
        self.row, self.params, params = row, sampling_params, self.sampling(sampling_params)
        prompt = self.encode(row["raw_prompt"])
        tokens, mask = list(prompt), []
        for turn in range(2):
            if turn:
                told = self.encode([{"role": "user", "content": "more"}])
                tokens, mask = self.rewritten(tokens + told), mask + [0] * len(told)
            output = await self.server.generate("x", prompt_ids=tokens, sampling_params=params)
            assert len(output.token_ids) == len(output.log_probs)
            tokens, mask = tokens + output.token_ids, mask + [1] * len(output.token_ids)
        return self.output(prompt, tokens[len(prompt) :], mask)
    def output(self, prompt, ids, mask):
        fields = {"prompt_ids": prompt, "response_ids": ids, "response_mask": mask}
        return SimpleNamespace(**fields, reward_score=0.5)

class Reads(Loop):
    """Reads a row and a config by verl's names."""
    def output(self, prompt, tokens, mask):
        assert self.row["reward_model"]["ground_truth"] == "7" and self.row["data_source"] == "test"
        assert self.row["tools_kwargs"] == {"t": {"create_kwargs": {"x": 1}}}
        assert (self.row["index"], self.row["agent_name"]) == (5, "Reads")
        assert self.rollout_config.response_length == 60 and self.rollout_config.prompt_length == 40
        assert self.rollout_config.multi_turn.max_assistant_turns == 3
        assert self.rollout_config.multi_turn.format == "mine"
        assert self.config.data.get("apply_chat_template_kwargs", {}) == {"a": 1}
        assert self.kwargs["hf_model_type"] == "qwen3" and self.kwargs["tools"].tools == []
        assert self.params["temperature"] == 1.0 and self.params["top_k"] == -1
        return super().output(prompt, tokens, mask)

class OwnPrompt(Loop):
    def encode(self, messages):
        own = messages[0]["content"] != "more"
        return super().encode([{"role": "user", "content": "hi"}] * own + messages)

def changed(method, change):
    """Return a loop that changes what a method of `Loop`'s returns."""
    def changes(self, *given):
        return change(getattr(Loop, method)(self, *given))
    return type("Changed", (Loop,), {method: changes})

def output(name, change):
    def changes(made):
        return SimpleNamespace(**vars(made) | {name: change(getattr(made, name))})
    return changed("output", changes)

Rewrites = changed("rewritten", lambda tokens: tokens[:3] + tokens[4:])
Hotter = changed("sampling", lambda params: params | {"temperature": 2.0})
Short = changed("sampling", lambda params: params | {"max_tokens": 2, "stop": ["q"]})
HidesATurn = output("response_mask", lambda mask: [0] * 3 + mask[3:])
OtherTokens = output("response_ids", lambda tokens: tokens[:-1] + [1])
Uneven = output("response_mask", lambda mask: mask[:-1])
Scoreless = output("reward_score", lambda score: None)

class Images(Loop):
    async def run(self, sampling_params, **row):
        given = {"prompt_ids": self.encode(row["raw_prompt"]), "sampling_params": sampling_params}
        await self.server.generate("x", **given, image_data=[1])
'''


@pytest.fixture
def run(tmp_path):
    """(name of a loop, keys) -> the episode that it leads."""
    (tmp_path / "loops.py").write_text(LOOPS)

    def episode(name, *, text="x", info=None, limits=None, tokens=60, **kwargs):
        loop = {"loop": f"{tmp_path / 'loops.py'}:{name}", **kwargs}
        engine = Scripted(lambda text, seed: "ab")
        keys = {"limits": {"broken_share": 1.0, **(limits or {})}, "tokens": tokens}
        agent, prompts = FunctionSpec("verl_agent_loop", loop), [prompt(text, **(info or {}))]
        (one,) = play(engine, prompts, agent=agent, **keys).episodes
        return one

    return episode


MORE = "<<|user|>more<|end|><|assistant|>>"


def test_a_loop_leads_an_episode_by_tokens(run):
    episode = run("Loop")
    assert picture(episode) == ["ab<|end|>", MORE, "ab<|end|>"]
    assert episode.prompt == prompt("x").tokens and episode.stopped_by == STOPS[0]
    assert (episode.score, episode.finish, episode.turns) == (0.5, "stop", 2)
    assert (episode.logprobs[episode.drawn] < 0).all()
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "user", "assistant"]
    assert run("Scoreless").score is None
    assert picture(run("Short"))[0] == "ab", "a turn may be shorter than the run allows"
    for keys, finish in (({"limits": {"turns": 1}}, "turns"), ({"tokens": 8}, "length")):
        episode = run("Loop", **keys)
        assert (episode.finish, episode.turns, episode.usable) == (finish, 1, True)


def test_a_loop_gets_what_verl_gives_it_and_writes_its_own_prompt(run):
    info = {"index": 5, "tools_kwargs": {"t": {"create_kwargs": {"x": 1}}}}
    config = {
        "actor_rollout_ref": {"rollout": {"multi_turn": {"format": "mine"}}},
        "data": {"apply_chat_template_kwargs": {"a": 1}},
    }
    options = {"hf_model_type": "qwen3"}
    episode = run("Reads", info=info, limits={"turns": 3}, config=config, options=options)
    assert episode.error is None
    assert TOKENIZER.decode(run("OwnPrompt").prompt).startswith("<|user|>hi<|end|><|user|>x")
    with pytest.raises(RunError, match="40"):
        run("OwnPrompt", text="x" * 34)


def test_what_is_no_stream_of_the_episode_is_refused(run, subtests):
    for name, word in {
        **{"Rewrites": "stream", "HidesATurn": "response_ids", "OtherTokens": "response_ids"},
        **{"Uneven": "expected", "Hotter": "temperature", "Images": "model.vision"},
    }.items():
        with subtests.test(name), pytest.raises(RunError, match=word):
            run(name)


def test_a_row_names_the_agent_of_the_config_or_none():
    loop = FunctionSpec("verl_agent_loop", {"loop": "pkg.loops.Mine", "agent_name": "my_loop"})
    for agent, names, other in (
        ({}, ["one_answer", "single_turn_agent", None], "tool_agent"),
        ({"tools": ["calculator"]}, ["with_tools", "tool_agent"], "single_turn_agent"),
        ({"agent": loop}, ["verl_agent_loop", "Mine", "my_loop"], "other"),
    ):
        rows = [{"agent_name": name} for name in names]
        check_agent_rows(AgentConfig(**agent), [*rows, {}], "data")
        with refuses("data"):
            check_agent_rows(AgentConfig(**agent), [*rows, {"agent_name": other}], "data")


TOOLS = '''
import pathlib
from types import SimpleNamespace

class Guess:
    """As verl's BaseTool, and derived from nothing."""
    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.log = pathlib.Path(config["log"])
        self.secrets, self.guesses = {}, {}
    def note(self, event):
        with self.log.open("a") as file:
            file.write(f"{event}\\n")
    async def create(self, instance_id=None, secret=None, **kwargs):
        assert secret == kwargs.get("create_kwargs", {}).get("secret")
        if secret is None:
            raise ValueError("no secret")
        self.note("create")
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
        self.note("release")

class Says:
    def __init__(self, config, tool_schema):
        self.tool_schema = {"type": "function", "function": {"name": "says", "description": "Say."}}
'''
NUMBER = {"number": {"type": "integer", "description": "the guess."}}
PARAMETERS = {"type": "object", "properties": NUMBER, "required": ["number"]}
FUNCTION = {"name": "guess", "description": "Guess a number.", "parameters": PARAMETERS}
SCHEMA = {"type": "function", "function": FUNCTION}


@pytest.fixture
def written(tmp_path):
    """(entries of a file of verl's) -> the spec of its tools."""
    file, path = tmp_path / "my_tools.py", tmp_path / "tools.yaml"
    file.write_text(TOOLS)
    config = {"type": "native", "log": f"{tmp_path / 'log.jsonl'}"}
    guess = {"class_name": "FILE:Guess", "config": config, "tool_schema": SCHEMA}

    def write(entries=(guess, {"class_name": "FILE:Says", "config": {"type": "native"}})):
        path.write_text(yaml.safe_dump({"tools": list(entries)}).replace("FILE", str(file)))
        return FunctionSpec("verl_tools", {"path": str(path)})

    return write


def run_tools(spec, numbers, *, workers=0, secret=7):
    """Return the results of an episode's calls, and what there is at its end."""

    async def episode(pool):
        kwargs = {} if secret is None else {"create_kwargs": {"secret": secret}}
        row = EpisodeRow(0, extra_info={"tools_kwargs": {"guess": kwargs}})
        session = pool.open(0, row, 1, None)
        try:
            called = [await session.call(ToolCall("guess", {"number": n})) for n in numbers]
            return called, await session.end()
        finally:
            await session.close()

    with open_tools([spec], workers=workers) as pool:
        guess, says = pool.schemas
        assert guess == SCHEMA and says["function"]["name"] == "says"
        return asyncio.run(episode(pool))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tool_lives_as_long_as_its_episode(written, tmp_path, workers):
    assert run_tools(written(), [], workers=workers)[1].reward == 0.0
    assert not (tmp_path / "log.jsonl").exists(), "without a call there is none"
    called, end = run_tools(written(), [3, 100, 7], workers=workers)
    assert [each.text for each in called] == ["1:False", "error: ValueError: too large", "2:True"]
    assert [result.reward for result in called] == [-0.25, 0.0, -0.25]
    assert (end.reward, end.failure) == (4.0, None)
    assert (tmp_path / "log.jsonl").read_text().split() == ["create", "release"]
    called, _ = run_tools(written(), [1], workers=workers, secret=None)
    assert called[0].failure == "broken" and "no secret" in called[0].text


def test_what_does_not_fit_is_refused_at_the_start(written):
    for entries in (
        *([{"config": {}}], [{"class_name": "FILE:Gues"}]),
        [{"class_name": "FILE:Says", "config": {"type": "mcp"}}],
        [{"class_name": "FILE:Guess", "tool_schema": SCHEMA}],  # without a log
    ):
        with refuses("rollout.tools"):
            run_tools(written(entries), [1])
