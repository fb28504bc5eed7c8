"""A run whose environment shows images: what the trainer reads is what the engine has read."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.guarded import UPDATE

pytestmark = [pytest.mark.slow, pytest.mark.guards(*UPDATE, "jaxrl_llm/rollout/")]
MODEL = Path(__file__).parents[2] / "configs" / "vision" / "model"
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
FUNCTIONS = '''
import numpy as np

from jaxrl_llm.rollout import Observation


def shows_images(rng):
    """Show an image first, and one or two behind each of two turns."""

    def image():
        side = 16 * rng.randint(1, 2)
        return np.array([rng.randrange(256) for _ in range(3 * 16 * side)], np.uint8).reshape(
            16, side, 3
        )

    answer = yield Observation([image(), "look"])
    answer = yield Observation(["a", image()], reward=len(answer) / 8)
    answer = yield Observation([image(), "b", image(), "c"], reward=0.5)
    return float(len(answer))


async def forgets(chat, environment):
    """Begin a chain after each turn, with what was seen last and the row's prompt."""
    seen = {"role": "user", "content": await environment.begin()}
    while True:
        chat = chat.new(chat.prompt.messages)
        chat.append(seen)
        answer = await chat.generate()
        seen = {"role": "user", "content": await environment.step(answer.text)}


def score(data_source, solution_str, ground_truth, extra_info):
    return extra_info["environment_score"] or 0.0
'''


def test_an_update_reads_the_images_that_environments_show(workshop):
    folder = workshop.root / "seeing_model"
    shutil.copytree(MODEL, folder)
    shape = json.loads((folder / "config.json").read_text())
    shape["text_config"] |= TEXT
    shape["vision_config"] |= TOWER
    (folder / "config.json").write_text(json.dumps(shape))
    functions = workshop.root / "showing.py"
    functions.write_text(FUNCTIONS)
    tree = {
        "base": "train.yaml",
        "steps": 1,
        "model": {"path": str(folder), "random_init": True, "vision": "trained"},
        "data": {"max_prompt_tokens": 40},
        "rollout": {
            "environment": {"fn": f"{functions}:shows_images"},
            "limits": {"turn_tokens": 4, "turns": 3},
            "max_new_tokens": 60,
            "dump_every": 1,
        },
        "reward": {"function": f"{functions}:score"},
        "algorithm": {"advantage": "grpo_turns"},
        "validation": {"before": False},
    }
    workshop.write("showing.yaml", tree)
    agent, few = f"rollout.agent.fn={functions}:forgets", "batch.max_visual_tokens_per_device=7"
    for words, chains in (([], 1), ([agent], 3), ([few], 1)):  # few: 5 for a sequence
        result = workshop(*words, config="showing.yaml").ok()
        line = result.metrics[-1]
        assert line["training/rollout_logprobs_diff_mean"] < 1e-4
        assert line["actor/grad_norm"] > 0 and line["episode/broken"] == 0
        assert line.get("episode/chains/mean", 1) == chains
        assert (line.get("episode/finish/length", 0.0) > 0) == (few in words)
        table = pyarrow.parquet.read_table(result.run_dir / "rollouts/step_000001.parquet")
        assert len(table) == 32
