"""cuDNN's packed kernel as it is called, and the decision whether it is; GPUs run the rest."""

import dataclasses
import logging

import jax
import jax._src.cudnn.fused_attention_stablehlo as cudnn
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import kernel_choice
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.sections import ModelConfig
from jaxrl_llm.data.packing import MAX_SEQUENCES_PER_ROW
from jaxrl_llm.models.attention import PLAIN, Attending, attend
from jaxrl_llm.models.context import attend_pieces
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.kernels import (
    MOST_SEGMENTS,
    DeviceInfo,
    Heads,
    attend_cudnn,
    choose_kernel,
    find_segments,
    heads_on,
    objection,
)
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import tower_heads_on, tower_layout
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.training import load_model

HOPPER = DeviceInfo("cuda", (9, 0), (0, 11, 2))
SPEC = ModelSpec(
    vocab_size=8,
    hidden_size=4,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ff_width=6,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=32,
)
ROWS = [[5, 1, 9, 0], [15, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 12]]


def packed(rows, length=16):
    """Lay segments of these sizes out as ids; what is left of a row is padding."""
    ids = np.zeros((len(rows), length), np.int32)
    for r, sizes in enumerate(rows):
        at = 0
        for number, size in enumerate(s for s in sizes if s):
            ids[r, at : at + size] = number + 1
            at += size
    return ids


def one_device(**changed):
    return Layout(make_mesh({}, jax.devices()[:1]), **changed)


def test_sizes_and_starts_equal_a_loop():
    rng = np.random.default_rng(0)
    rows = [rng.multinomial(14, np.ones(n) / n).tolist() for n in (1, 2, 5, 9)] + ROWS
    ids = packed(rows)
    ids[1] = np.roll(ids[1], 2)  # padding may stand anywhere
    sizes_of, starts_of, _ = find_segments(jnp.array(ids), 9)
    for r, row in enumerate(ids):
        starts = [i for i in range(16) if row[i] and (i == 0 or row[i] != row[i - 1])]
        sizes = [int((row == row[i]).sum()) for i in starts]
        none = 9 - len(starts)
        assert starts_of[r].tolist() == starts + [-1] * (none + 1)
        assert sizes_of[r].tolist() == sizes + [-1] * none
    assert starts_of.dtype == sizes_of.dtype == jnp.int32
    assert MOST_SEGMENTS == MAX_SEQUENCES_PER_ROW


def described(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """Compute what the kernel is documented to; what no segment covers is NaN, gradients too."""
    assert mask_type is cudnn.MaskType.PADDING_CAUSAL
    assert (q_seqlen is kv_seqlen) and (q_offsets is kv_offsets)
    assert q_offsets.shape[1] == q_seqlen.shape[1] + 1
    place = jnp.arange(q.shape[1])
    start, size = q_offsets[:, :-1, None], q_seqlen[:, :, None]
    inside = (place >= start) & (place < start + size) & (start >= 0)
    same = jnp.einsum("rml,rms->rls", inside, inside).astype(bool)
    allowed = same & (place[:, None] >= place[None, :])
    nothing = jnp.where(inside.any(1), 0.0, jnp.nan)[:, :, None, None]

    def mix(q, k, v):
        shared = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, shared, axis=2), jnp.repeat(v, shared, axis=2)
        scores = jnp.einsum("rlnh,rsnh->rnls", q, k) * scale
        weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -1e30), axis=-1)
        return jnp.einsum("rnls,rsnh->rlnh", weights, v)

    @jax.custom_vjp
    def kernel(q, k, v):
        return mix(q, k, v) + nothing

    def backward(saved, cotangent):
        return tuple(grad + nothing for grad in jax.vjp(mix, *saved)[1](cotangent))

    kernel.defvjp(lambda *given: (kernel(*given), given), backward)
    return kernel(q, k, v)


def test_the_kernel_is_told_the_segments_and_padding_stays_out(monkeypatch):
    monkeypatch.setattr(cudnn, "dot_product_attention", described)
    ids = jnp.array(packed(ROWS))
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, out = (
        jax.random.normal(key, (4, 16, n, 8)) for key, n in zip(keys, (4, 2, 2, 4), strict=True)
    )
    options, real = Attending(scale=0.3), (ids != 0)[:, :, None, None]

    def results(kernel):
        mixed, backward = jax.vjp(lambda *x: kernel(*x, ids, options), q, k, v)
        return mixed, *backward(out)

    got, expected = jax.jit(results, static_argnums=0)(attend_cudnn), results(attend)
    for a, b in zip(got, (jnp.where(real, expected[0], 0), *expected[1:]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_too_many_segments_are_never_silently_wrong(monkeypatch):
    monkeypatch.setattr(cudnn, "dot_product_attention", described)
    ids = jnp.arange(1, MOST_SEGMENTS + 3)[None]
    x = jnp.ones((1, MOST_SEGMENTS + 2, 1, 8))
    lost = jnp.isnan(attend_cudnn(x, x, x, ids)).any((0, 2, 3))
    assert lost.tolist() == [False] * MOST_SEGMENTS + [True] * 2


PLAIN_HEADS = Heads(16, 8, 128, (PLAIN,))


@pytest.mark.parametrize(
    ("heads", "dtype", "machine", "expected"),
    [
        (PLAIN_HEADS, "bfloat16", HOPPER, None),
        (PLAIN_HEADS, "float16", DeviceInfo("cuda", (10, 0), (0, 12, 0)), None),
        (PLAIN_HEADS, "bfloat16", DeviceInfo("cpu", (), (0, 11, 2)), "cpu, not cuda"),
        (PLAIN_HEADS, "bfloat16", DeviceInfo("cuda", (8, 9), (0, 11, 2)), "capability 8.9"),
        (PLAIN_HEADS, "bfloat16", DeviceInfo("cuda", (9, 0), (0, 10, 2)), "jax 0.10.2"),
        (PLAIN_HEADS, "float32", HOPPER, "dtype is float32"),
        (PLAIN_HEADS._replace(width=100), "bfloat16", HOPPER, "100 wide"),
        (PLAIN_HEADS._replace(width=264), "bfloat16", HOPPER, "264 wide"),
        (PLAIN_HEADS._replace(options=(Attending(window=64),)), "bfloat16", HOPPER, "window of 64"),
        (
            PLAIN_HEADS._replace(options=(Attending(softcap=50.0),)),
            "bfloat16",
            HOPPER,
            "soft-cap of 50",
        ),
        (PLAIN_HEADS._replace(has_sinks=True), "bfloat16", HOPPER, "attention sinks"),
    ],
)
def test_what_speaks_against_the_kernel(heads, dtype, machine, expected):
    reason = objection(heads, dtype, machine)
    assert reason is None if expected is None else expected in reason


def test_heads_are_asked_for_with_their_sinks():
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    assert not heads_on(SPEC, layout).has_sinks
    assert heads_on(dataclasses.replace(SPEC, attention_sinks=True), layout).has_sinks


@pytest.mark.parametrize(
    ("sizes", "context", "expected"),
    [
        ({"data": 2, "tensor": 2}, "heads", (2, 1)),
        ({"context": 2, "tensor": 2}, "heads", (1, 1)),
        ({"context": 2}, "keys", "mesh.context_by=keys"),
        ({"context": 2}, "ring", "mesh.context_by=ring"),
        ({"tensor": 4}, "heads", "2 key/value heads"),
        ({"stage": 2}, "heads", "stage=2"),
    ],
)
def test_where_the_kernel_can_stand(sizes, context, expected):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    result = heads_on(SPEC, Layout(make_mesh(sizes, devices), context))
    assert expected in result if isinstance(expected, str) else result[:2] == expected


def heedless(q, k, v, segment_ids, options=PLAIN):
    return attend(q, k, v, jnp.ones_like(segment_ids), options)


def one_sided(q, k, v, segment_ids, options=PLAIN):
    return attend(q, jax.lax.stop_gradient(k), v, segment_ids, options)


def broken(q, k, v, segment_ids, options=PLAIN):
    raise RuntimeError("No valid engine configs for this graph\nand more")


@pytest.mark.parametrize(
    ("kernel", "name", "reason"),
    [
        (attend, "cudnn", "differ from XLA's in float32 by up to"),
        (heedless, "xla", "at most 4% is rounding"),
        (one_sided, "xla", "forward or backward"),
        (broken, "xla", "failed: RuntimeError: No valid engine configs for this graph"),
    ],
)
def test_a_kernel_is_taken_when_it_agrees_and_refused_when_not(kernel, name, reason):
    heads = heads_on(SPEC, one_device())
    choice = choose_kernel("auto", heads, "bfloat16", device=HOPPER, kernel=kernel)
    assert choice.name == name
    assert choice.kernel is (kernel if name == "cudnn" else None)
    assert reason in choice.reason


def test_a_vision_tower_has_a_kernel_that_agrees_without_causality():
    tower = VisionSpec(
        **dict(kind="qwen3", layers=1, hidden_size=32, heads=4, ff_width=8, patch=2, merge=2),
        **dict(frames_per_patch=2, out_size=4, position_side=4, image_id=1),
        **dict(image_mean=(0.5,) * 3, image_std=(0.5,) * 3),
    )

    def causal(q, k, v, segment_ids, options=PLAIN):
        return attend(q, k, v, segment_ids, options._replace(causal=True))

    def choose(kernel, tower=tower, layout=None, asked="auto"):
        heads = tower_heads_on(tower, layout or one_device())
        return choose_kernel(asked, heads, "bfloat16", device=HOPPER, kernel=kernel)

    assert choose(attend).kernel is attend
    assert "differ" in choose(causal).reason
    narrow = dataclasses.replace(tower, heads=8)
    assert "heads are 4 wide" in choose(attend, narrow).reason
    shared = Layout(make_mesh({"tensor": 8}))
    assert "4 heads can't be split over 8 devices" in choose(attend, layout=shared).reason
    assert choose(attend, asked="xla").reason == "it was asked for"
    wished = kernel_choice.choose_tower_attention("cudnn", tower, one_device(), "bfloat16")
    assert wished == ("xla", "the devices are cpu, not cuda", None)
    assert tower_layout(tower, dataclasses.replace(one_device(), kernel=attend)).kernel is attend
    assert tower_layout(tower, dataclasses.replace(shared, kernel=attend)).kernel is None


def test_xla_is_not_questioned_and_cudnn_is_no_wish():
    heads = heads_on(SPEC, one_device())
    choice = choose_kernel("xla", heads, "bfloat16", device=HOPPER, kernel=broken)
    assert (choice.name, choice.kernel) == ("xla", None)
    with pytest.raises(ValueError, match=r"failed: RuntimeError.*expected auto or xla"):
        choose_kernel("cudnn", heads, "bfloat16", device=HOPPER, kernel=broken)


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"fsdp": 2, "context": 2}])
def test_each_device_of_a_mesh_runs_the_kernel_on_its_part(sizes):
    seen = []

    def kernel(q, k, v, segment_ids, options=PLAIN):
        seen.append((q.shape, k.shape))
        return attend(q, k, v, segment_ids, options)

    mesh = make_mesh(sizes, jax.devices()[:4])
    ids = jnp.array(packed(ROWS))
    keys = jax.random.split(jax.random.key(0), 3)
    given = [jax.random.normal(k, (4, 16, n, 8)) for k, n in zip(keys, (4, 2, 2), strict=True)]

    def run(layout):
        def loss(q, k, v):
            pieces = [layout.split_context(x) for x in (q, k, v, ids)]
            mixed = attend_pieces(*pieces, layout=layout)
            real = (pieces[3] != 0)[:, :, None, None]
            return jnp.square(jnp.where(real, mixed, 0)).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*given)

    got, expected = run(Layout(mesh, kernel=kernel)), run(Layout(mesh))
    assert set(seen) == {((2, 16, 2, 8), (2, 16, 1, 8))}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def test_a_run_says_once_what_attends_and_refuses_what_can_not(monkeypatch, caplog):
    monkeypatch.setattr(kernel_choice, "_DECIDED", {})
    layout = one_device()
    with caplog.at_level(logging.DEBUG, "jaxrl_llm"):
        for _ in range(2):
            settings = load_model.forward_config(ModelConfig(path="-"), Decoder(SPEC), layout)
    assert settings.kernel is None
    assert [r.message for r in caplog.records] == [
        "attention by xla: the devices are cpu, not cuda"
    ]
    with pytest.raises(ConfigError, match=r"^model\.attention=cudnn: .* are cpu, not cuda"):
        load_model.forward_config(ModelConfig(path="-", attention="cudnn"), Decoder(SPEC), layout)
