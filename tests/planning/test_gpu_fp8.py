"""What XLA's compiler for GPUs makes of the engine's float8 products, without a GPU."""

import json
import re

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.hf.config import make_config
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.steps import UNTUNED, gpu_devices
from jaxrl_llm.training.compile import ENGINE, StepId, StepKind, plan_shapes
from tests.guarded import MODEL, NATIVE, PLANNING

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.guards(*MODEL, *NATIVE, *PLANNING)]

OPTIONS = {**UNTUNED, "xla_backend_optimization_level": 3}  # the tests' own flags lower it
LAYERS = 2
SPEC = ModelSpec(
    vocab_size=8192,
    hidden_size=256,
    layers=LAYERS,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ff_width=768,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=512,
)
YAML = """
run_dir: runs/a
steps: 1
model: {path: PATH, random_init: true, dtype: bfloat16, attention: xla}
data: {train: t.parquet, max_prompt_tokens: 128}
rollout: {samples_per_prompt: 2, max_new_tokens: 128, max_running_sequences: 64, quantization: fp8}
batch: {prompts_per_step: 16, max_tokens_per_device: 1024}
mesh: {rollout: {data: 1, tensor: -1}}
"""
CALL = re.compile(r' = \(?(\w+)\[([\d,]*)\].*custom_call_target="(__cublas\$[^"]+)"')


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        gpu_devices("H200", 1)
    except ConfigError as error:
        pytest.skip(str(error))


def compiled_text(folder, kind, devices):
    (folder / "run.yaml").write_text(YAML.replace("PATH", str(folder)))
    (folder / "config.json").write_text(json.dumps(make_config(SPEC)))
    config = load(TrainConfig, folder / "run.yaml", [])
    shapes = plan_shapes(config, gpu_devices("H200", devices))
    step = shapes.trace[StepId(ENGINE, kind)]()
    return step.lower().compile(compiler_options=OPTIONS).as_text()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", [StepKind.DECODE, StepKind.PREFILL])
def test_layers_multiply_by_the_float8_tensor_cores(tmp_path, kind, devices):
    """Each matrix by itself, or query, key and value, or gate and up, merged by XLA into one."""
    text = compiled_text(tmp_path, kind, devices)
    products = [(target, dtype, shape) for dtype, shape, target in CALL.findall(text)]
    quantized = [p for p in products if p[0].endswith("$f8")]
    unused = 3 * (kind is StepKind.PREFILL)  # of the last layer only keys and values are kept
    assert LAYERS * 4 - unused <= len(quantized) <= LAYERS * 7
    # no matrix of a layer is multiplied otherwise, nor is one turned around or widened
    widths = {256, 512 // devices, 768 // devices, 1536 // devices, 2 * 768 // devices}
    others = [shape.split(",") for target, _, shape in products if not target.endswith("$f8")]
    assert not [shape for shape in others if len(shape) == 2 and int(shape[1]) in widths]
    assert not re.findall(r"f8e4m3fn\[\d+(?:,\d+){1,2}\]\S* transpose\(", text)
    matrix = rf"\[{768 // devices},256\]|\[256,{768 // devices}\]"
    assert not re.findall(rf"= (?:bf16|f16|f32)(?:{matrix})", text)
    assert re.search(rf"f8e4m3fn(?:{matrix})", text)
