import json
import signal

import pytest

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.configs.tasks.verifiers import verifiers as write_rows
from jaxrl_llm.data.rows import read_rows
from tests.episodes import Scripted, picture, play, prompt

pytest.importorskip("verifiers")

MINE = '''
import verifiers as vf
from datasets import Dataset

def solved(completion, answer):
    return float(completion[-1].content == answer)

def double(n: int) -> str:
    """Double a number.\\n\\nArgs:\\n    n: the number."""
    return str(2 * n)

def load_environment(system=None):
    dataset = Dataset.from_dict({"question": [*"abc"], "answer": [*"123"]})
    rubric = vf.Rubric(funcs=[solved])
    return vf.ToolEnv(dataset=dataset, rubric=rubric, tools=[double], system_prompt=system)
'''


def respond(text, seed):
    """Call the tool, and answer with what it said."""
    last = text.rsplit("<|tool|>", 1)
    return last[1].split("<|end|>")[0] if len(last) == 2 else "[double(n=1)]"


def test_an_environment_gives_rows_tells_its_tools_and_scores_an_episode(tmp_path, monkeypatch):
    name, before = f"mine_{tmp_path.name}", signal.getsignal(signal.SIGTERM)
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    written = write_rows(tmp_path / "out", id=name, args={"system": "be brief"}, validation_rows=2)
    assert sorted(written.values()) == [2, 3]
    row = read_rows(tmp_path / "out" / "train.parquet")[1]
    assert [message["content"] for message in row["prompt"]] == ["be brief", "b"]
    given = row["extra_info"]["verifiers"]
    assert (json.loads(given)["example_id"], json.loads(given)["answer"]) == (1, "2")

    tools = [FunctionSpec("verifiers_tools", {"id": name})]
    agent = FunctionSpec("verifiers_environment", {"id": name})
    keys = {"agent": agent, "tokens": 200, "limits": {"broken_share": 1.0}}
    prompts = [prompt("x", verifiers=given)]
    (episode,) = play(Scripted(respond), prompts, tools=tools, **keys).episodes
    told = "<<|tool|>2<|end|><|assistant|>>"
    assert picture(episode) == ["[double(n=1)]<|end|>", told, "2<|end|>"]
    assert (episode.score, episode.error) == (1.0, None)
    with pytest.raises(RunError):  # its tools are not those of the run
        play(Scripted(respond), prompts, **keys)
    assert signal.getsignal(signal.SIGTERM) == before, "the trainer's own"
