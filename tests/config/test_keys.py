import dataclasses

import jax.numpy as jnp
import pytest

from jaxrl_llm.algorithms.pairs import Pairs
from jaxrl_llm.config.load import apply_override, describe, from_tree, load
from jaxrl_llm.config.programs import EvaluateConfig, PreferConfig, SftConfig, TrainConfig, divisors
from jaxrl_llm.config.sections import ValidationConfig
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.load_model import model_spec
from tests.config.example import leaves
from tests.refusals import refuses

FOLDERS = {"run_dir": "runs/a", "model.path": "m", "data.train": "t.parquet"}
NEEDED = {TrainConfig: FOLDERS, SftConfig: {**FOLDERS, "export_to": "runs/a/model"}}
NEEDED |= {EvaluateConfig: {"model": "m", "data": "d.parquet"}, PreferConfig: NEEDED[SftConfig]}


def build_with(cls, *overrides):
    tree = {}
    needed = [f"{key}={value}" for key, value in NEEDED[cls].items()]
    for override in (*needed, *overrides):
        apply_override(tree, override)
    return from_tree(cls, tree)


@pytest.mark.parametrize("cls", [TrainConfig, SftConfig])
def test_every_key_is_described_once_with_its_default(cls):
    rows = describe(cls)
    assert sorted(name for name, _, _ in rows) == sorted(leaves(cls))
    tree = {}
    for name, default, meaning in rows:
        assert len(meaning) > 10 and default and "\n" not in default + meaning, name
        apply_override(tree, f"{name}={NEEDED[cls][name] if default == '(required)' else default}")
    assert from_tree(cls, tree) == build_with(cls)
    assert {name for name, default, _ in rows if default == "(required)"} == set(NEEDED[cls])
    for name in NEEDED[cls]:
        del (tree[name.split(".")[0]] if "." in name else tree)[name.split(".")[-1]]
    with refuses(*NEEDED[cls]):
        from_tree(cls, tree)


def test_profiled_steps_are_steps_of_the_run():
    assert build_with(SftConfig, "log.profile_steps=5").log.profile_steps == (5,)
    assert build_with(SftConfig, "log.profile_steps=[5, 3]", "steps=5").log.profile_steps == (5, 3)
    for wrong in ("[5, 3]", "1.5", "true", "[last]", "[null]", "[2, 0]"):
        with refuses("log.profile_steps"):
            build_with(SftConfig, f"log.profile_steps={wrong}", "steps=4")


BATCH = "batch.max_tokens_per_device"
WRONG = {
    TrainConfig: {
        "batch.prompts_per_minibatch=-8": "batch.prompts_per_minibatch",
        "batch.prompts_per_step=12 batch.prompts_per_minibatch=8": "batch.prompts_per_step",
        f"{BATCH}=1023": BATCH,
        f"seed={2**32}": "seed",
        "validation.every=-1": "validation.every",
        "validation.every=5": "validation.every",
        "validation.samples=4": "validation.samples",
        "algorithm.kl_loss=k3 algorithm.kl_reward=k1": "algorithm.kl_loss",
        "rollout.samples_per_prompt=0": "rollout.samples_per_prompt",
        "rollout.top_p=1.1": "rollout.top_p",
        "rollout.top_k=-1": "rollout.top_k",
        "rollout.kv_cache_dtype=int4": "rollout.kv_cache_dtype",
        "rollout.kv_cache_dtype=fp8": "rollout.kv_cache_dtype",
        "rollout.kv_cache_dtype=int8 rollout.engine=vllm": "rollout.kv_cache_dtype",
        "reward.workers=-1": "reward.workers",
    },
    SftConfig: {
        "steps=0": "steps",
        "model.attention=flash": "model.attention",
        "optim.grad_clip=0": "optim.grad_clip",
        "data.train=[]": "data.train",
        "data.max_tokens=0": "data.max_tokens",
        "log.profile_steps=-1": "log.profile_steps",
        "mesh.train.devices=0": "mesh.train.devices",
        "mesh.train.data=0": "mesh.train",
        "mesh.train.tensor=-1": "mesh.train",
        "mesh.context_by=rows": "mesh.context_by",
        f"{BATCH}=1023": BATCH,
        "export_to=runs/../runs/a": "export_to",
        "model.vision=frozen teacher.path=t": "teacher.path",
    },
    PreferConfig: {"model.vision=frozen": "model.vision"},
    EvaluateConfig: {
        "samples=2 temperature=0": "samples",
        "samples=2 temperature=1 k=[3]": "k",
        "k=[0]": "k",
    },
}


def test_values_out_of_range_and_contradictions_are_named(subtests):
    for cls, overrides in WRONG.items():
        for words, key in overrides.items():
            with subtests.test(f"{cls.__name__} {words}"), refuses(key):
                build_with(cls, *words.split())


def test_all_contradictions_are_reported_at_once():
    wrong = ["validation.every=5", "model.random_init=true", "model.adapter=a", "rollout.devices=2"]
    with refuses("validation.every", "model.random_init", "rollout.devices"):
        build_with(TrainConfig, *wrong)


def test_records_made_directly_are_checked_too():
    config = build_with(TrainConfig)
    with refuses("steps"):
        dataclasses.replace(config, steps=0)
    with refuses("evry"):
        ValidationConfig(evry=5)  # pyright: ignore[reportCallIssue]
    with refuses("run_dir"):
        TrainConfig(model=config.model, data=config.data)  # pyright: ignore[reportCallIssue]


def test_the_edges_are_allowed():
    for overrides in [
        ["batch.prompts_per_step=12", "batch.prompts_per_minibatch=6"],
        ["batch.max_tokens_per_device=1024"],
        ["validation.every=5", "data.validation=v.parquet"],
        ["rollout.top_p=1", "validation.temperature=0", "reward.workers=0"],
        ["optim.grad_clip=null", "steps=1", "checkpoint.resume=never", "model.dtype=bfloat16"],
        ["mesh.train.devices=4", "mesh.rollout.first_device=4", "mesh.context_by=keys"],
        ["mesh.critic={fsdp: 1, data: -1}", "mesh.reference={tensor: 8}"],
    ]:
        assert build_with(TrainConfig, *overrides) != build_with(TrainConfig), overrides
    for n in (1, 2, 12, 13, 64):
        assert divisors(n) == sorted({d for d in range(1, 65) for e in range(1, 65) if d * e == n})


FROZEN = {"model.vision": "frozen"}
PAIRS = {"algorithm.pairs": "best_and_worst", "algorithm.pair_loss": "dpo"}


def of_scores(scores):
    return scores


def one_too_many(scores):
    place = jnp.arange(scores.shape[0])
    return Pairs(place, place[1:], place > 0)


def one_number(chosen_logps):
    return chosen_logps.mean()


NO_USE_OF_PAIRS = {
    **{"advantage": "rloo", "loss": "reinforce", "reduce": "token_sum", "kl_loss": "k3"},
    **{"kl_reward": "k1", "kl_coef": 0.5, "kl_controller": "adaptive", "entropy_coef": 0.1},
    **{"correction": [], "use_rollout_logprobs": True, "high_covariance": "select_kl_cov"},
    "answer_filter": "best_of_group",
}
REFRESH = {"algorithm.kl_loss": "k3", "reference.refresh_every": 2, "reference.mix": 0.5}
TOGETHER = [
    *((FROZEN | {key: 2}, key) for key in ("mesh.train.context", "mesh.critic.stage")),
    *((FROZEN | {key: "t"}, key) for key in ("teacher.path", "critic.path", "reward.classifier")),
    (FROZEN | {"implicit_reward_model.path": "c"}, "implicit_reward_model.path"),
    (FROZEN | PAIRS, "algorithm.pairs"),
    (FROZEN | {"model.random_init": True}, "model.vision"),
    ({"model.vision": "trained", "model.lora.rank": 4}, "model.vision"),
    (FROZEN | {"batch.max_visual_tokens_per_device": 10**6}, "batch.max_visual_tokens_per_device"),
    ({"batch.max_visual_tokens_per_device": 8}, "batch.max_visual_tokens_per_device"),
    (FROZEN | {"model.function": "m.py:make"}, "model.vision"),
    ({"algorithm.pairs": "best_and_worst"}, "algorithm.pairs"),
    ({"algorithm.pair_loss": "dpo"}, "algorithm.pair_loss"),
    *((PAIRS | {f"algorithm.{key}": v}, f"algorithm.{key}") for key, v in NO_USE_OF_PAIRS.items()),
    (PAIRS | {"critic.warmup_steps": 2}, "critic"),
    (PAIRS | {"rollout.samples_per_prompt": 1}, "rollout.samples_per_prompt"),
    (PAIRS | {BATCH: 31}, BATCH),
    *(
        (PAIRS | {"algorithm.pair_loss": loss}, "algorithm.pair_loss")
        for loss in ("kto", "bradley_terry", "ppo_clip", one_number)
    ),
    *((PAIRS | {"algorithm.pairs": f}, "algorithm.pairs") for f in (of_scores, one_too_many)),
    ({"algorithm.answer_filter": of_scores}, "algorithm.answer_filter"),
    ({"reference.mix": 0.5}, "reference.mix"),
    ({"reference.refresh_every": 2}, "reference.refresh_every"),
    (
        PAIRS | {"algorithm.pair_loss": "simpo", "reference.refresh_every": 2},
        "reference.refresh_every",
    ),
    (REFRESH | {"model.lora.rank": 2}, "reference.mix"),
]


def resolved(keys):
    return resolve_functions(load(TrainConfig, "quickstart", keys))


def test_what_does_not_go_together_is_refused(subtests):
    for keys, key in TOGETHER:
        with subtests.test(str(keys)), refuses(key):
            resolved(keys)


def test_a_model_of_text_has_no_tower():
    sees = load(SftConfig, "quickstart_sft", FROZEN | {"model.random_init": False})
    assert sees.model.vision == "frozen"
    config = load(TrainConfig, "quickstart", FROZEN | {"model.path": "configs/agents/model"})
    with pytest.raises(ValueError, match="vision"):
        model_spec(config.model)


def test_what_pairs_ask_for_decides_the_models_of_a_run():
    functions = resolved(PAIRS)
    assert functions.needs_reference and functions.probes_only and not functions.on_policy
    assert not resolved(PAIRS | {"algorithm.pair_loss": "orpo"}).needs_reference
    filtered = {"algorithm.answer_filter": "best_of_group"}
    assert not resolved(filtered).probes_only, "ppo_clip asks for the old log-probs"
    assert resolved(filtered | {"algorithm.loss": "negative_log_likelihood"}).probes_only
    # answers of other engines and of older policies are taken as they are
    assert resolved(PAIRS | {"rollout.staleness": 1}).corrections == ()
    assert resolved({"rollout.staleness": 1}).corrections != ()
