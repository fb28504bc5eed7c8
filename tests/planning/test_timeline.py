"""A step's timeline: cases by hand, sums that hold for any engine, and the compiled programs."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cluster import scaling
from benchmarks.cluster.simulate_sampling import (
    EngineSpeed,
    Generation,
    assign_engines,
    cache_bytes,
    draw_lengths,
    engine_speed,
    mean_context,
    simulate_engine,
    simulate_generation,
)
from benchmarks.cluster.simulate_steps import (
    StepTimes,
    TrainMesh,
    bytes_sent,
    step_times,
    sync_seconds,
    train_seconds,
)
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.flops import forward_flops
from jaxrl_llm.models.hf.config import make_config
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.program import count_operations
from jaxrl_llm.planning.steps import COMPUTE, GPUS, UNTUNED, gpu_devices
from jaxrl_llm.training.compile import StepId, StepKind, plan_shapes, with_float16
from tests.guarded import MODEL, UPDATE

SECOND = EngineSpeed(step=1.0)
SPEC = ModelSpec(
    vocab_size=512,
    hidden_size=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ff_width=512,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=False,
    max_positions=64,
)
YAML = """
run_dir: runs/a
steps: 1
model: {path: PATH, random_init: true, dtype: bfloat16, remat: full}
data: {train: t.parquet, max_prompt_tokens: 16}
algorithm: {kl_loss: k3}
rollout: {samples_per_prompt: 2, max_new_tokens: 16, max_running_sequences: 16}
batch: {prompts_per_step: 16, max_tokens_per_device: 64}
mesh: {train: {data: 2, fsdp: 2, tensor: 2}, rollout: {data: 8}}
"""


def ends(lengths, *, unread=None, prompt=0, slots=9, speed=SECOND):
    unread = np.zeros(len(lengths)) if unread is None else np.array(unread)
    return simulate_engine(
        np.array(lengths), unread, prompt=prompt, slots=slots, speed=speed
    ).tolist()


@pytest.mark.parametrize(
    ("lengths", "slots", "expected"),
    [
        ([4, 4, 4], 3, [4, 4, 4]),
        ([4, 4, 4], 2, [4, 4, 8]),
        ([4, 4, 4], 1, [4, 8, 12]),
        ([2, 2, 2, 10], 4, [2, 2, 2, 10]),
        ([10, 2, 2, 2], 2, [10, 2, 4, 6]),
        ([2, 2, 2, 10], 2, [2, 2, 4, 12]),
        ([], 2, []),
    ],
)
def test_answers_end_when_their_slots_have_run_so_many_steps(lengths, slots, expected):
    assert ends(lengths, slots=slots) == expected


def test_a_prompt_that_is_read_keeps_the_others_waiting():
    slow = EngineSpeed(step=1.0, prompt=0.5)
    assert ends([2, 2], unread=[4, 0], prompt=4, speed=slow) == [4, 4]
    assert ends([1, 3, 1], unread=[4, 4, 4], prompt=4, slots=2, speed=slow) == [5, 9, 8]


def test_a_step_is_the_slower_of_reading_and_computing():
    # contexts in all before each step: 2, 4, then 3 of the one that is left
    reads = EngineSpeed(weights=1.0, cached=0.5)
    assert ends([2, 3], prompt=1, speed=reads) == [2 + 3, 2 + 3 + 2.5]
    computes = EngineSpeed(weights=1.0, sequence=3.0, pair=0.25)
    assert ends([2, 3], prompt=1, speed=computes) == [6.5 + 7, 6.5 + 7 + 3.75]
    # 3.5 and 3, 4.5 and 4, 4 and 2.5
    both = EngineSpeed(weights=2.5, cached=0.5, sequence=1.0, pair=0.5)
    assert ends([2, 3], prompt=1, speed=both) == [3.5 + 4.5, 3.5 + 4.5 + 4.0]


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 5), st.integers(0, 7))
def test_every_token_is_decoded_once_and_attends_to_all_before_it(lengths, slots, prompt):
    tokens = ends(lengths, slots=slots, prompt=prompt, speed=EngineSpeed(sent=1.0))
    assert max(tokens) == sum(lengths)
    attended = ends(lengths, slots=slots, prompt=prompt, speed=EngineSpeed(pair=1.0))
    assert max(attended) == sum(prompt * n + n * (n - 1) // 2 for n in lengths)


@given(LENGTHS, st.integers(1, 5), st.data())
def test_more_work_is_never_done_sooner(lengths, slots, data):
    at = data.draw(st.integers(0, len(lengths) - 1))
    longer = [n + 3 * (i == at) for i, n in enumerate(lengths)]
    speed = EngineSpeed(weights=1.0, cached=0.1, sequence=0.2, pair=0.1)
    assert max(ends(longer, slots=slots)) >= max(ends(lengths, slots=slots))
    assert max(ends(longer, slots=12, speed=speed)) >= max(ends(lengths, slots=12, speed=speed))
    assert max(ends(lengths, slots=slots)) >= max(ends(lengths, slots=slots + 1))
    slower = ends(lengths, slots=slots, speed=speed._replace(weights=2.0))
    assert min(np.subtract(slower, ends(lengths, slots=slots, speed=speed))) >= 0


def test_two_engines_share_prompts_and_wait_for_the_last_answer():
    lengths = np.array([1, 3, 5, 2, 4, 4, 1, 1])
    generation = simulate_generation(
        lengths,
        prompt=2,
        most=9,
        group=2,
        engines=2,
        slots=2,
        speed=EngineSpeed(step=1.0, prompt=0.5),
    )
    # prompts 0 and 2 go to one engine, 1 and 3 to the other; two tokens of a prompt take 1 s
    assert generation.answers.tolist() == [2, 5, 7, 3, 7, 9, 5, 6]
    assert generation.engines.tolist() == [9, 7]
    assert generation.seconds == 9


def test_an_engine_without_requests_has_nothing_to_do():
    sizes = {"prompt": 0, "most": 9, "group": 2, "slots": 2}
    generation = simulate_generation(np.array([4, 3]), engines=2, speed=SECOND, **sizes)
    assert generation.engines.tolist() == [4, 0]


def test_dealing_is_even_but_for_the_routers_slack():
    places = assign_engines(np.arange(1024) // 16, 4096, 8)
    assert set(places) == set(range(8))
    assert np.ptp(np.bincount(places)) <= 16
    assert max(len(set(places[at : at + 16])) for at in range(0, 1024, 16)) <= 2


def test_the_tail_is_the_time_of_the_last_tenth():
    generation = Generation(np.array([2.0] * 9 + [10.0]), np.array([10.0]))
    assert generation.tail == pytest.approx(0.8)
    assert Generation(np.full(10, 3.0), np.array([3.0])).tail == 0


def test_lengths_are_drawn_by_seed_and_cut():
    drawn = draw_lengths(0, 20_000, median=100, sigma=1.0, most=500)
    assert (drawn == draw_lengths(0, 20_000, median=100, sigma=1.0, most=500)).all()
    assert drawn.min() >= 1
    assert drawn.max() == 500
    assert np.median(drawn) == pytest.approx(100, rel=0.03)
    assert (drawn == 500).mean() == pytest.approx(0.0538, rel=0.1)  # of a normal, above ln 5


def test_a_sequence_holds_its_prompt_and_half_of_its_answer():
    assert mean_context(np.array([10, 10]), 3) == 8
    assert mean_context(np.array([2, 6]), 0) == (2 * 1 + 6 * 3) / 8


def test_an_engines_pace_is_that_of_its_weights_cache_and_operations():
    gpu, alone = GPUS["H200"], engine_speed(SPEC, GPUS["H200"], 1, 8)
    assert cache_bytes(SPEC) == 2 * 2 * SPEC.layers * SPEC.kv_heads * SPEC.head_dim
    assert alone.weights * 0.7 * gpu.bandwidth == pytest.approx(2 * parameter_count(SPEC))
    assert alone.pair * COMPUTE * gpu.flops == pytest.approx(4 * SPEC.layers * 4 * 32)
    assert alone.sent == 0
    shared, wide = engine_speed(SPEC, gpu, 2, 8), engine_speed(SPEC, gpu, 4, 8)
    assert shared.weights == alone.weights / 2
    assert shared.cached == alone.cached / 2
    assert wide.cached == shared.cached  # two key heads: four GPUs hold each twice
    assert shared.step > alone.step
    assert wide.sent == pytest.approx(shared.sent * 1.5)


@pytest.mark.parametrize(
    ("step", "compiler"),
    [
        (StepId("reference", StepKind.INFER), "CPU"),
        pytest.param(
            StepId("actor", StepKind.ACCUMULATE),
            "GPU",
            marks=[
                pytest.mark.gpu_compiler,
                pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/planning/"),
            ],
        ),
    ],
    ids=str,
)
def test_the_bytes_of_training_are_those_of_the_compiled_steps(tmp_path, step, compiler):
    (tmp_path / "config.json").write_text(json.dumps(make_config(SPEC)))
    (tmp_path / "run.yaml").write_text(YAML.replace("PATH", str(tmp_path)))
    config = load(TrainConfig, tmp_path / "run.yaml", ["model.attention=xla"])
    if compiler == "CPU":  # it makes no reduce-scatters
        shapes = plan_shapes(config)
        executable = with_float16(shapes.trace[step]().lower()).compile()
    else:
        shapes = plan_shapes(config, gpu_devices("H200", 8))
        executable = shapes.trace[step]().lower().compile(compiler_options=UNTUNED)
    compiled = count_operations(executable.as_text(), shapes.layouts.train.mesh.shape).sent
    ours = bytes_sent(SPEC, TrainMesh(2, 2, 2, 64), update=step.kind is StepKind.ACCUMULATE)
    for over, size in ours.items():
        assert compiled[over] == pytest.approx(size, rel=0.03), over
    assert sum(compiled.values()) == pytest.approx(sum(ours.values()), rel=0.03)


def test_a_group_leaves_the_node_when_it_is_wider_than_one():
    sent = bytes_sent(SPEC, TrainMesh(4, 8, 2, 64), update=True)
    away = {over.axes: over.leaves_node for over in sent}
    assert away == {("tensor",): False, ("fsdp",): True, ("data",): True}
    assert not any(
        over.leaves_node for over in bytes_sent(SPEC, TrainMesh(2, 2, 2, 64), update=True)
    )


def test_training_on_one_gpu_is_its_operations():
    lengths, gpu, mesh = np.full(1000, 90), GPUS["H200"], TrainMesh(1, 1, 1, 10**6)
    flops = forward_flops(SPEC, 100_000, 100_000 * 50)
    passed = train_seconds(SPEC, lengths, 10, mesh, gpu, update=False)
    assert passed == pytest.approx(flops / (COMPUTE * gpu.flops))
    assert train_seconds(SPEC, lengths, 10, mesh, gpu, update=True) == pytest.approx(4 * passed)


def test_more_gpus_train_faster_and_smaller_micro_batches_slower():
    def took(data, tokens):
        mesh = TrainMesh(data, 8, 1, tokens)
        return train_seconds(SPEC, np.full(4096, 60), 4, mesh, GPUS["H200"], update=True)

    assert took(8, 64) < took(4, 64) < took(4, 32)


def test_experts_are_refused():
    moe = MoeSpec(experts=4, experts_per_token=2, ff_width=8)
    spec = dataclasses.replace(SPEC, moe=moe)
    with pytest.raises(ValueError, match="got a mixture of experts, expected a dense model"):
        bytes_sent(spec, TrainMesh(1, 1, 1, 64), update=True)


def test_a_push_takes_as_long_as_its_busiest_link():
    def push(copies, senders):
        return sync_seconds(12.0, shared_by=4, copies=copies, senders=senders, rate=3.0)

    assert push(1, 8) == 1  # receivers: 3 bytes each
    assert push(1, 2) == 2
    assert push(32, 2) == 64


def test_a_steps_phases_follow_each_other():
    generated = Generation(np.array([6.0, 2.0]), np.array([6.0, 2.0]))
    shared = step_times(generated, (1.0, 2.0), 1.0, samplers=8, trainers=8, gpus=8)
    assert shared[:4] == (6, 1, 2, 1)
    assert shared.total == 10
    assert shared.idle == pytest.approx(0.2)  # half of the GPUs for 4 s
    apart = step_times(generated, (2.0, 4.0), 1.0, samplers=4, trainers=4, gpus=8)
    assert apart.total == 13
    assert apart.idle == pytest.approx(1 - (4 * 4 + 4 * 6 + 8) / (8 * 13))
    assert apart.overlapped == 7
    assert StepTimes(3.0, 2.0, 4.0, 0.5, 0.0).overlapped == 6.5


def test_the_benchmark_places_every_gpu_and_finds_room():
    spec = scaling.read_spec(str(scaling.CONFIGS / scaling.SMALL.name))
    lengths = draw_lengths(0, 256, median=400, sigma=1.0, most=4096)
    rows = []
    for where in scaling.placements(scaling.SMALL, 16):
        assert where.colocated == (where.trainers == where.samplers == 16)
        assert where.colocated or where.trainers + where.samplers == 16
        if where.trainers % 8 == 0:
            assert scaling.mesh_of(scaling.SMALL, where.trainers).devices == where.trainers
            rows.append(scaling.simulate(scaling.SMALL, spec, lengths, where))
    assert all(row.slots > 8 and row.level.total < row.step.total for row in rows)
    assert min(rows, key=lambda row: row.step.total).placement.colocated
