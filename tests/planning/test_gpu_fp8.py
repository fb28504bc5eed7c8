"""What XLA's compiler for GPUs makes of the engine's float8 products, without a GPU."""

import dataclasses
import re

import pytest

from jaxrl_llm.planning.steps import gpu_devices
from jaxrl_llm.training.compile import ENGINE, StepId, StepKind, plan_shapes
from tests.guarded import MODEL, NATIVE, PLANNING
from tests.planning.stablehlo import OPTIONS, configure
from tests.specs import DENSE

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.usefixtures("compiler"),
    pytest.mark.guards(*MODEL, *NATIVE, *PLANNING),
]

LAYERS = 2
SPEC = dataclasses.replace(
    DENSE,
    vocab_size=8192,
    hidden_size=256,
    layers=LAYERS,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ff_width=768,
    tied_embeddings=True,
    max_positions=512,
)
RUN = {
    "model__attention": "xla",
    "data__max_prompt_tokens": 128,
    "rollout__max_new_tokens": 128,
    "rollout__max_running_sequences": 64,
    "rollout__quantization": "fp8",
    "batch__max_tokens_per_device": 1024,
    "mesh__rollout__data": 1,
    "mesh__rollout__tensor": -1,
}
CALL = re.compile(r' = \(?(\w+)\[([\d,]*)\].*custom_call_target="(__cublas\$[^"]+)"')


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", [StepKind.DECODE, StepKind.PREFILL])
def test_layers_multiply_by_the_float8_tensor_cores(tmp_path, kind, devices):
    """Each matrix by itself, or query, key and value, or gate and up, merged by XLA into one."""
    shapes = plan_shapes(configure(tmp_path, SPEC, **RUN), gpu_devices("H200", devices))
    lowered = shapes.trace[StepId(ENGINE, kind)]().lower()
    text = lowered.compile(compiler_options=OPTIONS).as_text()
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
