"""What a program lowered for CUDA says of itself, read from its StableHLO."""

import dataclasses
import json
import math
import re
import warnings
from types import SimpleNamespace

import jax
import pytest

from jaxrl_llm import kernel_choice
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models import kernels
from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.config import make_config
from jaxrl_llm.models.kernels import DeviceInfo
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.moe.routing import SigmoidRouter, SoftmaxRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.planning.steps import UNTUNED
from jaxrl_llm.training.compile import StepKind
from tests import specs
from tests.guarded import MODEL, PLANNING, UPDATE
from tests.specs import tiny_vision

CALL = re.compile(r"custom_call @([\w$.]+)")
TENSOR = r"tensor<((?:\d+x)*)(\w+)>"
PRODUCT = re.compile(
    rf"(?:dot_general|ragged_dot|ragged_dot_general)\b.* : \({TENSOR}, {TENSOR}\S* .*-> {TENSOR}"
)
SUM = re.compile(rf"stablehlo\.reduce\(.* stablehlo\.add across dimensions = (\S*\]) : \({TENSOR},")
DONATED = re.compile(r"tf\.aliasing_output|jax\.buffer_donor")
PARTITIONS = re.compile(r"mhlo\.num_partitions = (\d+)")

OPTIONS = {**UNTUNED, "xla_backend_optimization_level": 3}
"""To compile by: the tests' own flags lower it."""

DENSE = dataclasses.replace(
    specs.DENSE,
    **dict(vocab_size=88, hidden_size=40, heads=8, kv_heads=4, head_dim=8, ff_width=56),
    tied_embeddings=True,
)
"""No two of its widths are alike, nor is one of them a number of tokens below."""
EXPERTS = 6
GROUPED = frozenset({"__gpu$xla.gpu.triton"})
"""The kernels of `models.moe.grouped_triton`."""

MOE = MoeSpec(experts=EXPERTS, experts_per_token=2, ff_width=24)
SPECS = {
    "Qwen3": {},
    "Gemma2": {
        **dict(qk_norm=False, unit_offset_norms=True, post_norms=True, scaled_embeddings=True),
        **dict(activation="gelu_tanh", window=8, windowed_layers=(True, False), score_softcap=5.0),
    },
    "Qwen3Moe": {"moe": MOE},
    "DeepseekV3": {
        "qk_norm": False,
        "kv_heads": DENSE.heads,
        "head_dim": 12,
        "latent": LatentSpec(query_rank=12, kv_rank=20, nope_width=8, rope_width=4, value_width=8),
        "moe": dataclasses.replace(
            MOE,
            dense_layers=1,
            shared_ff_width=24,
            router=SigmoidRouter(groups=2, top_groups=1, normalize=True, scale=1.0),
        ),
    },
    "Qwen3Next": {
        "unit_offset_norms": True,
        "gated_attention": True,
        "rotary_fraction": 0.5,
        "delta": DeltaSpec(
            key_heads=2, value_heads=4, key_width=10, value_width=18, joined_by_head=True
        ),
        "delta_layers": (True, False),
        "moe": dataclasses.replace(
            MOE,
            shared_ff_width=24,
            shared_gate=True,
            hf_shared="shared_expert",
            router=SoftmaxRouter(normalize=False),
        ),
    },
    "Qwen3VL": {
        "mrope_sections": (2, 1, 1),
        "mrope_interleaved": True,
        "vision": tiny_vision(
            layers=2,
            hidden_size=48,
            heads=4,
            ff_width=72,
            out_size=DENSE.hidden_size,
            position_side=5,
            deep_layers=(0,),
            image_id=80,
            video_id=81,
            marks=(82, 83),
        ),
    },
}

RUN = {
    "run_dir": "runs/a",
    "steps": 1,
    "model": {"random_init": True, "dtype": "bfloat16"},
    "data": {"train": "t.parquet", "max_prompt_tokens": 16},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 16, "max_running_sequences": 16},
    "algorithm": {"kl_loss": "k3"},
    "batch": {"prompts_per_step": 16, "max_tokens_per_device": 64},
}


def lower(traced):
    """Lower a traced program for CUDA, where there is none, and say what it holds.

    Arrays are pairs of dtype and sizes: those of matrix products, and what is added up.
    """
    with warnings.catch_warnings():  # donating what no result can take the place of is an error
        warnings.simplefilter("error")
        lowered = traced.lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    flags = [[x.donated for x in jax.tree.leaves(each)] for each in lowered.args_info[0]]
    return SimpleNamespace(
        calls=set(CALL.findall(text)),
        products=[tuple(map(array, m[1::2], m[2::2])) for m in map(whole, PRODUCT.finditer(text))],
        sums={(m[3], added(m[1], m[2])) for m in SUM.finditer(text)},
        donates=[all(each) and bool(each) for each in flags],
        donated=sum(map(sum, flags)),
        aliased=len(DONATED.findall(text)),
        partitions=int(PARTITIONS.search(text)[1]),
    )


def whole(match):
    """All groups of a match, numbered as in it."""
    return (match[0], *match.groups())


def sizes(text):
    """Sizes of an array: `2x3x` is (2, 3)."""
    return tuple(map(int, text.split("x")[:-1]))


def array(shape, dtype):
    """Return a pair of dtype and sizes."""
    return dtype, sizes(shape)


def added(dimensions, shape):
    """How many numbers of an array become one."""
    return math.prod(sizes(shape)[i] for i in json.loads(dimensions))


def configure(folder, spec, **keys):
    """Write a model's `config.json` into a folder and return the config of a run with it.

    Keys differ from `RUN`'s, with __ for a dot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(make_config(spec)))
    (folder / "run.json").write_text(json.dumps(RUN))
    keys = {"model__path": folder, "model__dtype": "bfloat16"} | keys
    given = [f"{name.replace('__', '.')}={value}" for name, value in keys.items()]
    return load(TrainConfig, folder / "run.json", given)


def spec_of(family="Qwen3", **more):
    return dataclasses.replace(DENSE, **SPECS[family] | more)


def slow(names, *quick, guards=(*MODEL, *UPDATE, *PLANNING)):
    """Return all of them, but the quick ones marked as slow."""
    marks = [pytest.mark.slow, pytest.mark.guards(*guards)]
    return [name if name in quick else pytest.param(name, marks=marks) for name in names]


def pretend(monkeypatch, capability):
    """Let products of experts be chosen as on CUDA devices, and not tried."""
    device = DeviceInfo("cuda", capability, kernels.LEAST_JAX, is_here=False)
    monkeypatch.setattr(kernel_choice, "device_of", lambda _: device)
    monkeypatch.setattr(kernel_choice, "_DECIDED", {})


def check(traced, spec, kind, devices=8, calls=frozenset()):
    """Lower a step and assert what holds of all of its kind."""
    program = lower(traced)
    assert program.calls == calls, "what CUDA has no kernel for, or a call of Python"
    assert program.partitions == devices
    assert program.aliased == program.donated, "something donated is copied"
    check_precision(program, spec, kind)
    return program


def check_precision(program, spec, kind):
    """Assert that products take bfloat16, and that what adds up many numbers takes float32."""
    assert bool(program.products) == (kind is not StepKind.APPLY)
    for product in program.products:
        dtypes = {dtype for dtype, _ in product[:2]}
        exact = {EXPERTS} if spec.moe else set()  # routers take float32
        exact |= {spec.delta.key_width, spec.delta.value_width} if spec.delta else set()
        is_exact = any(exact & {*size} for _, size in product) or is_of_chunk(product, spec)
        assert dtypes == {"bf16"} or is_exact, f"a product of {product}"
    # gradients of what several experts, or all heads of latent attention, read
    few = max(spec.moe.experts_per_token if spec.moe else 1, spec.heads if spec.latent else 1)
    assert all(dtype != "bf16" or count <= few for dtype, count in program.sums), program.sums


def is_of_chunk(product, spec):
    """Tell whether a product is of what the tokens of a DeltaNet's chunk do to each other."""
    sizes = [size for _, size in product[:2]]
    squares = {size[-1] for size in sizes if size[-2:] == (size[-1],) * 2}
    return bool(spec.delta) and any({size[-1] for size in sizes} == {n} for n in squares)
