"""Environments of verifiers 0.1 over a chat: their messages, tools and scores."""

import json
import signal
import sys

import pytest

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.configs.tasks.verifiers import verifiers as write_rows
from jaxrl_llm.data.rows import normalize_prompt_row, read_rows
from jaxrl_llm.data.verifiers_rows import load_verifiers
from tests.episodes import Scripted, picture, play, prompt
from tests.tool_pools import open_tools

vf = pytest.importorskip("verifiers")

MINE = '''
import json

import verifiers as vf
from datasets import Dataset

events = []


def data(**columns):
    questions = ["a", "b", "c"]
    return Dataset.from_dict(
        {"question": questions, "answer": ["1", "2", "3"], "info": [{"n": i} for i in range(3)]}
    )


def solved(completion, answer, info, state):
    events.append(("scored", len(completion)))
    return float(completion[-1].content == answer) + info["n"]


class Asks(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 2

    async def env_response(self, messages, state, **kwargs):
        state["left"] -= 1
        if self.mode == "raises":
            raise vf.InfraError("no sandbox")
        if self.mode == "rewrites":
            messages[0].content = "other"
        if state["left"] == 0:
            state["final_env_response"] = []
            return []
        return [vf.UserMessage(content=f"{messages[-1].content}?")]

    @vf.cleanup
    async def ends(self, state):
        events.append("clean")


def load_environment(mode="asks", system=None):
    rubric = vf.Rubric(funcs=[solved])
    if mode == "tools":
        return vf.ToolEnv(dataset=data(), rubric=rubric, tools=[double], max_turns=3)
    if mode == "group":
        rubric = vf.Rubric(funcs=[lambda completions: [0.0 for _ in completions]])
    if mode == "none":
        return "no environment"
    return Asks(dataset=data, rubric=rubric, system_prompt=system, mode=mode)


def double(n: int) -> str:
    """Double a number.

    Args:
        n: the number.
    """
    return str(2 * n)
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """An installed package with environments."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def events(name):
    return sys.modules[name].events


def run(name, respond, *, args=None, tools=(), tokens=200, row=1, limits=None, info=None):
    """Return the episode of a row."""
    given = {"example_id": row, "answer": "12"[row], "info": json.dumps({"n": row})}
    keywords = {"id": name} | ({"args": args} if args else {})
    agent = FunctionSpec("verifiers_environment", keywords)
    prompts = [prompt("x", **(info or {"verifiers": json.dumps(given)}))]
    limits = {"broken_share": 1.0} | (limits or {})
    engine = Scripted(respond)
    (episode,) = play(
        engine, prompts, agent=agent, tools=tools, tokens=tokens, limits=limits
    ).episodes
    return episode


def counts(text, seed):
    return str(text.count("<|assistant|>"))


def test_an_environment_leads_an_episode_and_scores_it(mine):
    episode = run(mine, counts)
    assert picture(episode) == ["1<|end|>", "<<|user|>1?<|end|><|assistant|>>", "2<|end|>"]
    assert (episode.score, episode.finish, episode.error) == (2.0, "stop", None)
    assert events(mine) == ["clean", ("scored", 3)]


def test_a_limit_ends_it_and_it_is_scored_all_the_same(mine):
    episode = run(mine, lambda text, seed: "2", limits={"turns": 1})
    assert (episode.turns, episode.finish, episode.score) == (1, "turns", 2.0)
    assert events(mine) == ["clean", ("scored", 1)]


def test_its_tools_are_told_and_run_by_itself(mine):
    def respond(text, seed):
        if "<|tool|>" in text:
            return text.rsplit("<|tool|>", 1)[1].split("<|end|>")[0]
        return "[double(n=1)]"

    tools = [FunctionSpec("verifiers_tools", {"id": mine, "args": {"mode": "tools"}})]
    episode = run(mine, respond, args={"mode": "tools"}, tools=tools)
    assert picture(episode) == [
        "[double(n=1)]<|end|>",
        "<<|tool|>2<|end|><|assistant|>>",
        "2<|end|>",
    ]
    assert (episode.score, episode.error) == (2.0, None)
    with open_tools(tools, workers=0) as pool:
        (schema,) = pool.schemas
    assert schema["function"]["parameters"]["properties"]["n"]["type"] == "integer"


def test_a_wrong_call_is_answered_by_the_environment(mine):
    def respond(text, seed):
        return "2" if "<|tool|>" in text else "[double(n=]"

    tools = [FunctionSpec("verifiers_tools", {"id": mine, "args": {"mode": "tools"}})]
    episode = run(mine, respond, args={"mode": "tools"}, tools=tools)
    assert episode.turns == 2 and episode.error is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"args": {"mode": "raises"}}, r"InfraError\('no sandbox'\)"),
        ({"args": {"mode": "rewrites"}}, "'other'.* as message 0, expected .*'x'"),
        ({"args": {"mode": "tools"}}, r"rollout.tools: got \[\], expected \['double'\]"),
        ({"args": {"mode": "group"}}, "scores answers in groups"),
        ({"args": {"mode": "none"}}, "no environment|str"),
        ({"args": {"mood": "x"}}, "unexpected keyword argument 'mood'"),
        ({"info": {"a": 1}}, "expected rows of data.prepare"),
    ],
)
def test_what_does_not_fit_is_refused(mine, keys, message):
    with pytest.raises(RunError, match=message):
        run(mine, counts, **keys)


def test_its_rows_become_rows_of_the_data(mine, tmp_path):
    written = write_rows(tmp_path / "out", id=mine, args={"system": "be brief"}, validation_rows=2)
    assert {path.name: rows for path, rows in written.items()} == {
        "train.parquet": 3,
        "validation.parquet": 2,
    }
    rows = read_rows(tmp_path / "out" / "train.parquet")
    for row in rows:
        normalize_prompt_row(row)
    assert rows[1]["prompt"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "b"},
    ]
    assert rows[1]["reward_model"]["ground_truth"] == "2" and rows[1]["data_source"] == "verifiers"
    own = json.loads(rows[1]["extra_info"]["verifiers"])
    assert (own["example_id"], own["answer"], own["info"]) == (1, "2", {"n": 1})


def test_signals_stay_with_the_trainer(mine):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    load_verifiers(mine, "{}")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(ConfigError, match="no_such_environment"):
        load_verifiers("no_such_environment", "{}")
