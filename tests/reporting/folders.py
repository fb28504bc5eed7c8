"""Folders as runs leave them, without a training."""

import functools
import json

import numpy as np
import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxrl_llm.config.load import load, to_yaml
from jaxrl_llm.config.programs import TrainConfig


@functools.cache
def byte_tokenizer():
    """Return a tokenizer with a token for each byte, so that "ü" takes two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def step_line(step, **more):
    """Return a step's metrics as a run writes them."""
    score = 1 - 0.9 * np.exp(-step / 20)
    return {
        "step": step,
        **{"critic/score/mean": score, "critic/score/max": 1.0, "critic/score/min": 0.0},
        **{"response_length/mean": 12.0, "response_length/max": 20.0, "response_length/min": 4.0},
        **{"actor/entropy": 1.0 / step, "actor/grad_norm": 0.5 + 0.1 * (step % 2)},
        "training/rollout_logprobs_diff_mean": 1e-7,
        **{"timing_s/gen": 1.0, "timing_s/reward": 0.25, "timing_s/update_actor": 0.5},
        "timing_s/step": 2.0,
        **{"perf/cpu_memory_used_gb": 1.5, "perf/total_num_tokens": 100.0},
        **more,
    }


def kept_answer(text="4", **more):
    """Return a row of a dumped step; its tokens are the bytes of its text."""
    tokens = byte_tokenizer().encode(text).ids
    return {
        "prompt": json.dumps([{"role": "user", "content": "2+2="}]),
        "answer": text,
        "tokens": tokens,
        "turn_ids": [0] * len(tokens),
        "turn_rewards": [],
        "finish": "stop",
        "data_source": "sums",
        "ground_truth": '"4"',
        "score": 1.0,
        "extra": json.dumps({"acc": 1.0, "pred": text[:9]}),
        "error": None,
        "advantage": 0.5,
        "advantages": [0.5] * len(tokens),
        "logprobs": [-0.5] * len(tokens),
        "rollout_logprobs": [-0.625] * len(tokens),
        "entropies": [0.25] * len(tokens),
        **more,
    }


def write_run(folder, lines, *overrides, answers=None):
    """Write the folder of a run of the quickstart; `answers` has rows by step."""
    folder.mkdir(parents=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = load(TrainConfig, "quickstart", [f"model.path={folder}", *overrides])
    (folder / "config.yaml").write_text(to_yaml(config))
    write_lines(folder, lines)
    for step, rows in (answers or {}).items():
        (folder / "rollouts").mkdir(exist_ok=True)
        table = pyarrow.Table.from_pylist([{"step": step, **row} for row in rows])
        pyarrow.parquet.write_table(table, folder / "rollouts" / f"step_{step:06d}.parquet")
    return folder


def write_lines(folder, lines):
    """Append lines to a run's metrics."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
