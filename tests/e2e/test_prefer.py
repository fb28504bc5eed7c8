"""Runs of `prefer`: what they learn, write and refuse, and how they go on."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers
import yaml

from jaxrl_llm import export
from jaxrl_llm.cli import PREEMPTED
from jaxrl_llm.models.hf.config import read_scoring, read_spec
from jaxrl_llm.prefer import main as prefer_main
from jaxrl_llm.training.offline import PreferTrainer
from jaxrl_llm.training.run_files import read_run
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/runs/")


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def prefer(workshop):
    """Run `prefer` on pairs of a right sum and the same sum with a digit more."""
    rows = pyarrow.parquet.read_table(workshop.data / "train.parquet").to_pylist()
    pairs = []
    for row in rows:
        right = str(row["reward_model"]["ground_truth"])
        wrong = right + "9"
        pairs.append({"prompt": row["prompt"], "chosen": right, "rejected": wrong})
    labelled = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs[:16]
        for side in ("chosen", "rejected")
    ]
    chats = [
        {side: [*pair["prompt"], *assistant(pair[side])] for side in ("chosen", "rejected")}
        for pair in pairs
    ]
    files = {"pairs": pairs[:48], "held": pairs[48:], "labelled": labelled, "chats": chats[:48]}
    for name, some in files.items():
        (workshop.root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    workshop.write(
        "prefer.yaml",
        {
            "run_dir": "",
            "export_to": "",
            "steps": 4,
            "model": {"path": str(workshop.base)},
            "data": {"train": str(workshop.root / "pairs.jsonl"), "max_tokens": 16},
            "optim": {"schedule": {"fn": "constant_schedule", "value": 3e-3}},
            "batch": {"pairs_per_step": 16, "max_tokens_per_device": 256},
            "log": {"trackers": []},
        },
    )

    def run(*words, run_dir=None):
        folder = run_dir or workshop.folder()
        words = (f"export_to={folder}.out", *words)
        return workshop(*words, main=prefer_main, config="prefer.yaml", run_dir=folder)

    run.files = {name: str(workshop.root / f"{name}.jsonl") for name in files}
    return run


@pytest.fixture(scope="module")
def finished(prefer):
    words = (f"data.validation={prefer.files['held']}", "checkpoint.every=2")
    return prefer("steps=4", "validation.every=2", *words).ok()


def test_dpo_begins_at_log_two_and_learns(finished):
    first, *_, last = (line for line in finished.metrics if "val/loss" in line)
    assert first["step"] == 0 and first["val/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert finished.metrics[1]["train/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert abs(finished.metrics[1]["train/rewards/margins"]) < 1e-5
    assert last["val/loss"] < 0.65 and last["val/rewards/accuracies"] > 0.7
    assert "held-out accuracy" in finished.out


def test_its_files_are_a_runs(finished):
    files = read_run(finished.run_dir)
    assert files.config.loss.fn == "dpo" and files.checkpoints[-1] == 4
    exported = transformers.AutoModelForCausalLM.from_pretrained(f"{finished.run_dir}.out")
    assert exported.config.architectures == ["Qwen3ForCausalLM"]


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(
    prefer, finished, workshop, same, preempt
):
    """It goes on after it has ended, with more steps, and after it was preempted."""
    words = (f"data.validation={prefer.files['held']}", "checkpoint.every=2", "validation.every=2")
    stopped = prefer("steps=2", *words).ok()
    more = ("steps=4", *words, f"export_to={stopped.run_dir}.more")
    preempt(PreferTrainer, 3)
    told = prefer(*more, run_dir=stopped.run_dir)
    assert told.status == PREEMPTED and "saved after step 3 of 4" in told.err
    again = prefer(*more, run_dir=stopped.run_dir).ok()
    same(workshop.params(again.run_dir), workshop.params(finished.run_dir))
    assert again.learned == finished.learned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "rows"),
    [("{fn: simpo, gamma: 0.1}", "chats"), ("kto", "labelled"), ("apo_zero_labelled", "labelled")],
)
def test_other_losses_and_forms_of_rows(prefer, loss, rows):
    words = f"data.train={prefer.files[rows]}", "steps=3"
    lines = prefer(f"loss={loss}", *words).ok().metrics
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]


@pytest.mark.slow
def test_an_adapter_is_measured_against_its_base(prefer):
    result = prefer("model.lora={rank: 2}", "loss={fn: dpo, beta: 0.5}", "steps=3").ok()
    assert result.metrics[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert result.metrics[-1]["train/loss"] < np.log(2)


@pytest.mark.slow
def test_rows_may_bring_the_references_log_probs(prefer, workshop):
    """Those of a reference that finds all chosen answers unlikely: the loss begins below log 2."""
    rows = rows_of(prefer.files["pairs"])
    rows = [row | {"ref_chosen_logps": -90.0, "ref_rejected_logps": 0.0} for row in rows]
    (workshop.root / "given.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = prefer(f"data.train={workshop.root / 'given.jsonl'}", "steps=1").ok()
    assert result.metrics[0]["train/rewards/margins"] > 5
    assert "under the reference" not in result.err


@pytest.mark.slow
def test_a_reward_model_scores_as_transformers_does(prefer, workshop, tmp_path):
    result = prefer("loss={fn: bradley_terry, center_coef: 0.01}", "steps=12").ok()
    margins = [line["train/rewards/margins"] for line in result.metrics]
    assert margins[-1] > margins[0] + 0.1
    folder = f"{result.run_dir}.out"
    assert read_spec(folder).reward_head and read_scoring(folder) == {"render": "answer"}
    again = export.main([str(result.run_dir), str(tmp_path / "again")])
    assert again == 0 and read_spec(tmp_path / "again") == read_spec(folder)
    assert read_scoring(tmp_path / "again") == read_scoring(folder)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.config.pad_token_id != tokenizer.eos_token_id
    ours = prefer_scores(result, workshop)
    rows = rows_of(prefer.files["pairs"])[:4]
    for row, scores in zip(rows, ours, strict=True):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )
        for side, score in zip(("chosen", "rejected"), scores, strict=True):
            answer = tokenizer(row[side], add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
            with torch.no_grad():
                assert theirs(ids).logits.item() == pytest.approx(score, abs=1e-4)


def prefer_scores(result, workshop):
    """Score the first pairs with the exported model by this library's forward pass."""
    import jax.numpy as jnp

    from jaxrl_llm.data.chat import load_tokenizer
    from jaxrl_llm.data.dataset import preference_batch, tokenize_preferences
    from jaxrl_llm.data.packing import pack_rows, row_shape
    from jaxrl_llm.data.rows import normalize_preference_row
    from jaxrl_llm.models.decoder import Decoder
    from jaxrl_llm.models.hf.load import load_params

    folder = f"{result.run_dir}.out"
    spec = read_spec(folder)
    rows = rows_of(workshop.root / "pairs.jsonl")[:4]
    items, _ = tokenize_preferences(
        [normalize_preference_row(row) for row in rows], load_tokenizer(folder), max_tokens=16
    )
    batch = preference_batch(items, 32)
    packed = pack_rows(
        batch.tokens,
        batch.sequence_lengths,
        [[0], [1], [2], [3]],
        row_shape(128, 32, sequences=4),
        None,
        batch["second_start"],
    )
    model, params = Decoder(spec), load_params(folder, spec)
    hidden, _ = model.hidden_states(
        params, *map(jnp.asarray, packed[:3]), dtype="float32", remat="none", layout=None
    )
    row, start, size = map(jnp.asarray, packed.places)
    second = jnp.asarray(batch["second_start"])
    chosen = model.sequence_scores(params, hidden, row, start, second)
    rejected = model.sequence_scores(params, hidden, row, start + second, size - second)
    return np.stack(jax.device_get((chosen, rejected)), axis=1).tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["loss=kto"],
            r"data.train: loss 'kto' is of answers with a label, but the rows are pairs",
        ),
        (["loss=bradley_terry_margin"], r"asks for 'margins', but the rows have no such column"),
        (["loss=ppo_clip"], r"loss: .*ppo_clip"),
        (["loss=bradley_terry", "model.lora={rank: 2}"], r"whose head an adapter can't hold"),
        (["batch.max_tokens_per_device=20"], r"can't hold the longest pair: twice data.max_tokens"),
        (["data.max_tokens=4"], r"data.train: .*pairs.jsonl, row 0: expected at most max_tokens=4"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(prefer, words, message):
    result = prefer(*words)
    assert result.status == 2 and len(result.err.strip().splitlines()[-1]) < 300
    line, *more = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert not more or ", row 1: " in more[0]
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same answer"),
        ({"prompt": "a", "chosen": "b"}, "field 'rejected': expected a non-empty string"),
        ({"prompt": "a", "completion": "b", "label": 1}, "field 'label': expected true or false"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "field 'prompt': expected a list"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"},
            "field 'margin': expected a finite number",
        ),
        (
            {"chosen": [*user("a"), *assistant("b")], "rejected": [*user("c"), *assistant("d")]},
            "expected chats that differ in their last message",
        ),
    ],
)
def test_a_wrong_row_is_named(prefer, workshop, row, message):
    path = workshop.root / "wrong.jsonl"
    path.write_text(json.dumps(row))
    result = prefer(f"data.train={path}")
    assert result.status == 2
    assert f"data.train: {path}, row 0" in result.err and message in result.err


def test_the_config_of_a_run_comes_back(finished):
    tree = yaml.safe_load((finished.run_dir / "config.yaml").read_text())
    assert tree["loss"]["fn"] == "dpo" and tree["reference"] is None
