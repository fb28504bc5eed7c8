"""Files made on demand, models and optimizers from a config."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import PACKAGED, from_tree
from jaxrl_llm.config.programs import SftConfig, TrainConfig
from jaxrl_llm.config.sections import (
    DataConfig,
    LoraConfig,
    MeshConfig,
    MeshSizes,
    OptimConfig,
    PolicyConfig,
    RolloutSizes,
)
from jaxrl_llm.files import write_text
from jaxrl_llm.models.arrays import declarer
from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import make_config
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.rope import LongRopeScaling
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.runs.directory import build_once, prepare_files, recipe_of
from jaxrl_llm.sharding.layout import DEFAULT_RULES, make_mesh
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.load_model import (
    LoadedModel,
    adapted_spec,
    open_layout,
    open_layouts,
    open_model,
    open_scorer,
    own_rules,
    packed_shape,
    takes_long_rows,
)
from jaxrl_llm.training.optimizer import make_optimizer


def config_of(folder, **more):
    return TrainConfig(
        run_dir=str(folder),
        model=PolicyConfig(path="m"),
        data=DataConfig(train=("t.parquet",)),
        **more,
    )


def refusal(function, *args, **more):
    """Return the message of a ConfigError, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        function(*args, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_prepared_with_other_keywords_are_refused(tmp_path):
    def spec(rows):
        out = str(tmp_path / "data")
        return FunctionSpec("arithmetic", {"out": out, "train_rows": rows, "validation_rows": 2})

    expected = (str(tmp_path / "data" / "train.parquet"),)
    prepare_files(spec(8), expected)
    prepare_files(spec(8), expected)
    message = refusal(prepare_files, spec(9), expected)
    assert message.startswith("data.prepare: the files in ")
    assert "were prepared with other keywords; remove that folder" in message


def test_text_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "text"
    write_text(path, "one")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "one"
    write_text(path, "zwölf")
    assert path.read_text(encoding="utf-8") == "zwölf"


# ---------------------------------------------------------------------------------- made on demand


def test_made_once(tmp_path):
    calls = []

    def make():
        calls.append(1)
        (tmp_path / "base").mkdir()

    for _ in range(3):
        build_once(tmp_path / "base", {"steps": 1}, make)
    assert calls == [1]
    message = refusal(build_once, tmp_path / "base", {"steps": 2, "seed": 1}, make)
    assert message.startswith(
        f"'{tmp_path}/base' was made otherwise: "
        "seed: its default -> 1; steps: 1 -> 2. Remove that directory"
    )
    assert calls == [1]


def sft_config(**more):
    tree = {"run_dir": "r", "export_to": "e", "model": {"path": "m"}}
    tree |= {"data": {"train": ["t.parquet"], "max_tokens": 8}}
    return from_tree(SftConfig, tree | more)


def test_a_recipe_has_what_decides_the_weights_and_no_defaults():
    plain = {"model.path": "m", "data.train": ["t.parquet"], "data.max_tokens": 8}
    assert recipe_of(sft_config()) == plain
    written = {"log": {"trackers": []}, "checkpoint": {"every": 3}, "stall_timeout_s": None}
    assert recipe_of(sft_config(**written, seed=0, mesh={"train": {"fsdp": 2}})) == plain
    assert recipe_of(sft_config(steps=5)) == plain | {"steps": 5}
    lora = {"path": "m", "lora": {}}
    assert recipe_of(sft_config(model=lora)) == plain | {"model.lora": {}}


def test_a_recipe_names_a_model_of_the_package_the_same_from_everywhere(monkeypatch):
    monkeypatch.chdir(PACKAGED.parent)  # where a clone has its configs, too
    recipes = [
        recipe_of(sft_config(model={"path": path}))
        for path in ("configs/quickstart", str(PACKAGED / "quickstart"))
    ]
    assert recipes[0] == recipes[1]
    assert recipes[0]["model.path"] == "configs/quickstart"


def test_a_recipe_has_the_sources_of_users_functions(tmp_path):
    path = tmp_path / "mine.py"

    def recipe(scale):
        path.write_text(f"import optax\n\ndef mine():\n    return optax.sgd({scale})\n")
        return recipe_of(sft_config(optim={"optimizer": f"{path}:mine"}))

    one, other = recipe(0.1), recipe(0.2)
    assert {key for key in one if one[key] != other[key]} == {"optim.optimizer: source"}


def test_a_base_without_a_recipe_is_refused(tmp_path):
    (tmp_path / "base").mkdir()
    recipe = {"data.chat_template_kwargs": {"a": 1}}
    (tmp_path / "base.made_by").write_text("5d41402abc")
    message = refusal(build_once, tmp_path / "base", recipe, lambda: None)
    assert "was made by a version that did not write down how. Remove that directory" in message


def test_a_directory_that_the_user_made_is_taken(tmp_path):
    (tmp_path / "base").mkdir()
    build_once(tmp_path / "base", {"steps": 1}, lambda: pytest.fail("made again"))


def test_what_failed_half_way_is_made_again(tmp_path):
    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "base", {"steps": 1}, fail)
    build_once(tmp_path / "base", {"steps": 2}, (tmp_path / "base").mkdir)
    build_once(tmp_path / "base", {"steps": 2}, lambda: pytest.fail("made again"))


PREPARATION = """
from pathlib import Path

def write(out, *, fail=False, name="a.txt"):
    if fail:
        raise ValueError("write: a bad number\\nand more")
    Path(out).mkdir(exist_ok=True)
    with (Path(out) / name).open("a") as file:
        file.write("x")
"""


@pytest.fixture
def preparation(tmp_path):
    (tmp_path / "mine.py").write_text(PREPARATION)

    def spec(**keywords):
        return FunctionSpec(f"{tmp_path}/mine.py:write", {"out": str(tmp_path / "d"), **keywords})

    return spec


def test_files_are_prepared_when_one_is_missing_and_only_then(tmp_path, preparation, capsys):
    expected = (str(tmp_path / "d" / "a.txt"),)
    prepare_files(preparation(), expected)
    assert capsys.readouterr().out == f"preparing data: {preparation().fn}\n"
    prepare_files(preparation(), expected)
    assert (tmp_path / "d" / "a.txt").read_text() == "x"
    assert capsys.readouterr().out == ""
    prepare_files(None, ("not/there",))  # the reader will say so


def test_a_preparation_that_writes_other_files(tmp_path, preparation):
    expected = (str(tmp_path / "d" / "a.txt"), str(tmp_path / "d" / "b.txt"))
    message = refusal(prepare_files, preparation(), expected)
    assert message.startswith("data.prepare: ")
    assert f"did not write {expected[1]}; make its `out` the folder" in message


def test_a_preparation_that_fails(preparation):
    message = refusal(prepare_files, preparation(fail=True), ("not/there",))
    assert message == "data.prepare: write: a bad number"


def test_a_wrong_number_for_a_preparation_of_the_library(tmp_path):
    spec = FunctionSpec("arithmetic", {"out": str(tmp_path / "d"), "digits": 0})
    message = refusal(prepare_files, spec, (str(tmp_path / "d" / "train.parquet"),))
    assert message.startswith("data.prepare: arithmetic: expected at least 1 each")
    assert "digits=0" in message
    assert "data.prepare: 'arithmetic' needs a value for out" in refusal(
        prepare_files, FunctionSpec("arithmetic"), ("not/there",)
    )
    assert "did you mean 'arithmetic'?" in refusal(
        prepare_files, FunctionSpec("arithmetics"), ("not/there",)
    )


# ------------------------------------------------------------------------------------- optimizers


def optim(optimizer="adamw", schedule=None, **more):
    schedule = schedule or FunctionSpec("constant_schedule", {"value": 0.1})
    optimizer = optimizer if isinstance(optimizer, FunctionSpec) else FunctionSpec(optimizer)
    return OptimConfig(optimizer=optimizer, schedule=schedule, **more)


def made(config):
    """The optimizer and the schedule, of a model of one vector `a`."""
    optimizer_of, schedule = make_optimizer(config)
    vector = {"a": declarer({"norm": 2})("a", "norm", "norm")}
    return optimizer_of(vector, {"a": jnp.zeros(2)}), schedule


def test_an_optimizer_with_schedule_and_clipping():
    linear = FunctionSpec("linear_schedule", dict(init_value=0, end_value=1, transition_steps=10))
    optimizer, schedule = made(optim("sgd", linear, grad_clip=1.0))
    assert [float(schedule(step)) for step in (0, 5, 20)] == [0.0, 0.5, 1.0]
    params = {"a": jnp.zeros(2)}
    state = optimizer.init(params)
    steps = []
    for _ in range(3):
        updates, state = optimizer.update({"a": jnp.array([3.0, 4.0])}, state, params)
        steps.append(updates["a"])
    np.testing.assert_allclose(steps, [[0, 0], [-0.06, -0.08], [-0.12, -0.16]], rtol=1e-6)


def test_null_does_not_clip():
    optimizer, _ = made(optim("sgd", grad_clip=None))
    params = {"a": jnp.zeros(2)}
    updates, _ = optimizer.update({"a": jnp.array([3.0, 4.0])}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["a"], [-0.3, -0.4], rtol=1e-6)


def test_keywords_reach_the_optimizer():
    spec = FunctionSpec("adamw", {"weight_decay": 0.5, "b1": 0.0})
    optimizer, _ = made(optim(spec, grad_clip=None))
    params = {"a": jnp.ones(2)}
    updates, _ = optimizer.update({"a": jnp.zeros(2)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["a"], [-0.05, -0.05], rtol=1e-6)


def adversarial(learning_rate):
    """Stands in every second step where the loss is largest nearby."""
    return optax.contrib.sam(optax.sgd(learning_rate), optax.contrib.normalize())


def fast_and_slow(learning_rate):
    return optax.lookahead(optax.sgd(learning_rate), sync_period=5, slow_step_size=0.5)


def test_the_default_is_usable():
    _, schedule = make_optimizer(OptimConfig())
    assert float(schedule(0)) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FunctionSpec("adamww"), "optim.optimizer: no function 'adamww' in optax; did you mean"),
        (FunctionSpec("adamw", {"weigth_decay": 0.1}), "optim.optimizer: 'adamw' takes no 'weigth"),
        (FunctionSpec("adamw", {"learning_rate": 0.1}), "optim.optimizer: 'adamw' is given 'lear"),
        (FunctionSpec("adamw", {"nesterov": 1}), "optim.optimizer.nesterov: got 1 (int), expected"),
        (FunctionSpec("adamw", {"b1": "x"}), "optim.optimizer: 'adamw' does not work: unsupp"),
        (FunctionSpec("adamw", {"mu_dtype": "float31"}), "optim.optimizer: "),
        (FunctionSpec("clip", {"max_delta": 1.0}), "optim.optimizer: 'clip' does not work: "),
        (FunctionSpec("scale_by_learning_rate", {"flip_sign": 3}), "optim.optimizer.flip_sign: "),
        (FunctionSpec("builtins:dict"), "optim.optimizer: 'builtins:dict' is not an optax optimi"),
        (FunctionSpec("lbfgs"), "optim.optimizer: 'lbfgs' does not work: "),
        (FunctionSpec("optax.contrib:schedule_free_adamw"), "optim.optimizer: 'optax.contrib:sch"),
        (
            FunctionSpec("own", given=adversarial),
            "optim.optimizer: 'own' trains other weights than",
        ),
        (FunctionSpec("own", given=fast_and_slow), "optim.optimizer: "),
        (FunctionSpec("no_package.mod:f"), "optim.optimizer: can't import 'no_package.mod'"),
    ],
)
def test_optimizers_that_do_not_work(spec, expected):
    assert refusal(make_optimizer, optim(spec)).startswith(expected)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FunctionSpec("constant_scedule", {"value": 1.0}), "optim.schedule: no function"),
        (FunctionSpec("constant_schedule"), "optim.schedule: 'constant_schedule' needs a value"),
        (
            FunctionSpec("constant_schedule", {"value": "fast"}),
            "optim.schedule: 'constant_schedule' is",
        ),
        (FunctionSpec("constant_schedule", {"value": [1.0, 2.0]}), "optim.schedule: "),
        (FunctionSpec("constant_schedule", {"value": None}), "optim.schedule: "),
        (
            FunctionSpec("constant_schedule", {"vlaue": 1.0}),
            "optim.schedule: 'constant_schedule' t",
        ),
        (FunctionSpec("builtins:dict"), "optim.schedule: 'builtins:dict' is not an optax schedule"),
        (FunctionSpec("adamw", {"learning_rate": 0.1}), "optim.schedule: 'adamw' is not an optax"),
        (
            FunctionSpec(
                "warmup_cosine_decay_schedule",
                {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 10, "decay_steps": 5},
            ),
            "optim.schedule: ",
        ),
        (
            FunctionSpec(
                "warmup_constant_schedule",
                {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 1.5},
            ),
            "optim.schedule.warmup_steps: got 1.5 (float), expected a int",
        ),
    ],
)
def test_schedules_that_do_not_work(spec, expected):
    assert refusal(make_optimizer, optim(schedule=spec)).startswith(expected)


# -------------------------------------------------------------------------- mesh, model, resuming


SPEC = ModelSpec(
    vocab_size=8,
    hidden_size=4,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=2,
    ff_width=6,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=32,
)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rank", 3, 3),
        ("alpha", 5.0, 5.0),
        ("targets", ("q_proj",), ("query",)),
        ("rslora", True, True),
    ],
)
def test_each_key_of_an_adapter_reaches_the_model(key, value, expected):
    changed, plain = (
        adapted_spec(SPEC, lora, None) for lora in (LoraConfig(**{key: value}), LoraConfig())
    )
    assert getattr(changed.lora, key) == expected
    assert getattr(plain.lora, key) != expected


def sizes_of(layout):
    return {axis: n for axis, n in layout.mesh.shape.items() if n > 1}


def test_by_default_training_splits_parameters_and_the_engine_copies_them():
    layouts = open_layouts(MeshConfig())
    assert sizes_of(layouts.train) == {"fsdp": 8}
    assert sizes_of(layouts.rollout) == {"data": 8}
    assert layouts.critic is layouts.reference is layouts.reward_model is layouts.train
    assert layouts.of("actor") is layouts.of("implicit_reward_model") is layouts.train
    assert layouts.train.context == "heads"
    assert layouts.train.rules == DEFAULT_RULES


def test_every_model_has_its_own_mesh_and_devices():
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


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (MeshSizes(data=3), "does not cover 8 devices; each size must be one of [1, 2, 4, 8]"),
        (MeshSizes(fsdp=4), "does not cover 8 devices"),
        (MeshSizes(fsdp=4, devices=6), "mesh fsdp=4 does not cover 6 devices; each size must be"),
        (MeshSizes(first_device=8), "first_device=8 with devices=None, but there are 8 devices"),
        (MeshSizes(first_device=4, devices=5), "first_device=4 with devices=5, but there are 8"),
    ],
)
def test_devices_that_do_not_make_up_a_mesh(sizes, expected):
    message = refusal(open_layout, MeshConfig(), "critic", sizes)
    assert message.startswith("mesh.critic: ")
    assert expected in message


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"head": None}, "mesh.rules.head: "),
        ({"heads": "tenser"}, "mesh.rules.heads='tenser', expected null or some of ['stage', "),
        ({"heads": {"tensor": 2}}, "mesh.rules.heads={'tensor': 2}, expected null or some of"),
        ({"heads": ["tensor", 2]}, "mesh.rules.heads=['tensor', 2], expected null or some of"),
    ],
)
def test_rules_that_are_none(rules, expected):
    assert refusal(own_rules, rules).startswith(expected)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (MeshSizes(devices=2), r"^mesh\.critic: .* devices=2 has no device of process 1:"),
        (MeshSizes(first_device=3), r"^mesh\.critic: first_device=3 .* of process 0:"),
        (MeshSizes(first_device=1, devices=2), None),
    ],
)
def test_a_mesh_has_devices_of_every_process(sizes, expected, monkeypatch):
    """An array that is moved to a mesh needs a part in every process that moves it."""
    devices = [SimpleNamespace(process_index=n // 2, id=n) for n in range(4)]
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
    monkeypatch.setattr("jaxrl_llm.training.load_model.make_mesh", lambda along, chosen: mesh)
    if expected is None:
        assert open_layout(MeshConfig(), "critic", sizes, devices).mesh is mesh
    else:
        with pytest.raises(ConfigError, match=expected):
            open_layout(MeshConfig(), "critic", sizes, devices)


def test_a_row_that_devices_share_is_as_long_as_they_can_cut_evenly():
    layout = open_layout(MeshConfig(), "train", MeshSizes(data=2, fsdp=1, context=4))
    shape = packed_shape(layout, Decoder(SPEC), tokens=8, longest=13, sequences=10)
    assert (shape.length, shape.rows) == (16, 4)
    expected = r"^batch\.max_tokens_per_device=3 can't hold .* context=4 share: expected 4 or more"
    with pytest.raises(ConfigError, match=expected):
        packed_shape(layout, Decoder(SPEC), tokens=3, longest=13, sequences=10)


@pytest.mark.parametrize(
    ("mesh", "changed", "longest", "expected"),
    [
        ({}, {}, 8, True),
        ({}, {}, 800, False),  # two keys for every token cost more than they save
        ({"data": 2, "fsdp": 1, "context": 4}, {}, 8, False),  # devices share a row
        ({}, {"window": 4, "windowed_layers": (True, False), "layers": 2}, 8, True),
    ],
)
def test_rows_may_be_longer_than_sequences_where_attention_is_cheap(
    mesh, changed, longest, expected
):
    layout = open_layout(MeshConfig(), "train", MeshSizes(**mesh))
    spec = dataclasses.replace(SPEC, ff_width=256, **changed)
    forward = ForwardConfig(model=Decoder(spec))
    assert takes_long_rows(forward, layout, longest) is expected
    kernel = dataclasses.replace(forward, kernel=attend)  # which has limits of its own
    assert not takes_long_rows(kernel, layout, longest)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (open_scorer, "no sequence classifier for Glm4Moe"),
        (functools.partial(open_scorer, of_steps=True), "no token classifier for Glm4Moe"),
    ],
)
def test_a_head_that_can_not_be_saved_is_refused_before_weights_are_read(tmp_path, load, message):
    router = SigmoidRouter(groups=1, top_groups=1, normalize=True, scale=1.0)
    experts = MoeSpec(experts=4, experts_per_token=2, ff_width=8, router=router, dense_layers=0)
    glm = dataclasses.replace(SPEC, hidden_size=8, head_dim=4, moe=experts, qkv_bias=True)
    glm = dataclasses.replace(glm, rotary_fraction=0.5)
    (tmp_path / "config.json").write_text(json.dumps(make_config(glm)))
    layout = open_layouts(MeshConfig()).train
    assert message in refusal(load, PolicyConfig(path=str(tmp_path)), layout, seed=0)


def test_longrope_is_chosen_by_the_longest_sequence():
    scaling = LongRopeScaling(
        short_factors=(1.0,) * (SPEC.head_dim // 2),
        long_factors=(4.0,) * (SPEC.head_dim // 2),
        original_positions=32,
        attention_factor=1.1,
    )
    spec = dataclasses.replace(SPEC, rope_scaling=scaling)
    loaded = LoadedModel(Decoder(spec), params=None, like=None)
    assert loaded.for_length(32).model == loaded.model
    assert loaded.for_length(33).spec.rope_scaling.long
    plain = LoadedModel(Decoder(SPEC), params=None, like=None)
    assert plain.for_length(1000).model == plain.model


def test_a_model_that_can_not_be_read(tmp_path):
    mesh = open_layouts(MeshConfig()).train
    message = refusal(open_model, PolicyConfig(path=str(tmp_path / "none")), mesh, seed=0)
    assert message.startswith("model.path: ")
    assert "none" in message
    (tmp_path / "config.json").write_text("{")
    message = refusal(open_model, PolicyConfig(path=str(tmp_path)), mesh, seed=0)
    assert message.startswith("model.path: ")
