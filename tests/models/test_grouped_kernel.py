"""The decision whether products of experts are computed by Triton's kernels; GPUs run the rest."""

import dataclasses
import functools
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import kernel_choice
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.sections import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.kernels import DeviceInfo, GroupedKernels
from jaxrl_llm.models.moe import grouped, grouped_triton
from jaxrl_llm.models.moe.grouped import (
    BLOCKED,
    choose_grouped_kernels,
    grouped_difference,
    grouped_objection,
    grouped_widths,
)
from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.spec import LoraSpec, ModelSpec
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.training import load_model

AMPERE = DeviceInfo("cuda", (8, 0), (0, 10, 2))
SPEC = ModelSpec(
    vocab_size=8,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ff_width=6,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=32,
    moe=MoeSpec(experts=4, experts_per_token=2, ff_width=24),
)


def layout_on(sizes):
    return Layout(make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))]))


@pytest.fixture
def undecided(monkeypatch):
    monkeypatch.setattr(kernel_choice, "_DECIDED", {})


def choose(asked, kernels=BLOCKED, *, dtype="bfloat16", device=AMPERE, sizes=None):
    layout = layout_on(sizes or {"data": 1})
    return choose_grouped_kernels(asked, SPEC, layout, dtype, device=device, kernels=kernels)


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("bfloat16", AMPERE, None),
        ("float16", DeviceInfo("cuda", (10, 0), (0, 12, 0)), None),
        ("bfloat16", DeviceInfo("cpu", (), (0, 11, 2)), "cpu, not cuda"),
        ("bfloat16", DeviceInfo("cuda", (7, 5), (0, 11, 2)), "capability 7.5"),
        ("float32", AMPERE, "dtype is float32"),
    ],
)
def test_what_speaks_against_the_kernels(dtype, device, expected):
    reason = grouped_objection(dtype, device)
    assert reason is None if expected is None else expected in reason


@pytest.mark.parametrize(
    ("sizes", "more", "expected"),
    [
        ({"expert": 4, "fsdp": 2}, (), {(16, 24), (24, 16)}),
        ({"tensor": 4}, (), {(16, 6), (6, 16)}),
        ({"tensor": 5}, (), {(16, 24), (24, 16)}),
        ({"data": 1}, ("expert_up",), {(16, 24), (24, 16), (16, 4), (4, 24)}),
        ({"data": 1}, ("expert_down", "up"), {(16, 24), (24, 16), (24, 4), (4, 16)}),
    ],
)
def test_kernels_are_tried_with_the_matrices_of_a_device(sizes, more, expected):
    lora = LoraSpec(rank=4, alpha=8.0, targets=more) if more else None
    widths = grouped_widths(dataclasses.replace(SPEC, lora=lora), layout_on(sizes))
    assert set(widths) == expected


@pytest.mark.parametrize(("axis", "name"), [("stage", "xla"), ("data", "triton")])
def test_kernels_are_tried_on_a_batch_where_there_are_stages(monkeypatch, axis, name):
    difference = lambda *_, is_batched: float(is_batched)  # noqa: E731
    monkeypatch.setattr(grouped, "grouped_difference", difference)
    assert choose("auto", sizes={axis: 2}).name == name


def transposing(x, matrices, sizes, *, transposed, between):
    """Right unless matrices are interleaved, as on a mesh, and transposed."""
    products = BLOCKED.multiply(x, matrices, sizes, transposed=transposed, between=between)
    return products * 1.05 if between and transposed else products


def forgetful(x, y, sizes, *, between):
    """Leaves out the first rows."""
    return BLOCKED.sum_outer_products(x.at[:100].set(0), y, sizes, between=between)


def broken(*_, **__):
    raise RuntimeError("register spilling\nand more")


@pytest.mark.parametrize(
    ("kernels", "name", "reason"),
    [
        (BLOCKED, "triton", "differ from XLA's in float32 by up to 0."),
        (BLOCKED._replace(multiply=transposing), "xla", "at most 1% is rounding"),
        (BLOCKED._replace(sum_outer_products=forgetful), "xla", "forward or backward"),
        (BLOCKED._replace(multiply=broken), "xla", "failed: RuntimeError: register spilling"),
    ],
    ids=["agree", "wrong on a mesh", "wrong gradient", "do not compile"],
)
def test_kernels_are_taken_when_they_agree_and_refused_when_not(kernels, name, reason):
    choice = choose("auto", kernels)
    assert choice.name == name
    assert choice.kernel is (kernels if name == "triton" else None)
    assert reason in choice.reason
    assert "\n" not in choice.reason


def test_what_does_not_compile_here_is_refused_for_its_own_reason():
    """These are the kernels themselves, which no CPU compiles."""
    choice = choose("auto", None)
    assert choice.name == "xla"
    assert choice.reason.startswith("the kernels failed: ")
    assert "nterpret" in choice.reason


def test_a_jax_without_pallas_for_triton_has_no_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxrl_llm.models.moe.grouped_triton", None)
    assert "failed: ModuleNotFoundError" in choose("auto", None).reason


def test_xla_is_not_questioned_and_triton_is_no_wish():
    assert choose("xla", BLOCKED._replace(multiply=broken)).reason == "it was asked for"
    with pytest.raises(ValueError, match=r"failed: RuntimeError.*expected auto or xla"):
        choose("triton", BLOCKED._replace(multiply=broken))
    with pytest.raises(ValueError, match="compute dtype is float32"):
        choose("triton", dtype="float32")


def test_kernels_are_not_tried_where_programs_are_only_compiled():
    untried = BLOCKED._replace(multiply=broken)
    choice = choose("auto", untried, device=AMPERE._replace(is_here=False))
    assert (choice.name, choice.kernel) == ("triton", untried)
    assert "not tried" in choice.reason


def test_interpreted_kernels_agree():
    interpreted = GroupedKernels(
        functools.partial(grouped_triton.multiply_groups, interpret=True),
        functools.partial(grouped_triton.sum_outer_products, interpret=True),
    )
    off = grouped_difference(interpreted, [(16, 24)], "bfloat16", is_batched=True)
    assert 0 < off < 2**-8


def test_a_run_says_once_what_multiplies_and_refuses_what_can_not(undecided, caplog):
    layout, config = layout_on({"data": 1}), ModelConfig(path="-", dtype="bfloat16")
    with caplog.at_level(logging.DEBUG, "jaxrl_llm"):
        for _ in range(2):
            settings = load_model.forward_config(config, Decoder(SPEC), layout)
    assert settings.grouped_kernels is None
    assert [r.message for r in caplog.records] == [
        "attention by xla: the devices are cpu, not cuda",
        "experts by xla: the devices are cpu, not cuda",
    ]
    with pytest.raises(ConfigError, match=r"^model\.experts=triton: .* are cpu, not cuda"):
        kernel_choice.choose_experts("triton", SPEC, layout, "bfloat16")


def test_processes_decide_alike(undecided, monkeypatch):
    monkeypatch.setattr(kernel_choice, "device_of", lambda _: AMPERE._replace(is_here=False))
    layout, other = layout_on({"data": 1}), ["xla", "the kernels failed: over there"]
    assert kernel_choice.choose_experts("auto", SPEC, layout, "float16") is grouped_triton.TRITON
    monkeypatch.setattr(distributed, "all_gather", lambda own: [own, other])
    assert kernel_choice.choose_experts("auto", SPEC, layout, "bfloat16") is None
    assert [choice.reason for choice in kernel_choice._DECIDED.values()][1:] == other[1:]


@pytest.mark.parametrize("sizes", [{"data": 1}, {"expert": 2, "fsdp": 2}], ids=str)
def test_experts_are_multiplied_by_what_the_layout_says(sizes):
    seen = []

    def multiply(*given, **how):
        seen.append(how["between"])
        return BLOCKED.multiply(*given, **how)

    layout = layout_on(sizes)
    told = Layout(layout.mesh, grouped_kernels=BLOCKED._replace(multiply=multiply))
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"router": (16, 4), "expert_gate": (4, 16, 24), "expert_up": (4, 16, 24)}
    shapes |= {"expert_down": (4, 24, 16)}
    weights = {n: jax.random.normal(k, s) for (n, s), k in zip(shapes.items(), keys, strict=False)}
    x = jax.random.normal(keys[4], (4, 8, 16))

    def run(layout):
        mix = functools.partial(mixture, weights, SPEC.moe, layout=layout)
        return jax.jit(lambda x: mix(x, jnp.ones((4, 8), bool))[0])(x)

    np.testing.assert_array_equal(run(told), run(layout))
    assert set(seen) == {"fsdp" in sizes}


@pytest.mark.parametrize("value", ["xla", "triton"])
def test_a_model_without_experts_has_no_products_of_them(value):
    config = ModelConfig(path="-", experts=value)
    with pytest.raises(ConfigError, match=rf"model\.experts={value}, but - has no experts"):
        load_model.check_expert_keys(config, dataclasses.replace(SPEC, moe=None), is_adapted=False)
