import json
import signal
import sys

import pytest

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.configs.tasks.verifiers import verifiers as write_rows
from jaxrl_llm.data.rows import normalize_prompt_row, read_rows
from jaxrl_llm.data.verifiers_rows import load_verifiers
from tests.episodes import Scripted, picture, play, prompt
from tests.refusals import refuses

vf = pytest.importorskip("verifiers")

MINE = '''
import verifiers as vf
from datasets import Dataset
events = []

def data(**columns):
    info = [{"n": i} for i in range(3)]
    return Dataset.from_dict({"question": [*"abc"], "answer": [*"123"], "info": info})

def solved(completion, answer, info, state):
    events.append(("scored", len(completion)))
    return float(completion[-1].content == answer) + info["n"]

class Asks(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 2
    async def env_response(self, messages, state, **kwargs):
        state["left"] -= 1
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
    return Asks(dataset=data, rubric=rubric, system_prompt=system, mode=mode)

def double(n: int) -> str:
    """Double a number.\\n\\nArgs:\\n    n: the number."""
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


def run(name, respond, *, args=None, tools=(), limits=None):
    """Return the episode of a row."""
    given = json.dumps({"example_id": 1, "answer": "2", "info": json.dumps({"n": 1})})
    agent = FunctionSpec("verifiers_environment", {"id": name} | ({"args": args} if args else {}))
    keys = {"agent": agent, "tools": tools, "tokens": 200}
    keys["limits"] = {"broken_share": 1.0} | (limits or {})
    return play(Scripted(respond), [prompt("x", verifiers=given)], **keys).episodes[0]


def counts(text, seed):
    return str(text.count("<|assistant|>"))


def test_an_environment_leads_an_episode_and_scores_it(mine):
    episode = run(mine, counts)
    assert picture(episode) == ["1<|end|>", "<<|user|>1?<|end|><|assistant|>>", "2<|end|>"]
    assert (episode.score, episode.finish, episode.error) == (2.0, "stop", None)
    assert sys.modules[mine].events == ["clean", ("scored", 3)]
    episode = run(mine, lambda text, seed: "2", limits={"turns": 1})  # it is scored all the same
    assert (episode.turns, episode.finish, episode.score) == (1, "turns", 2.0)
    for args in ({"mode": "rewrites"}, {"mode": "tools"}, {"mood": "x"}):
        with pytest.raises(RunError):
            run(mine, counts, args=args)


def test_its_tools_are_told_and_run_by_itself(mine):
    def respond(text, seed):
        last = text.rsplit("<|tool|>", 1)
        return last[1].split("<|end|>")[0] if len(last) == 2 else "[double(n=1)]"

    tools = [FunctionSpec("verifiers_tools", {"id": mine, "args": {"mode": "tools"}})]
    episode = run(mine, respond, args={"mode": "tools"}, tools=tools)
    told = "<<|tool|>2<|end|><|assistant|>>"
    assert picture(episode) == ["[double(n=1)]<|end|>", told, "2<|end|>"]
    assert (episode.score, episode.error) == (2.0, None)


def test_its_rows_become_rows_of_the_data_and_signals_stay_with_the_trainer(mine, tmp_path):
    written = write_rows(tmp_path / "out", id=mine, args={"system": "be brief"}, validation_rows=2)
    assert sorted(written.values()) == [2, 3]
    rows = read_rows(tmp_path / "out" / "train.parquet")
    for row in rows:
        normalize_prompt_row(row)
    assert [message["content"] for message in rows[1]["prompt"]] == ["be brief", "b"]
    assert rows[1]["reward_model"]["ground_truth"] == "2" and rows[1]["data_source"] == "verifiers"
    own = json.loads(rows[1]["extra_info"]["verifiers"])
    assert (own["example_id"], own["answer"], own["info"]) == (1, "2", {"n": 1})
    before = signal.getsignal(signal.SIGTERM)
    load_verifiers(mine, "{}")
    assert signal.getsignal(signal.SIGTERM) == before
    with refuses():
        load_verifiers("no_such_environment", "{}")
