"""What XLA's compiler for GPUs makes of a run's steps: no GPU is needed, but jax's CUDA plugin."""

import dataclasses
import functools
import re

import pytest

from jaxrl_llm import plan as planner
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.planning.program import count_operations, parse_program
from jaxrl_llm.planning.steps import gpu_devices
from jaxrl_llm.training.compile import ENGINE, StepId, StepKind, bytes_per_device, plan_shapes
from tests.guarded import MODEL, NATIVE, UPDATE
from tests.planning.stablehlo import OPTIONS, configure
from tests.specs import DENSE

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.usefixtures("compiler"),
    pytest.mark.guards(*MODEL, *UPDATE, *NATIVE, "jaxrl_llm/planning/"),
]

UPDATE_STEP, DECODE_STEP = StepId("actor", StepKind.ACCUMULATE), StepId(ENGINE, StepKind.DECODE)
APPLY_STEP = StepId("actor", StepKind.APPLY)
SPEC = dataclasses.replace(
    DENSE,
    **dict(vocab_size=8192, hidden_size=256, layers=3, heads=8, kv_heads=8, head_dim=64),
    **dict(ff_width=512, tied_embeddings=True, max_positions=512),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Returns the shapes of a run on so many GPUs, and one of its steps compiled."""

    @functools.cache
    def shapes(devices, spec, attention):
        config = config_of(tmp_path_factory.mktemp("model"), spec, attention)
        return plan_shapes(config, gpu_devices("H200", devices))

    @functools.cache
    def compile_step(devices, step, spec=SPEC, attention="auto"):
        run = shapes(devices, spec, attention)
        return run, run.trace[step]().lower().compile(compiler_options=OPTIONS)

    return compile_step


def config_of(folder, spec=SPEC, attention="auto"):
    return configure(
        folder,
        spec,
        model__remat="full",
        model__attention=attention,
        algorithm__kl_loss="null",
        data__max_prompt_tokens=128,
        rollout__max_new_tokens=128,
        rollout__max_running_sequences=64,
        batch__max_tokens_per_device=1024,
    )


@pytest.mark.parametrize("devices", [1, 8])
def test_gradients_and_parameters_are_updated_in_place(compiled, devices):
    run, accumulate = compiled(devices, UPDATE_STEP)
    params = bytes_per_device(run.roles["actor"].params)
    assert accumulate.memory_analysis().alias_size_in_bytes >= params
    apply = compiled(devices, APPLY_STEP)[1]
    moments = bytes_per_device(run.roles["actor"].optimizer)
    assert apply.memory_analysis().alias_size_in_bytes >= params + moments


def test_no_gradient_is_summed_whole_in_float32(compiled):
    text = compiled(8, UPDATE_STEP)[1].as_text()
    smallest = SPEC.hidden_size * SPEC.kv_heads * SPEC.head_dim * 4
    summed = [
        line.type
        for _, line in parse_program(text).instructions()
        if line.operation in ("all-reduce", "all-reduce-done") and line.size >= smallest
    ]
    assert summed == []


def test_an_update_gathers_weights_twice_and_scatters_gradients_once(compiled):
    spec = dataclasses.replace(SPEC, tied_embeddings=False)
    text = compiled(8, UPDATE_STEP, spec)[1].as_text()
    sent = count_operations(text, {"fsdp": 8}).sent.total()
    gather, scatter = 2, 4  # bytes of a weight, and of its gradient
    head = (
        spec.vocab_size * spec.hidden_size
    )  # gathered once; of an embedding tokens' rows are sent
    layers = parameter_count(spec) - 2 * head
    formula = (layers * (2 * gather + scatter) + head * (gather + scatter)) * 7 / 8
    assert sent == pytest.approx(formula, rel=0.1)


@pytest.mark.parametrize("devices", [1, 8])
def test_the_cache_is_written_in_place(compiled, devices):
    """By XLA's attention; test_gpu_kernels has the kernel over pages."""
    run, decode = compiled(devices, DECODE_STEP, attention="xla")
    assert decode.memory_analysis().alias_size_in_bytes >= run.cache
    keys = bytes_per_device(run.engine.pages.keys[0])
    layer = keys * 0.9  # rows have no room for what is being written
    program = parse_program(decode.as_text())
    copied = [
        line.type
        for name in (program.entry, *launching(program))
        for line in program.computations[name].values()
        if line.size >= layer and copies(program, line)
    ]
    assert copied == []


@pytest.mark.parametrize("devices", [1, 8])
def test_a_token_takes_no_loop_no_collective_and_no_copy_of_the_vocabulary(compiled, devices):
    """So XLA records it whole in one command buffer; cut off or not, nothing is copied for it."""
    program = parse_program(compiled(devices, DECODE_STEP)[1].as_text())
    entry = program.computations[program.entry].values()
    (body,) = {line.attribute(r"body=%([\w.\-]+)") for line in entry} - {""}
    token = [line for name in called(program, body) for line in program.computations[name].values()]
    assert any(line.operation == "conditional" for line in token)
    many = ("while", "all-reduce", "all-gather", "all-to-all", "sort")
    assert [line.type for line in token if line.operation.startswith(many)] == []
    copied = [line.type for line in token if line.operation == "copy"]
    assert [kind for kind in copied if str(SPEC.vocab_size) in kind] == []


def called(program, name):
    """Yields a computation and those that its conditionals run."""
    yield name
    for line in program.computations[name].values():
        if line.operation == "conditional":
            for branch in re.findall(r"%([\w.\-]+)", line.rest.split("), ", 1)[1]):
                if branch in program.computations:
                    yield from called(program, branch)


def launching(program):
    return [
        body
        for _, line in program.instructions()
        for body in [line.attribute(r"body=%([\w.\-]+)")]
        if body
    ]


def copies(program, line):
    """Whether an instruction makes a new array of what it reads, and not a part in its place."""
    if line.operation == "fusion":
        inside = program.computations[line.attribute(r"calls=%([\w.\-]+)")]
        (root,) = (inner for inner in inside.values() if inner.is_root)
        return root.operation in ("copy", "transpose", "concatenate", "select", "convert")
    return line.operation in ("copy", "transpose", "concatenate")


def test_a_plan_is_of_the_gpus_programs(capfd, tmp_path):
    config_of(tmp_path)
    command = ["--config", str(tmp_path / "run.json"), "--devices", "1", "--compile-for", "H200"]
    # which nobody can compile without a GPU
    given = [f"model.path={tmp_path}", "model.dtype=bfloat16", "model.attention=cudnn"]
    assert planner.main([*command, *given]) == 0
    plan, noise = capfd.readouterr()
    for words in (
        "pages in place: ",
        "of XLA's compiler for H200",
        "kernels of a device",
        "on H200",
        "while",
    ):
        assert words in plan, words
    assert "cuda drivers" not in noise
