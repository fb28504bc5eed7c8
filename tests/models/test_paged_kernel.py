"""When decoding reads pages in place, and what speaks against it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.models.attention import Attending
from jaxrl_llm.models.kernels import DeviceInfo, Heads
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.paged_attention import (
    attend_gathered,
    choose_paged_kernel,
    paged_difference,
    paged_heads,
)
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.specs import tiny_spec

HOPPER = DeviceInfo("cuda", (9, 0), (0, 11, 2))
SPEC = tiny_spec(heads=4, kv_heads=2, head_dim=16)


def on(devices=1, **axes):
    return Layout(make_mesh(axes, jax.devices()[:devices]))


def choose(spec=SPEC, layout=None, dtype="bfloat16", device=HOPPER, kernel=attend_gathered):
    return choose_paged_kernel("auto", spec, layout or on(), dtype, device=device, kernel=kernel)


def test_a_kernel_that_agrees_is_taken():
    choice = choose()
    assert choice.kernel is attend_gathered
    assert choice.reason.startswith("its results differ from XLA's in float32 by up to 0.")


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
def test_the_kernel_agrees_where_it_can_be_interpreted(is_int8):
    heads = Heads(4, 2, 16, (Attending(softcap=3.0, window=20),), is_int8=is_int8)
    kernel = functools.partial(attend_pages, interpret=True)
    assert paged_difference(kernel, heads, "float32") < 1e-5


def test_sinks_are_tried():
    """A kernel that knows of none is found out, where a model has them."""

    def without(q, pages, table, positions, options, **more):
        return attend_gathered(q, pages, table, positions, options._replace(sinks=None), **more)

    heads = paged_heads(tiny_spec(heads=4, head_dim=32, attention_sinks=True), on())
    assert hash(heads) == hash(heads._replace())  # decisions are kept by it
    assert paged_difference(without, heads, "float32") > 0.1
    assert paged_difference(attend_gathered, heads, "float32") == 0


@pytest.mark.parametrize("latent", [None, 16])
def test_scales_are_tried_with_int8(latent):
    """A kernel that knows of no scales is right without int8, and is found out with it."""

    def unscaled(q, pages, *arguments, **options):
        ones = jax.tree.map(jnp.ones_like, (pages.key_scales, pages.value_scales))
        pages = pages._replace(key_scales=ones[0], value_scales=ones[1])
        return attend_gathered(q, pages, *arguments, **options)

    heads = Heads(4, 1, 32, (Attending(),), latent=latent)
    assert paged_difference(unscaled, heads, "float32") == 0
    assert paged_difference(unscaled, heads._replace(is_int8=True), "float32") > 0.5
    assert paged_difference(attend_gathered, heads._replace(is_int8=True), "float32") == 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    {
        "a CPU": ({"device": DeviceInfo("cpu", (), (0, 11, 2))}, "the devices are cpu, not cuda"),
        "an old GPU": (
            {"device": DeviceInfo("cuda", (7, 5), (0, 11, 2))},
            "compute capability 7.5, it needs 8.0 (Ampere) or later",
        ),
        "an odd dtype": (
            {"dtype": "int8"},
            "the engine's dtype is int8, it needs one of bfloat16, float16, float32",
        ),
        "an odd width": (
            {"spec": dataclasses.replace(SPEC, head_dim=20)},
            "heads are 20 wide, it needs a multiple of 16",
        ),
    }.values(),
)
def test_what_speaks_against_it(changed, reason):
    assert choose(**changed) == ("xla", reason, None)


def test_heads_that_devices_cannot_share():
    layout = on(4, tensor=4)
    assert choose(layout=layout).reason == "2 key/value heads can't be split over tensor=4 devices"
    assert paged_heads(SPEC, on(2, tensor=2))[:2] == (2, 1)


def test_a_latent_is_shared_by_all_devices():
    latent = LatentSpec(query_rank=None, kv_rank=32, nope_width=8, rope_width=16, value_width=8)
    spec = tiny_spec(heads=4, kv_heads=4, head_dim=24, qk_norm=False, latent=latent)
    heads = paged_heads(spec, on(2, tensor=2))
    assert (*heads[:3], heads.latent) == (2, 1, 48, 32)


def test_a_layer_of_each_kind_is_tried():
    spec = dataclasses.replace(SPEC, layers=2, window=8, windowed_layers=(True, False))
    heads = paged_heads(spec, on())
    assert [options.window for options in heads.options] == [None, 8]


def test_a_kernel_that_is_wrong_or_fails_is_not_taken():
    def wrong(*arguments, **options):
        return attend_gathered(*arguments, **options) * jnp.bfloat16(1.1)

    def broken(*arguments, **options):
        raise RuntimeError("no shared memory\nleft")

    assert choose(kernel=wrong).reason.endswith("at most 4% is rounding")
    assert choose(kernel=broken) == (
        "xla",
        "the kernel failed: RuntimeError: no shared memory",
        None,
    )


def test_it_can_be_asked_away():
    choice = choose_paged_kernel("xla", SPEC, on(), "bfloat16", device=HOPPER)
    assert choice == ("xla", "XLA's attention was asked for", None)
