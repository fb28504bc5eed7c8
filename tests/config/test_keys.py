"""The keys of a run: defaults, contradictions, and the ready configs."""

import dataclasses
import typing
from pathlib import Path

import pytest
import yaml

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import apply_override, describe, from_tree, load, read_yaml, to_yaml
from jaxrl_llm.config.programs import SftConfig, TrainConfig, divisors
from jaxrl_llm.config.sections import ValidationConfig
from jaxrl_llm.train import main as train_main

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
TRAIN = {"run_dir": "runs/a", "model": {"path": "m"}, "data": {"train": "t.parquet"}}
SFT = {**TRAIN, "export_to": "runs/a/model"}


def build_with(cls, *overrides):
    tree = build_tree(cls)
    for override in overrides:
        apply_override(tree, override)
    return from_tree(cls, tree)


def build_tree(cls):
    base = TRAIN if cls is TrainConfig else SFT
    return {k: dict(v) if isinstance(v, dict) else v for k, v in base.items()}


def refusal(cls, *overrides):
    with pytest.raises(ConfigError) as caught:
        build_with(cls, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------- description


@pytest.mark.parametrize("cls", [TrainConfig, SftConfig])
def test_every_key_is_described_once(cls):
    rows = describe(cls)
    names = [name for name, _, _ in rows]
    assert sorted(names) == sorted(leaves(cls))
    assert len(set(names)) == len(names)
    for name, default, meaning in rows:
        assert len(meaning) > 10, name
        assert default, name
        assert "\n" not in default + meaning, name


@pytest.mark.parametrize(
    ("cls", "missing"), [(TrainConfig, "run_dir data.train"), (SftConfig, "export_to model.path")]
)
def test_required_keys(cls, missing):
    expected = {name for name, default, _ in describe(cls) if default == "(required)"}
    assert expected == set(leaves_of(build_tree(cls)))
    for name in missing.split():
        tree = build_tree(cls)
        *groups, leaf = name.split(".")
        del (tree[groups[0]] if groups else tree)[leaf]
        with pytest.raises(ConfigError, match=f"^{name} is missing: "):
            from_tree(cls, tree)


@pytest.mark.parametrize("cls", [TrainConfig, SftConfig])
def test_the_defaults_shown_are_the_defaults(cls):
    config = build_with(cls)
    tree = build_tree(cls)
    for name, default, _ in describe(cls):
        if default != "(required)":
            apply_override(tree, f"{name}={default}")
    assert from_tree(cls, tree) == config


def leaves(cls, prefix=""):
    """List the dotted names of a config class's keys."""
    names = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and hint is not FunctionSpec:
            names += leaves(hint, f"{prefix}{field.name}.")
        else:
            names.append(prefix + field.name)
    return names


def leaves_of(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name


# ---------------------------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.samples_per_prompt=0", "1 or more"),
        ("rollout.max_new_tokens=0", "1 or more"),
        ("rollout.max_running_sequences=0", "1 or more"),
        ("batch.prompts_per_step=0", "1 or more"),
        ("batch.prompts_per_minibatch=0", "1 or more, or null"),
        ("batch.prompts_per_minibatch=-8", "1 or more, or null"),
        ("batch.epochs_per_step=0", "1 or more"),
        ("data.max_prompt_tokens=0", "1 or more"),
        ("validation.samples=0", "1 or more"),
        ("validation.rows=-1", "1 or more, or null"),
        ("validation.every=-1", "0 or more"),
        ("validation.temperature=-0.5", "0 or more"),
        ("reward.workers=-1", "0 or more"),
        ("rollout.dump_every=-1", "0 or more"),
        ("rollout.top_k=-1", "0 or more"),
        ("algorithm.kl_coef=-0.1", "0 or more"),
        ("rollout.temperature=0", "a number above 0"),
        ("reward.timeout_s=0", "a number above 0"),
        ("reward.memory_gb=0", "a number above 0, or null"),
        ("reward.max_processes=0", "a number above 0, or null"),
        ("rollout.top_p=0", "a number above 0"),
        ("rollout.top_p=1.1", "1 or less"),
        ("validation.top_p=-1", "a number above 0"),
    ],
)
def test_values_out_of_range(override, expected):
    name, value = override.split("=")
    message = refusal(TrainConfig, override)
    assert message.startswith(f"{name}: expected {expected}")
    assert f", got {yaml.safe_load(value)} (" in message


@pytest.mark.parametrize("cls", [TrainConfig, SftConfig])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=0", "steps: expected 1 or more, or null, got 0 (int)"),
        ("epochs=0", "epochs: expected 1 or more, got 0 (int)"),
        ("seed=-1", "seed: expected 0 or more, got -1 (int)"),
        ("model.logprob_chunk=0", "model.logprob_chunk: expected 1 or more, got 0 (int)"),
        ("model.attention=flash", "model.attention: expected auto, xla or cudnn, got 'flash'"),
        ("checkpoint.keep=0", "checkpoint.keep: expected 1 or more, got 0 (int)"),
        ("checkpoint.every=-1", "checkpoint.every: expected 0 or more, got -1 (int)"),
        ("optim.max_skipped=-1", "optim.max_skipped: expected 0 or more, got -1 (int)"),
        ("optim.grad_clip=0", "optim.grad_clip: expected a number above 0, or null, got 0 (int)"),
        ("model.dtype=float16", "model.dtype: expected float32 or bfloat16, got 'float16' (str)"),
        ("checkpoint.resume=always", "checkpoint.resume: expected auto or never, got 'always'"),
        ("log.profile_steps=[2, 0]", "got [2, 0], but 0 is not a step of the run"),
        ("log.profile_steps=-1", "got [-1], but -1 is not a step of the run"),
        ("data.train=[]", "data.train: expected at least one, got"),
        (
            "mesh.train.data=0",
            "mesh.train: expected sizes of 1 or more, at most one of them -1, got stage=1, "
            "expert=1, data=0, fsdp=-1, context=1, tensor=1",
        ),
        ("mesh.train.tensor=-1", "fsdp=-1, context=1, tensor=-1"),
        ("mesh.train.tensor=-2", "expected sizes of 1 or more"),
        ("mesh.train.devices=0", "mesh.train.devices: expected 1 or more, or null, got 0"),
        ("mesh.train.first_device=-1", "mesh.train.first_device: expected 0 or more, got -1"),
        ("mesh.context_by=rows", "mesh.context_by: expected heads, keys or ring, got 'rows' (str)"),
    ],
)
def test_values_out_of_range_in_the_shared_groups(cls, override, expected):
    assert refusal(cls, override).startswith(expected) or expected in refusal(cls, override)


@pytest.mark.parametrize("cls", [TrainConfig, SftConfig])
def test_profiled_steps_are_steps_of_the_run(cls):
    assert build_with(cls, "log.profile_steps=5").log.profile_steps == (5,)
    assert build_with(cls, "log.profile_steps=[5, 3]", "steps=5").log.profile_steps == (5, 3)
    message = refusal(cls, "log.profile_steps=[5, 3]", "steps=4")
    assert message == (
        "log.profile_steps: expected numbers from 1 to 4, got [5, 3], "
        "but 5 is not a step of the run"
    )
    for wrong in ("1.5", "true", "[last]", "[null]"):
        assert "log.profile_steps: expected a whole number" in refusal(
            cls, f"log.profile_steps={wrong}"
        )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["batch.prompts_per_step=12", "batch.prompts_per_minibatch=8"],
            "batch.prompts_per_step=12 is not a multiple of batch.prompts_per_minibatch=8; "
            "take one of 1, 2, 3, 4, 6, 12",
        ),
        (
            ["rollout.kv_cache_gb=0"],
            "rollout.kv_cache_gb: expected a number above 0, or null, got 0 (int)",
        ),
        (
            ["batch.max_tokens_per_device=1023"],
            "batch.max_tokens_per_device=1023 can't hold the longest sequence: "
            "data.max_prompt_tokens + rollout.max_new_tokens = 1024",
        ),
        (
            ["validation.every=5"],
            "validation.every=5 but data.validation names no file: name one, or set "
            "validation.every to 0",
        ),
        (
            ["algorithm.kl_loss=k3", "algorithm.kl_reward=k1"],
            "algorithm.kl_loss and algorithm.kl_reward share kl_coef: set one of them to null",
        ),
        (
            ["rollout.kv_cache_dtype=fp8"],
            "rollout.kv_cache_dtype: expected auto or int8 with the native engine, got 'fp8'",
        ),
        (
            ["rollout.kv_cache_dtype=int8", "rollout.engine=vllm"],
            "rollout.kv_cache_dtype: expected auto or fp8 with the vllm engine, got 'int8'",
        ),
        (
            ["rollout.kv_cache_dtype=int4"],
            "rollout.kv_cache_dtype: expected auto, int8 or fp8, got 'int4' (str)",
        ),
    ],
)
def test_contradictions_between_keys(overrides, expected):
    assert refusal(TrainConfig, *overrides) == expected


def test_all_contradictions_are_reported_at_once(capsys, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(TRAIN))
    wrong = ["validation.every=5", "model.random_init=true", "model.adapter=a", "rollout.devices=2"]
    assert train_main(["--config", str(file), *wrong]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1].partition("=")[0] for line in lines] == [
        "validation.every",
        "model.random_init",
        "rollout.devices",
    ]


def test_records_made_directly_are_checked_too():
    config = build_with(TrainConfig)
    with pytest.raises(ConfigError, match=r"^steps: expected 1 or more, or null, got 0 \(int\)$"):
        dataclasses.replace(config, steps=0)
    with pytest.raises(ConfigError, match=r"^validation.every=5 but data.validation names no file"):
        dataclasses.replace(config, validation=ValidationConfig(every=5))
    with pytest.raises(ConfigError, match=r"^unknown key 'evry'; did you mean 'every'\?"):
        ValidationConfig(evry=5)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match=r"^run_dir is missing: directory"):
        TrainConfig(model=config.model, data=config.data)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["batch.max_tokens_per_device=1023"],
            "batch.max_tokens_per_device=1023 can't hold the longest example: data.max_tokens=1024",
        ),
        (["batch.examples_per_step=0"], "batch.examples_per_step: expected 1 or more, got 0 (int)"),
        (["data.max_tokens=0"], "data.max_tokens: expected 1 or more, got 0 (int)"),
        (["export_to=runs/../runs/a"], "export_to and run_dir are both 'runs/a': name two folders"),
    ],
)
def test_contradictions_in_supervised_training(overrides, expected):
    assert refusal(SftConfig, *overrides) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.prompts_per_step=12", "batch.prompts_per_minibatch=6"],
        ["batch.max_tokens_per_device=1024"],
        ["validation.every=5", "data.validation=v.parquet"],
        ["algorithm.kl_loss=k3"],
        ["algorithm.kl_reward=k1", "algorithm.kl_coef=0"],
        ["rollout.top_p=1", "validation.temperature=0", "reward.workers=0"],
        ["optim.grad_clip=null", "steps=1", "checkpoint.resume=never", "model.dtype=bfloat16"],
        ["mesh.train={data: 2, fsdp: 2, tensor: 2}", "mesh.rollout={data: -1, tensor: 4}"],
        ["mesh.train.devices=4", "mesh.rollout.first_device=4", "mesh.context_by=keys"],
        ["mesh.critic={fsdp: 1, data: -1}", "mesh.reference={tensor: 8}"],
    ],
)
def test_the_edges_are_allowed(overrides):
    assert build_with(TrainConfig, *overrides) != build_with(TrainConfig)


@pytest.mark.parametrize("n", [1, 2, 12, 13, 64])
def test_divisors(n):
    assert divisors(n) == sorted({d for d in range(1, 65) for e in range(1, 65) if d * e == n})


# --------------------------------------------------------------------------------- ready configs


def test_there_are_ready_configs():
    assert {"quickstart.yaml", "quickstart_sft.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_ready_config_loads(path):
    cls = SftConfig if path.name.endswith("_sft.yaml") else TrainConfig
    config = load(cls, path)
    assert path.read_text().startswith("# ")
    if isinstance(config, TrainConfig) and config.model.warm_start:
        sft = load(SftConfig, ROOT / config.model.warm_start)
        assert sft.export_to == config.model.path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_function_that_a_ready_config_names_is_found(path):
    if path.name.endswith("_sft.yaml"):
        from jaxrl_llm.training.optimizer import make_optimizer

        make_optimizer(load(SftConfig, path).optim)
    else:
        from jaxrl_llm.rewards.worker import load_reward_function
        from jaxrl_llm.training.bind import resolve_functions

        config = load(TrainConfig, path)
        resolve_functions(config)
        load_reward_function(config.reward.function)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_ready_config_survives_printing(path, tmp_path):
    cls = SftConfig if path.name.endswith("_sft.yaml") else TrainConfig
    config = load(cls, path)
    (tmp_path / "printed.yaml").write_text(to_yaml(config))
    assert load(cls, tmp_path / "printed.yaml") == config
    names = set(leaves_of(read_yaml(tmp_path / "printed.yaml")))
    assert names >= {"run_dir", "mesh.train.data"}
