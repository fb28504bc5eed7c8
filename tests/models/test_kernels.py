"""cuDNN's packed kernel as it is called, and the decisions whether kernels are taken.

GPUs run the rest.
"""

import dataclasses
import functools
import logging

import jax
import jax._src.cudnn.fused_attention_stablehlo as cudnn
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm.models.paged_attention as paged
from jaxrl_llm import kernel_choice
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
    heads_on,
    objection,
)
from jaxrl_llm.models.moe import grouped, grouped_triton
from jaxrl_llm.models.spec import LoraSpec
from jaxrl_llm.models.vision.tower import tower_heads_on, tower_layout
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.training import load_model
from tests.refusals import refuses
from tests.specs import DENSE, LATENT, MOE, tiny_vision

HOPPER = DeviceInfo("cuda", (9, 0), (0, 11, 2))
AMPERE = DeviceInfo("cuda", (8, 0), (0, 10, 2))
CPU, OLD = DeviceInfo("cpu", (), (0, 11, 2)), DeviceInfo("cuda", (7, 5), (0, 11, 2))
WIDE = dataclasses.replace(DENSE, head_dim=16)
ROWS = [[5, 1, 9, 0], [15, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 12]]


def layout_on(by="heads", **sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return Layout(make_mesh(sizes, devices), by)


ONE = layout_on()


def packed(rows, length=16):
    """Lay segments of these sizes out as ids; what is left of a row is padding."""
    ids = np.zeros((len(rows), length), np.int32)
    for r, sizes in enumerate(rows):
        ids[r, : sum(sizes)] = np.repeat(np.arange(len(sizes)) + 1, sizes)
    return ids


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


def random_heads():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(4, 16, n, 8)), jnp.float32) for n in (4, 2, 2, 4)]


def test_the_kernel_is_told_the_segments_and_padding_stays_out(monkeypatch):
    monkeypatch.setattr(cudnn, "dot_product_attention", described)
    ids = jnp.array(packed(ROWS))
    q, k, v, out = random_heads()
    options, real = Attending(scale=0.3), (ids != 0)[:, :, None, None]

    @functools.partial(jax.jit, static_argnums=0)
    def results(kernel, q, k, v, out):
        mixed, backward = jax.vjp(lambda *x: kernel(*x, ids, options), q, k, v)
        return mixed, *backward(out)

    got, expected = (results(kernel, q, k, v, out) for kernel in (attend_cudnn, attend))
    for a, b in zip(got, (jnp.where(real, expected[0], 0), *expected[1:]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_too_many_segments_are_never_silently_wrong(monkeypatch):
    assert MOST_SEGMENTS == MAX_SEQUENCES_PER_ROW
    monkeypatch.setattr(cudnn, "dot_product_attention", described)
    ids = jnp.arange(1, MOST_SEGMENTS + 3)[None]
    x = jnp.ones((1, MOST_SEGMENTS + 2, 1, 8))
    lost = jnp.isnan(jax.jit(attend_cudnn)(x, x, x, ids)).any((0, 2, 3))
    assert lost.tolist() == [False] * MOST_SEGMENTS + [True] * 2


# ------------------------------------------------------------------------- what speaks against one

HEADS = Heads(16, 8, 128, (PLAIN,))
LAST = Heads(16, 1, 48, (PLAIN,), latent=40)


def test_what_speaks_against_kernels():
    speaks = functools.partial(objection, dtype="bfloat16", device=HOPPER)
    ours, paged_speaks = grouped.grouped_objection, paged.paged_objection
    every = [  # and a part of each
        (speaks(HEADS), None),
        (speaks(HEADS, device=CPU), "cpu, not cuda"),
        (speaks(HEADS, device=DeviceInfo("cuda", (8, 9), (0, 11, 2))), "capability 8.9"),
        (speaks(HEADS, device=DeviceInfo("cuda", (9, 0), (0, 10, 2))), "jax 0.10.2"),
        (speaks(HEADS, dtype="float32"), "float32"),
        (speaks(HEADS._replace(width=100)), "100 wide"),
        (speaks(HEADS._replace(options=(Attending(window=64),))), "window"),
        (speaks(HEADS._replace(options=(Attending(softcap=5.0),))), "soft-cap"),
        (speaks(HEADS._replace(has_sinks=True)), "sinks"),
        (ours("bfloat16", AMPERE), None),
        (ours("bfloat16", OLD), "capability 7.5"),
        (ours("float32", AMPERE), "float32"),
        (paged_speaks(HEADS, "bfloat16", OLD), "capability 7.5"),
        (paged_speaks(HEADS._replace(width=20), "bfloat16", HOPPER), "20 wide"),
        (paged_speaks(LAST, "bfloat16", HOPPER), "40 wide"),
        (heads_on(WIDE, layout_on(data=2, tensor=2))[:2], (2, 1)),
        (heads_on(WIDE, layout_on(context=2, tensor=2))[:2], (1, 1)),
        (heads_on(WIDE, layout_on("keys", context=2)), "context_by=keys"),
        (heads_on(WIDE, layout_on(tensor=4)), "2 key/value heads"),
        (heads_on(WIDE, layout_on(stage=2)), "stage=2"),
        (paged.paged_heads(WIDE, layout_on(tensor=4)), "2 key/value heads"),
        (paged.paged_heads(LATENT, layout_on(tensor=2))[:2], (2, 1)),
    ]
    for number, (given, expected) in enumerate(every):
        if isinstance(expected, str):
            assert expected in given, number
        else:
            assert given == expected, number


def test_kernels_are_tried_with_what_a_device_has():
    sinks = dataclasses.replace(WIDE, attention_sinks=True)
    assert heads_on(sinks, ONE).has_sinks and paged.paged_heads(sinks, ONE).has_sinks
    tower, shared = tiny_vision(hidden_size=32, heads=4), Layout(make_mesh({"tensor": 8}))
    assert not tower_heads_on(tower, ONE).options[0].causal
    assert isinstance(tower_heads_on(tower, shared), str)
    for layout, kernel in ((shared, None), (ONE, attend)):
        assert tower_layout(tower, dataclasses.replace(layout, kernel=attend)).kernel is kernel
    assert kernel_choice.choose_tower_attention("cudnn", tower, ONE, "bfloat16").name == "xla"
    windows = dataclasses.replace(WIDE, window=8, windowed_layers=(True, False))
    assert [options.window for options in paged.paged_heads(windows, ONE).options] == [None, 8]
    spec = dataclasses.replace(MOE, moe=dataclasses.replace(MOE.moe, ff_width=24))
    for sizes, more, expected in (
        ({"tensor": 4}, (), {(16, 6), (6, 16)}),
        ({"tensor": 5}, (), {(16, 24), (24, 16)}),
        ({}, ("expert_up",), {(16, 24), (24, 16), (16, 4), (4, 24)}),
        ({}, ("expert_down", "up"), {(16, 24), (24, 16), (24, 4), (4, 16)}),
    ):
        lora = LoraSpec(rank=4, alpha=8.0, targets=more) if more else None
        widths = grouped.grouped_widths(dataclasses.replace(spec, lora=lora), layout_on(**sizes))
        assert set(widths) == expected, sizes


# ---------------------------------------------------------------------- taken, if it agrees


def heedless(q, k, v, segment_ids, options=PLAIN):
    return attend(q, k, v, jnp.ones_like(segment_ids), options)


def one_sided(q, k, v, segment_ids, options=PLAIN):
    return attend(q, jax.lax.stop_gradient(k), v, segment_ids, options)


def transposing(x, matrices, sizes, *, transposed, between):
    """Right unless matrices are interleaved, as on a mesh, and transposed."""
    products = grouped.BLOCKED.multiply(x, matrices, sizes, transposed=transposed, between=between)
    return products * 1.05 if between and transposed else products


def forgetful(x, y, sizes, *, between):
    """Leaves out the first rows."""
    return grouped.BLOCKED.sum_outer_products(x.at[:100].set(0), y, sizes, between=between)


def tenth_too_much(*arguments, **options):
    return paged.attend_gathered(*arguments, **options) * jnp.bfloat16(1.1)


def broken(*_, **__):
    raise RuntimeError("register spilling\nand more")


def choose(kind, asked, kernel, *, spec=WIDE, device=HOPPER, dtype="bfloat16"):
    if kind == "cudnn":
        return choose_kernel(asked, heads_on(spec, ONE), dtype, device=device, kernel=kernel)
    if kind == "paged":
        return paged.choose_paged_kernel(asked, spec, ONE, dtype, device=device, kernel=kernel)
    return grouped.choose_grouped_kernels(asked, MOE, ONE, dtype, device=device, kernels=kernel)


KERNELS = {
    "cudnn": (attend, [heedless, one_sided, broken]),
    "paged": (paged.attend_gathered, [tenth_too_much, broken]),
    "grouped": (
        grouped.BLOCKED,
        [
            grouped.BLOCKED._replace(multiply=transposing),
            grouped.BLOCKED._replace(sum_outer_products=forgetful),
            grouped.BLOCKED._replace(multiply=broken),
        ],
    ),
}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_is_taken_when_it_agrees_and_refused_when_not(kind, monkeypatch):
    monkeypatch.setattr(grouped, "TRIED", grouped.TRIED[1:])  # groups of more than one tile
    agreeing, others = KERNELS[kind]
    choice = choose(kind, "auto", agreeing)
    assert (choice.name, choice.kernel) == ("cudnn" if kind == "cudnn" else "triton", agreeing)
    for kernel in others:
        choice = choose(kind, "auto", kernel)
        assert (choice.name, choice.kernel) == ("xla", None), kernel
        assert ("RuntimeError" in choice.reason) == (kernel is others[-1])
        assert "\n" not in choice.reason
    assert choose(kind, "xla", others[-1]).name == "xla"
    if kind != "paged":  # which the engine can do without
        with pytest.raises(ValueError, match="RuntimeError"):
            choose(kind, "cudnn" if kind == "cudnn" else "triton", others[-1])
    if kind != "cudnn":
        untried = choose(kind, "auto", others[-1], device=HOPPER._replace(is_here=False))
        assert (untried.name, untried.kernel) == ("triton", others[-1])


def test_kernels_are_tried_on_a_batch_where_there_are_stages(monkeypatch):
    monkeypatch.setattr(grouped, "TRIED", grouped.TRIED[:1])
    tried = grouped.BLOCKED, [(16, 16)], "bfloat16"
    assert grouped.grouped_difference(*tried, is_batched=True) < 2**-8
    difference = lambda *_, is_batched: float(is_batched)  # noqa: E731
    monkeypatch.setattr(grouped, "grouped_difference", difference)
    given = {"device": AMPERE, "kernels": grouped.BLOCKED}
    for layout, name in ((layout_on(stage=2), "xla"), (layout_on(data=2), "triton")):
        assert grouped.choose_grouped_kernels("auto", MOE, layout, "bfloat16", **given).name == name


def test_scales_of_int8_are_tried():
    """A kernel that knows of none is found out."""

    def unscaled(q, pages, *arguments, **options):
        ones = jax.tree.map(jnp.ones_like, (pages.key_scales, pages.value_scales))
        pages = pages._replace(key_scales=ones[0], value_scales=ones[1])
        return paged.attend_gathered(q, pages, *arguments, **options)

    heads = Heads(4, 1, 32, (Attending(),), latent=16, has_sinks=True)
    assert hash(heads) == hash(heads._replace())  # decisions are kept by it
    assert paged.paged_difference(unscaled, heads, "float32") == 0
    narrow = heads._replace(is_int8=True)
    assert paged.paged_difference(unscaled, narrow, "float32") > 0.1
    assert paged.paged_difference(paged.attend_gathered, narrow, "float32") == 0


# --------------------------------------------------------------------------------- where they run


def test_each_device_of_a_mesh_runs_the_kernel_on_its_part():
    seen = []

    def kernel(q, k, v, segment_ids, options=PLAIN):
        seen.append((q.shape, k.shape))
        return attend(q, k, v, segment_ids, options)

    layout, ids, given = layout_on(tensor=2, context=2), jnp.array(packed(ROWS)), random_heads()[:3]

    def run(layout):
        def loss(q, k, v):
            pieces = [layout.split_context(x) for x in (q, k, v, ids)]
            mixed = attend_pieces(*pieces, layout=layout)
            real = (pieces[3] != 0)[:, :, None, None]
            return jnp.square(jnp.where(real, mixed, 0)).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*given)

    got, expected = run(dataclasses.replace(layout, kernel=kernel)), run(layout)
    assert set(seen) == {((4, 16, 1, 8), (4, 16, 1, 8))}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


@pytest.fixture
def undecided(monkeypatch):
    monkeypatch.setattr(kernel_choice, "_DECIDED", {})


def test_a_run_decides_once_and_refuses_what_can_not_be(undecided, caplog):
    with caplog.at_level(logging.DEBUG, "jaxrl_llm"):
        for _ in range(2):
            config = ModelConfig(path="-", dtype="bfloat16")
            settings = load_model.forward_config(config, Decoder(MOE), ONE)
    assert settings.kernel is settings.grouped_kernels is None
    assert len(caplog.records) == 2  # of attention and experts
    asked = ModelConfig(path="-", attention="cudnn")
    with refuses("model.attention"):
        load_model.forward_config(asked, Decoder(MOE), ONE)
    with refuses("model.experts"):
        kernel_choice.choose_experts("triton", MOE, ONE, "bfloat16")
    for value in ("xla", "triton"):
        asked = ModelConfig(path="-", experts=value)
        with refuses("model.experts"):
            load_model.check_expert_keys(asked, DENSE, is_adapted=False)


def test_processes_decide_alike(undecided, monkeypatch):
    monkeypatch.setattr(kernel_choice, "device_of", lambda _: AMPERE._replace(is_here=False))
    assert kernel_choice.choose_experts("auto", MOE, ONE, "float16") is grouped_triton.TRITON
    other = ["xla", "the kernels failed: over there"]
    monkeypatch.setattr(distributed, "all_gather", lambda own: [own, other])
    assert kernel_choice.choose_experts("auto", MOE, ONE, "bfloat16") is None
