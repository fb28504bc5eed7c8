"""Runs of `prefer`: what they learn, write and refuse, and how they go on."""

from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers

from jaxrl_llm.cli import PREEMPTED
from jaxrl_llm.models.hf.config import read_scoring, read_spec
from jaxrl_llm.prefer import main as prefer_main
from jaxrl_llm.training.offline import PreferTrainer
from jaxrl_llm.training.run_files import read_run
from tests.e2e.comparing import encoded, exported, loaded, same
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/runs/")

LOG_TWO = pytest.approx(np.log(2), abs=1e-5)


@pytest.fixture(scope="module")
def prefer(workshop):
    """Run `prefer` on pairs of a right sum and the same sum with a digit more."""
    rows = {name: [] for name in ("pairs", "labelled", "chats", "given", "steps")}
    for row in pyarrow.parquet.read_table(workshop.data / "train.parquet").to_pylist():
        prompt, right = row["prompt"], str(row["reward_model"]["ground_truth"])
        pair = {"chosen": right, "rejected": right + "9"}
        rows["pairs"].append({"prompt": prompt, **pair})
        for side, text in pair.items():
            label = {"completion": text, "label": side == "chosen"}
            rows["labelled"].append({"prompt": prompt, **label})
        chats = {s: [*prompt, {"role": "assistant", "content": x}] for s, x in pair.items()}
        rows["chats"].append(chats)
        sums = {"ref_chosen_logps": -90.0, "ref_rejected_logps": 0.0}
        rows["given"].append({"prompt": prompt, **pair, **sums})
        steps = {"completions": [right, "9"], "labels": [True, False]}
        rows["steps"].append({"prompt": prompt, **steps})
    pairs = rows["pairs"]
    rows |= {"pairs": pairs[:48], "held": pairs[48:]}
    files = {name: workshop.write_rows(name, some) for name, some in rows.items()}
    tree = {"run_dir": "", "export_to": "", "steps": 4, "model": {"path": str(workshop.base)}}
    tree |= {"data": {"train": files["pairs"], "max_tokens": 16}, "log": {"trackers": []}}
    tree |= {"batch": {"pairs_per_step": 16, "max_tokens_per_device": 256}}
    tree |= {"optim": {"schedule": {"fn": "constant_schedule", "value": 3e-3}}}
    workshop.write("prefer.yaml", tree)

    def run(*words, run_dir=None):
        folder = run_dir or workshop.folder()
        words = (f"export_to={folder}.out", *words)
        return workshop(*words, main=prefer_main, config="prefer.yaml", run_dir=folder)

    run.files, run.pairs = files, pairs
    return run


@pytest.fixture(scope="module")
def finished(prefer):
    words = (f"data.validation={prefer.files['held']}", "checkpoint.every=2")
    return prefer("steps=4", "validation.every=2", *words).ok()


def test_dpo_begins_at_log_two_and_learns(finished):
    first, *_, last = (line for line in finished.metrics if "val/loss" in line)
    assert first["step"] == 0 and first["val/loss"] == LOG_TWO
    assert finished.metrics[1]["train/loss"] == LOG_TWO
    assert abs(finished.metrics[1]["train/rewards/margins"]) < 1e-5
    assert last["val/loss"] < 0.65 and last["val/rewards/accuracies"] > 0.7
    assert "held-out accuracy" in finished.out
    files = read_run(finished.run_dir)
    assert files.config.loss.fn == "dpo" and files.config.reference is None
    assert files.checkpoints[-1] == 4
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{finished.run_dir}.out")
    assert model.config.architectures == ["Qwen3ForCausalLM"]


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(prefer, finished, workshop, preempt):
    """It goes on after it has ended, with more steps, and after it was preempted."""
    words = (f"data.validation={prefer.files['held']}", "checkpoint.every=2", "validation.every=2")
    stopped = prefer("steps=2", *words).ok()
    more = ("steps=4", *words, f"export_to={stopped.run_dir}.more")
    preempt(PreferTrainer, 3)
    told = prefer(*more, run_dir=stopped.run_dir)
    assert told.status == PREEMPTED and "step 3 of 4" in told.err
    again = prefer(*more, run_dir=stopped.run_dir).ok()
    same(workshop.params(again.run_dir), workshop.params(finished.run_dir))
    assert again.learned == finished.learned


@pytest.mark.slow
def test_other_losses_forms_of_rows_and_an_adapter(prefer):
    labelled = f"data.train={prefer.files['labelled']}"
    steps = (f"data.train={prefer.files['steps']}", "data.step_separator=','")
    for words, begins in (
        (("loss={fn: simpo, gamma: 0.1}", f"data.train={prefer.files['chats']}"), None),
        (("loss=kto", labelled), None),
        (("loss=apo_zero_labelled", labelled), None),
        (("model.lora={rank: 2}", "loss={fn: dpo, beta: 0.5}"), LOG_TWO),
        (("loss=step_cross_entropy", *steps), LOG_TWO),
    ):
        first, *_, last = prefer(*words, "steps=3").ok().metrics
        assert last["train/loss"] < first["train/loss"]
        assert begins is None or first["train/loss"] == begins, "the reference is the base"
    (line,) = prefer(f"data.train={prefer.files['given']}", "steps=1").ok().metrics
    assert line["train/rewards/margins"] > 5, "the rows' reference finds the chosen unlikely"


def test_a_reward_model_learns_and_scores_in_transformers(prefer, workshop, tmp_path):
    result = prefer("loss={fn: bradley_terry, center_coef: 0.01}", "steps=12").ok()
    margins = [line["train/rewards/margins"] for line in result.metrics]
    assert margins[-1] > margins[0] + 0.1
    folder = Path(f"{result.run_dir}.out")
    assert read_spec(folder).reward_head and read_scoring(folder) == {"render": "answer"}
    again = exported(result.run_dir, tmp_path / "again")
    assert read_spec(again) == read_spec(folder) and read_scoring(again) == read_scoring(folder)
    tokenizer, model = loaded(folder, "SequenceClassification")
    pairs, scores = prefer.pairs[:16], []
    for pair in pairs:
        for side in ("chosen", "rejected"):
            answer = tokenizer(pair[side], add_special_tokens=False)["input_ids"]
            ids = encoded(folder, pair["prompt"], kind="SequenceClassification")
            ids = [*ids, *answer, tokenizer.eos_token_id]
            with torch.no_grad():
                scores.append(model(torch.tensor([ids])).logits.item())
    margin = np.mean(scores[::2]) - np.mean(scores[1::2])
    path = workshop.write_rows("scored", pairs)
    words = ("loss=bradley_terry", f"model.path={folder}", f"data.train={path}", "steps=1")
    (line,) = prefer(*words).ok().metrics
    assert line["train/rewards/margins"] == pytest.approx(margin, abs=1e-4)


REFUSED = {
    "loss=kto": "data.train: ",
    "loss=bradley_terry_margin": "'margins'",
    "loss=ppo_clip": "loss: ",
    "loss=bradley_terry; model.lora={{rank: 2}}": "loss: ",
    "batch.max_tokens_per_device=20": "batch.max_tokens_per_device",
    "data.max_tokens=4": "pairs.jsonl, row 0",
}
ROWS = {
    "the same answers": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "'rejected'": {"prompt": "a", "chosen": "b"},
    "'margin'": {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"},
    "last message": {
        "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "rejected": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
    },
}


def test_what_does_not_fit_is_refused_and_a_wrong_row_is_named(prefer, workshop):
    for words, name in REFUSED.items():
        prefer(*workshop.words(words)).refused(name)
    for what, row in ROWS.items():
        path = workshop.write_rows("wrong", [row])
        name = what if what.startswith("'") else "row 0"
        prefer(f"data.train={path}").refused(f"data.train: {path}, row 0", name)
