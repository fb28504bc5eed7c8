"""Files made on demand, models, meshes and optimizers from a config."""

import dataclasses
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import PACKAGED, from_tree
from jaxrl_llm.config.programs import SftConfig, TrainConfig
from jaxrl_llm.config.sections import (
    DataConfig,
    MeshConfig,
    MeshSizes,
    OptimConfig,
    PolicyConfig,
    RolloutSizes,
)
from jaxrl_llm.models.arrays import declarer
from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.runs.compile_cache import use_compilation_cache
from jaxrl_llm.runs.directory import build_once, prepare_files, recipe_of
from jaxrl_llm.sharding.layout import DEFAULT_RULES, make_mesh
from jaxrl_llm.training import compile
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.load_model import (
    open_layout,
    open_layouts,
    own_rules,
    packed_shape,
    takes_long_rows,
)
from jaxrl_llm.training.optimizer import make_optimizer
from tests.refusals import refuses
from tests.specs import TINY as SPEC


def test_a_directory_is_made_once_by_one_recipe(tmp_path):
    """One that the user has made is taken; one without its recipe is not known to be the same."""
    folder, calls = tmp_path / "base", []

    def make():
        calls.append(1)
        folder.mkdir()

    def fail():
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        build_once(folder, {"steps": 1}, fail)  # and what failed half way is made again
    for _ in range(3):
        build_once(folder, {"steps": 1}, make)
    with pytest.raises(ConfigError, match=r"seed.*steps"):
        build_once(folder, {"steps": 2, "seed": 1}, make)
    (tmp_path / "base.made_by").write_text("5d41402abc")
    with pytest.raises(ConfigError, match=str(folder)):
        build_once(folder, {"steps": 1}, make)
    (tmp_path / "own").mkdir()
    build_once(tmp_path / "own", {"steps": 1}, make)
    assert calls == [1]


def sft_config(**more):
    tree = {"run_dir": "r", "export_to": "e", "model": {"path": "m"}}
    tree |= {"data": {"train": ["t.parquet"], "max_tokens": 8}}
    return from_tree(SftConfig, tree | more)


def test_a_recipe_has_what_decides_the_weights_and_no_defaults(tmp_path, monkeypatch):
    """A user's function by its source, and a model of the package the same from everywhere."""
    plain = {"model.path": "m", "data.train": ["t.parquet"], "data.max_tokens": 8}
    assert recipe_of(sft_config()) == plain
    written = {"log": {"trackers": []}, "checkpoint": {"every": 3}, "stall_timeout_s": None}
    assert recipe_of(sft_config(**written, seed=0, mesh={"train": {"fsdp": 2}})) == plain
    assert recipe_of(sft_config(steps=5)) == plain | {"steps": 5}
    lora = {"path": "m", "lora": {}}
    assert recipe_of(sft_config(model=lora)) == plain | {"model.lora": {}}
    path, recipes = tmp_path / "mine.py", []
    for scale in (0.1, 0.2):
        path.write_text(f"import optax\n\ndef mine():\n    return optax.sgd({scale})\n")
        recipes.append(recipe_of(sft_config(optim={"optimizer": f"{path}:mine"})))
    changed = {key for key in recipes[0] if recipes[0][key] != recipes[1][key]}
    assert changed == {"optim.optimizer: source"}
    monkeypatch.chdir(PACKAGED.parent)  # where a clone has its configs, too
    for path in ("configs/quickstart", str(PACKAGED / "quickstart")):
        recipe = recipe_of(sft_config(model={"path": path}))
        assert recipe["model.path"] == "configs/quickstart"


PREPARATION = """
from pathlib import Path

def write(out, *, fail=False, rows=1):
    if fail:
        raise ValueError("write: a bad number\\nand more")
    Path(out).mkdir(exist_ok=True)
    with (Path(out) / "a.txt").open("a") as file:
        file.write("x")
"""


def test_files_are_prepared_when_one_is_missing_and_only_then(tmp_path):
    (tmp_path / "mine.py").write_text(PREPARATION)

    def spec(**keywords):
        return FunctionSpec(f"{tmp_path}/mine.py:write", {"out": str(tmp_path / "d"), **keywords})

    one, other = (str(tmp_path / "d" / name) for name in ("a.txt", "b.txt"))
    for _ in range(2):
        prepare_files(spec(), (one,))
    assert (tmp_path / "d" / "a.txt").read_text() == "x"
    prepare_files(None, ("not/there",))  # the reader will say so
    arithmetic = {"out": str(tmp_path / "e"), "digits": 0}
    for wrong, expected in (
        (spec(rows=2), one),  # written with other keywords
        (spec(), other),  # which it does not write
        (spec(fail=True), "not/there"),
        (FunctionSpec("arithmetic", arithmetic), str(tmp_path / "e/train.parquet")),
        (FunctionSpec("arithmetic"), "not/there"),  # it asks for more
        (FunctionSpec("arithmetics"), "not/there"),
    ):
        with refuses("data.prepare"):
            prepare_files(wrong, (expected,))


def optim(optimizer="adamw", schedule=None, **more):
    schedule = schedule or FunctionSpec("constant_schedule", {"value": 0.1})
    optimizer = optimizer if isinstance(optimizer, FunctionSpec) else FunctionSpec(optimizer)
    return OptimConfig(optimizer=optimizer, schedule=schedule, **more)


def made(config):
    """The optimizer and the schedule, of a model of one vector `a`."""
    optimizer_of, schedule = make_optimizer(config)
    vector = {"a": declarer({"norm": 2})("a", "norm", "norm")}
    return optimizer_of(vector, {"a": jnp.zeros(2)}), schedule


def test_schedule_clipping_and_keywords_reach_the_optimizer():
    """The default can be used, and null does not clip."""
    linear = FunctionSpec("linear_schedule", dict(init_value=0, end_value=1, transition_steps=10))
    spec = FunctionSpec("adamw", {"weight_decay": 0.5, "b1": 0.0})
    zeros, ones, gradient = {"a": jnp.zeros(2)}, {"a": jnp.ones(2)}, {"a": jnp.array([3.0, 4.0])}
    for config, params, given, expected in (
        (optim("sgd", linear, grad_clip=1.0), zeros, gradient, [[0, 0], [-0.06, -0.08]]),
        (optim("sgd", grad_clip=None), zeros, gradient, [[-0.3, -0.4]]),
        (optim(spec, grad_clip=None), ones, zeros, [[-0.05, -0.05]]),
    ):
        optimizer, _ = made(config)
        state = optimizer.init(params)
        for step in expected:
            updates, state = optimizer.update(given, state, params)
            np.testing.assert_allclose(updates["a"], step, rtol=1e-6)
    assert [float(made(optim("sgd", linear))[1](step)) for step in (0, 5, 20)] == [0, 0.5, 1.0]
    assert float(make_optimizer(OptimConfig())[1](0)) == pytest.approx(1e-6)


WRONG_OPTIMIZERS = [
    FunctionSpec("adamw", {"learning_rate": 0.1}),
    FunctionSpec("adamw", {"b1": "x"}),
    FunctionSpec("adamw", {"mu_dtype": "float31"}),
    FunctionSpec("clip", {"max_delta": 1.0}),
    FunctionSpec("builtins:dict"),
    FunctionSpec("lbfgs"),
    FunctionSpec("optax.contrib:schedule_free_adamw"),
]
WARM = {"init_value": 0.0, "peak_value": 1.0}
WRONG_SCHEDULES = [
    FunctionSpec("constant_schedule"),
    *(FunctionSpec("constant_schedule", {"value": value}) for value in ("fast", [1.0, 2.0], None)),
    FunctionSpec("builtins:dict"),
    FunctionSpec("adamw", {"learning_rate": 0.1}),
    FunctionSpec("warmup_cosine_decay_schedule", WARM | {"warmup_steps": 10, "decay_steps": 5}),
]


def test_optimizers_and_schedules_that_do_not_work_name_their_key(subtests):
    for spec in WRONG_OPTIMIZERS:
        with subtests.test(str(spec)), refuses("optim.optimizer"):
            make_optimizer(optim(spec))
    for spec in WRONG_SCHEDULES:
        with subtests.test(str(spec)), refuses("optim.schedule"):
            make_optimizer(optim(schedule=spec))
    with refuses("optim.optimizer.nesterov"):
        make_optimizer(optim(FunctionSpec("adamw", {"nesterov": 1})))


def sizes_of(layout):
    return {axis: n for axis, n in layout.mesh.shape.items() if n > 1}


def test_every_model_has_its_own_mesh_and_devices():
    """By default training splits parameters, and the engine copies them."""
    layouts = open_layouts(MeshConfig())
    assert sizes_of(layouts.train) == {"fsdp": 8} and sizes_of(layouts.rollout) == {"data": 8}
    assert layouts.critic is layouts.reference is layouts.reward_model is layouts.train
    assert layouts.of("actor") is layouts.of("implicit_reward_model") is layouts.train
    layouts = open_layouts(
        MeshConfig(
            train=MeshSizes(fsdp=2, tensor=-1, devices=4),
            rollout=RolloutSizes(tensor=2, first_device=4),
            critic=MeshSizes(stage=2),
            reference=MeshSizes(first_device=6, devices=2),
            reward_model=MeshSizes(fsdp=1, expert=8),
            context_by="keys",
            rules={"vocab": None, "ff": ["tensor", "context"]},
        )
    )
    meshes = [(sizes_of(x), [d.id for d in x.mesh.devices.ravel()]) for x in layouts]
    assert meshes == [
        ({"fsdp": 2, "tensor": 2}, [0, 1, 2, 3]),
        ({"data": 2, "tensor": 2}, [4, 5, 6, 7]),
        ({"stage": 2, "fsdp": 4}, [*range(8)]),
        ({"fsdp": 2}, [6, 7]),
        ({"expert": 8}, [*range(8)]),
        ({"fsdp": 2, "tensor": 2}, [0, 1, 2, 3]),  # teachers stand where the policy is trained
    ]
    assert all(layout.context == "keys" for layout in layouts)
    assert layouts.critic.rules["ff"] == ("tensor", "context")
    assert layouts.critic.rules["vocab"] is None
    assert layouts.critic.rules["embed"] == DEFAULT_RULES["embed"]


def test_devices_and_rules_that_make_up_no_mesh_name_their_key():
    for sizes in (
        MeshSizes(data=3),
        MeshSizes(fsdp=4, devices=6),
        MeshSizes(first_device=8),
        MeshSizes(first_device=4, devices=5),
    ):
        with refuses("mesh.critic"):
            open_layout(MeshConfig(), "critic", sizes)
    for rules, key in (
        ({"head": None}, "mesh.rules.head"),
        ({"heads": "tenser"}, "mesh.rules.heads"),
        ({"heads": ["tensor", 2]}, "mesh.rules.heads"),
    ):
        with refuses(key):
            own_rules(rules)


def test_a_mesh_has_devices_of_every_process(monkeypatch):
    """An array that is moved to a mesh needs a part in every process that moves it."""
    devices = [SimpleNamespace(process_index=n // 2, id=n) for n in range(4)]
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
    monkeypatch.setattr("jaxrl_llm.training.load_model.make_mesh", lambda along, chosen: mesh)
    both = MeshSizes(first_device=1, devices=2)
    assert open_layout(MeshConfig(), "critic", both, devices).mesh is mesh
    for sizes in (MeshSizes(devices=2), MeshSizes(first_device=3)):
        with refuses("mesh.critic"):
            open_layout(MeshConfig(), "critic", sizes, devices)


def test_a_row_that_devices_share_is_as_long_as_they_can_cut_evenly():
    layout = open_layout(MeshConfig(), "train", MeshSizes(data=2, fsdp=1, context=4))
    shape = packed_shape(layout, Decoder(SPEC), tokens=8, longest=13, sequences=10)
    assert (shape.length, shape.rows) == (16, 4)
    with refuses("batch.max_tokens_per_device"):
        packed_shape(layout, Decoder(SPEC), tokens=3, longest=13, sequences=10)


def test_rows_may_be_longer_than_sequences_where_attention_is_cheap():
    spec = dataclasses.replace(SPEC, ff_width=256)
    forward = ForwardConfig(model=Decoder(spec))
    layout = open_layout(MeshConfig(), "train", MeshSizes())
    shared = open_layout(MeshConfig(), "train", MeshSizes(data=2, fsdp=1, context=4))
    assert takes_long_rows(forward, layout, 8)
    assert not takes_long_rows(forward, layout, 800)  # two keys for each token cost too much
    assert not takes_long_rows(forward, shared, 8)  # devices share a row
    kernel = dataclasses.replace(forward, kernel=attend)  # which has limits of its own
    assert not takes_long_rows(kernel, layout, 8)


def test_steps_of_a_new_run_of_a_large_model_are_compiled_ahead(
    tmp_path, monkeypatch, compiles_alone, caplog
):
    """While its weights are read, and where what is compiled is kept for the first step."""
    shutil.copytree(PACKAGED / "quickstart", tmp_path / "model")  # it has no weights
    model, data = PolicyConfig(path=str(tmp_path / "model")), DataConfig(train=("t.parquet",))
    config, asked = TrainConfig(run_dir=str(tmp_path), model=model, data=data), []
    monkeypatch.setattr(compile, "compiles_ahead", lambda devices: False)  # as GPUs
    monkeypatch.setattr(compile, "LARGE", 1)

    def go(config=config):
        before = len(asked)
        with compile.compiling_ahead(config, tmp_path) as wait:
            wait()
        return len(asked) > before

    with use_compilation_cache():
        go(dataclasses.replace(config, mesh=MeshConfig(train=MeshSizes(fsdp=3, data=3))))
        assert "mesh.train" in caplog.text, "what can not be compiled ahead is told"
        monkeypatch.setattr(compile, "compile_steps", lambda config, stopped: asked.append(config))
        drawn = dataclasses.replace(config.model, random_init=True)
        assert not go(dataclasses.replace(config, model=drawn)), "nothing is read"
        assert go()
        (tmp_path / "checkpoints").mkdir()
        assert not go(), "not new"
        (tmp_path / "checkpoints").rmdir()
        monkeypatch.setattr(compile, "LARGE", 1e12)
        assert not go(), "small"
        monkeypatch.setattr(compile, "LARGE", 1)
    assert not go(), "nothing is kept"
