"""What can't be run is refused in a line that names the key, before anything is made or trained."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.evaluate import main as evaluate_main
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.train import main as train_main
from jaxrl_llm.training import run as run_module
from tests.e2e.comparing import EVERY_SECOND, files, random_model
from tests.guarded import RUN
from tests.listening import serving_model
from tests.training.tokenizers import byte_level

pytestmark = pytest.mark.guards(*RUN)

OWN = Path(__file__).parents[1] / "own_models.py"
BY_TEACHER = "teacher.path=t; algorithm.advantage=reverse_kl; "
DISTILLED = "teacher.path=t; algorithm.distillation=forward_kl_divergence; "
STALE = "rollout.staleness=1; "
PLAIN = f"model.function={OWN}:Plain; model.random_init=true; mesh.rules={{{{mine: tensor}}}}; "

WITHOUT_A_MODEL = {
    "seeed=1": "'seeed'",
    "model.lora={{}}; model.adapter=x": "model.adapter",
    "model.lora={{}}; model.random_init=true": "model.random_init",
    "data.prepare.fn=arithmetics": "data.prepare: ",
    "data.prepare=null; data.train={root}/no.parquet": "data.train: ",
    "log.trackers={mine}:tracker_without_key": "log.trackers: ",
    # functions and what they ask for
    "reward.function=null": "nothing scores the answers",
    "reward.components=[acc]; reward.function=null; reward.classifier=c": "reward.components",
    "algorithm.loss=clip_cov": "algorithm.high_covariance ",
    "algorithm.advantage=[{{fn: grpo, weight: much}}]": "algorithm.advantage.weight: ",
    "algorithm.advantage=gdpo": "reward.components ",
    "algorithm.advantage={{fn: prime, beta: 0.5}}": "algorithm.advantage ",
    "reward.components=[acc]": "reward.components ",
    "critic.warmup_steps=2": "critic ",
    "algorithm.use_rollout_logprobs=true; algorithm.correction=[icepop]": "algorithm.",
    "algorithm.use_rollout_logprobs=true; algorithm.advantage=optimal_token_baseline": "sum_pi_sq",
    "algorithm.group_filter=with_spread; steps=null": "steps",
    # episodes and engines
    "rollout.engine=vllm; rollout.vllm.python=/nowhere/python": "/nowhere/python",
    "rollout.environment=guess_number; rollout.agent=one_answer": "`environment`",
    STALE + "algorithm.correction=[]": "older policies",
    STALE + "algorithm.loss=a3po": "algorithm.use_rollout_logprobs",
    STALE + "rollout.nodes=1; cluster={{nodes: 2}}": "rollout.",
    STALE + "rollout.at_push=keep; rollout.engine=vllm": "at_push",
    STALE + "rollout.turns=2; rollout.at_push=finish": "rollout.turns",
    STALE + "rollout.turns=2; rollout.engine=vllm": "rollout.turns",
    "rollout.staleness=0; rollout.schedule=x": "rollout.schedule",
    STALE + "algorithm.advantage=remax": "rollout.staleness",
    # models of one's own
    PLAIN + "model.lora={{rank: 4}}": "model.lora",
    PLAIN + "model.attention=cudnn": "model.attention",
    PLAIN + "model.remat=full": "model.remat",
    PLAIN + "mesh.train={{stage: 2}}": "mesh.train.stage",
    PLAIN + "rollout.engine=vllm": "rollout.engine",
    # teachers
    "algorithm.advantage=reverse_kl": "teacher.path ",
    "teacher.path=t": "teacher ",
    "algorithm.loss=null": "algorithm.loss ",
    "algorithm.distillation_coef=2.0": "algorithm.distillation_coef ",
    BY_TEACHER + "rollout.temperature=0.9; rollout.top_k=5": "rollout.temperature",
    BY_TEACHER + "teacher.top_k=4": "teacher.top_k ",
    BY_TEACHER + "teacher.url=u": "teacher.path and teacher.url ",
    BY_TEACHER + "teacher.tokenizer=t; rollout.tools=[calculator]": "teacher.tokenizer ",
    "teacher.url=u; teacher.max_tokens=9; algorithm.advantage=reverse_kl": "teacher.max_tokens ",
    "teacher.url=u; algorithm.distillation=forward_kl_divergence": "teacher.url ",
    DISTILLED + "algorithm.loss=null; algorithm.advantage=rloo": "algorithm.advantage",
    DISTILLED + "teacher.top_k=4; algorithm.distillation.temperature=2.0": "distillation.temper",
    DISTILLED + "teacher.path={{a: t}}": "teacher.path",
    DISTILLED + "teacher.tokenizer=t; teacher.top_k=4": "teacher.tokenizer ",
    DISTILLED + "mesh.teacher={{devices: 1}}": "mesh.teacher ",
}
WITH_THE_MODEL = {
    "model.path=nowhere": "model.path: ",
    "model.path={root}/truncated": "model.path: ",
    "model.adapter=/nowhere": "model.adapter: ",
    "model.router_loss_coef=0.01": "model.router_loss_coef",
    "data.max_prompt_tokens=300; batch.max_tokens_per_device=512": "data.max_prompt_tokens",
    "rollout.kv_cache_gb=1e-6": "rollout: ",
    "critic.path=nowhere; algorithm.advantage=gae": "critic.path: ",
    "critic.path={root}/few_places; algorithm.advantage=gae": "critic.path: ",
    "model.path={root}/critic": "model.path: ",
    PLAIN + "algorithm.advantage=gae": "critic.path: ",
    "model.lora={{rank: 2}}; algorithm.kl_loss=k3; offload.reference=true": "offload.reference",
    "reward.classifier={root}/scores; reward.step_rewards=true": "whole answers",
    "algorithm.advantage=reverse_kl; teacher.path={root}/other_teacher": "another tokenizer",
    "reward.classifier={root}/other; reward.render=ids": "has another tokenizer",
    "algorithm.distillation=forward_kl_divergence; teacher.path={base}; teacher.top_k=9999": "9999",
}


def check(refusals):
    """Assert that all of these end with status 2, and that their first lines hold the names."""
    wrong = {}
    for words, (result, name) in refusals.items():
        try:
            result.refused(name)
        except AssertionError as error:
            wrong[words] = error
    assert not wrong


def test_configs_are_refused_before_a_model_is_loaded_or_made(run, workshop, monkeypatch):
    loaded = Mock(side_effect=RunError("a model was loaded before the config was checked"))
    monkeypatch.setattr(run_module, "open_model", loaded)
    monkeypatch.setattr(run_module, "run_sft", loaded)
    warm = ("model.path=not_made_yet", f"model.warm_start={workshop.root}/sft.yaml")
    results = {}
    for words, name in WITHOUT_A_MODEL.items():
        given = workshop.words(words)
        is_new = any(word.startswith(("model.random_init", "model.function")) for word in given)
        results[words] = run(*(() if is_new else warm), *given), name
    check(results)
    assert not [x for x in results.values() if x[0].run_dir.exists()], "a refused run has no folder"


def other_tokens(folder, other):
    """Copy a model with a tokenizer in which two tokens have changed places."""
    shutil.copytree(folder, other)
    path = other / "tokenizer.json"
    tree = json.loads(path.read_text())
    tokens = tree["model"]["vocab"]
    tokens["1"], tokens["2"] = tokens["2"], tokens["1"]
    path.write_text(json.dumps(tree))


def test_models_that_do_not_fit_are_refused(run, workshop):
    root, like = workshop.root, workshop.base
    broken = shutil.copytree(like, root / "truncated") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    classifier = {"kind": "Qwen3ForSequenceClassification", "num_labels": 1}
    other_tokens(random_model(root / "scores", like, **classifier), root / "other")
    other_tokens(like, root / "other_teacher")
    random_model(root / "few_places", like, max_position_embeddings=8)
    random_model(root / "critic", like, kind="Qwen3ForTokenClassification", num_labels=1)
    check({w: (run(*workshop.words(w)), name) for w, name in WITH_THE_MODEL.items()})


def test_a_platform_that_jax_lacks_is_no_fault_of_the_optimizer(workshop, monkeypatch, capsys):
    words = ["--config", str(workshop.root / "train.yaml"), f"run_dir={workshop.folder()}"]
    for error in (AssertionError(), RuntimeError("no backend 'cuda'")):
        monkeypatch.setattr("jax.devices", Mock(side_effect=error))
        assert train_main(words) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"error: JAX_PLATFORMS={jax.config.jax_platforms}: ")


def test_a_config_that_is_missing_and_a_base_that_exists_are_refused(run, workshop):
    run(config="no.yaml").refused("no.yaml")
    sft = {"main": sft_main, "config": "sft.yaml"}
    run(**sft).refused("export_to: ")
    run("model.path=/no/model", "export_to=other", **sft).refused("model.path: ")
    tracker = f"log.trackers={workshop.mine('tracker_without_key')}"
    run("model.path=/no/model", tracker, **sft).refused("log.trackers: ", "mine.py", "'MY_KEY'")
    run("teacher.share=0.5", "export_to=other", **sft).refused("teacher ")
    random_model(workshop.root / "wide", workshop.base, vocab_size=300)
    (workshop.root / "wide/tokenizer.json").unlink()
    (workshop.root / "wide/tokenizer_config.json").unlink()
    wide = (f"teacher.path={workshop.root}/wide", "export_to=other")
    run(*wide, **sft).refused("no tokenizer", "vocab_size")


def test_a_run_is_not_continued_with_other_data_and_no_file_changes(
    run, workshop, finished, copy_of
):
    folder = copy_of(finished)
    path = folder / "config.yaml"
    rows = read_rows(workshop.data / "train.parquet")
    other = workshop.write_rows("fewer", rows[1:])
    path.write_text(path.read_text().replace(f"{workshop.data}/train.parquet", other))
    before = files(folder)
    words = ("steps=6", *EVERY_SECOND, f"data.train={other}", "data.prepare=null")
    run(*words, run_dir=folder).refused("data.train: its contents")
    assert files(folder) == before
    never = ("steps=4", *EVERY_SECOND, "checkpoint.resume=never")
    run(*never, run_dir=finished.run_dir).refused("checkpoint.resume")
    wrong = [rows[0], rows[1] | {"reward_model": {"style": "rule"}}]
    path = workshop.write_rows("malformed", wrong)
    run(f"data.train={path}").refused("data.train: ", f"{path}, row 1", "ground_truth")


def test_an_engine_that_disagrees_is_found_at_step_1(run):
    result = run("rollout.logprob_tolerance=1e-12")
    result.refused("step 1", "rollout.logprob_tolerance", status=1)
    assert result.steps == [0]


def test_a_teacher_on_a_server_with_other_tokens_is_found_before_the_first_step(run, workshop):
    tokenizer = byte_level(300)
    eos = tokenizer.eos_token_id
    folder = random_model(workshop.root / "bytes", workshop.base, vocab_size=304, eos_token_id=eos)
    tokenizer.save_pretrained(folder)
    words = ("algorithm.advantage=reverse_kl", "teacher.retries=0")
    with serving_model(folder) as (url, _):
        result = run(*words, f"teacher.url={url}")
    assert result.status and "teacher.tokenizer" in result.err
    run(*words, "teacher.url=http://127.0.0.1:9/v1").refused("127.0.0.1:9", status=1)


EVALUATIONS = {
    "out={root}/results": "results",
    "step=2": "is not a run",
    "max_new_tokens=250": "row 0",
    "max_prompt_tokens=1": "max_prompt_tokens",
    "model=/nowhere": "model: ",
    "vision=true": "vision",
}


def test_evaluations_that_can_not_be_run_are_refused(run, workshop):
    (workshop.root / "results").mkdir()
    (workshop.root / "results/metrics.json").write_text("{}")
    given = {"model": str(workshop.base), "data": f"{workshop.data}/validation.parquet"}
    workshop.write("evaluate.yaml", given | {"out": f"{workshop.root}/new", "max_new_tokens": 4})

    def main(words):
        return evaluate_main([word for word in words if not word.startswith("run_dir=")])

    how = {"config": "evaluate.yaml", "main": main}
    check({w: (run(*workshop.words(w), **how), name) for w, name in EVALUATIONS.items()})
