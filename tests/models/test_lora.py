"""Adapters against the `peft` library, merged against unmerged, and what alone is trained."""

import dataclasses
import json
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import safetensors.numpy
import torch

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.adapter import load_adapter, read_adapter_spec, save_adapter
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.lora import combine_params, find_targets, merge_adapter, split_adapter
from jaxrl_llm.models.parameters import compute_dtypes, declare, init_params
from jaxrl_llm.models.spec import LoraSpec
from jaxrl_llm.sharding.layout import make_mesh, shardings
from jaxrl_llm.sharding.reshard import cast_tree
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.update import Learner, PolicyObjective
from tests.decoders import forward, logits
from tests.guarded import MODEL, UPDATE
from tests.parity.reference import build, their_logits
from tests.specs import DENSE, GPT_OSS, LATENT, SIGMOID, draw, make_batch

pytestmark = [
    # peft asks transformers under a name that transformers has deprecated
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning"),
    # peft looks for its own pattern among modules, and applies it to parameters
    pytest.mark.filterwarnings("ignore:.*ignored.*gate_up_proj:RuntimeWarning"),
    pytest.mark.guards(*MODEL, *UPDATE),
]

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
DELTA = dict(
    layer_types=["linear_attention", "full_attention"],
    **dict(linear_key_head_dim=6, linear_value_head_dim=5),
    **dict(linear_num_key_heads=2, linear_num_value_heads=4),
)
DEEPSEEK = dict(
    **dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1),
    **dict(moe_intermediate_size=12, first_k_dense_replace=1, num_key_value_heads=4, head_dim=4),
    **dict(q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6),
)
FAMILIES = {
    "Qwen3": {},
    "Qwen2": {},
    "Qwen3Next": DELTA | EXPERTS | dict(shared_expert_intermediate_size=14, head_dim=8),
    "Qwen3Moe": EXPERTS,
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "DeepseekV3": DEEPSEEK,
}
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 11))


def their_model(family):
    return build(family, **FAMILIES[family])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory of each family's model, and our spec and parameters read from there."""
    found = {}

    def save(family="Qwen3"):
        if family not in found:
            directory = tmp_path_factory.mktemp(family)
            their_model(family).save_pretrained(directory)
            spec = read_spec(directory)
            found[family] = directory, spec, load_params(directory, spec)
        return found[family]

    return save


def with_peft(model, **options):
    """A model with an adapter both of whose matrices are random."""
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    changed = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return changed.eval()


@partial(jax.jit, static_argnums=1)
def our_logits(params, spec):
    positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    rows = map(jnp.asarray, (TOKENS, positions, np.ones_like(TOKENS)))
    return logits(params, spec, forward(params, spec, *rows))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def adapted(spec, *targets, rank=4, rslora=False):
    lora = LoraSpec(rank=rank, alpha=8.0, targets=find_targets(targets, spec), rslora=rslora)
    return dataclasses.replace(spec, lora=lora)


def random_adapter(spec, scale=0.3):
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda decl: jnp.asarray(rng.normal(scale=scale, size=decl.shape), jnp.float32),
        split_adapter(declare(spec))[0],
    )


# ------------------------------------------------------------------------------------------- peft

FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen2", {"r": 3, "target_modules": "all-linear", "use_rslora": True}),
        ("DeepseekV3", {"r": 3, "target_modules": ["o_proj"], "target_parameters": FUSED[:1]}),
        ("Mixtral", {"r": 3, "target_modules": [], "target_parameters": FUSED[1:]}),
        # gate and up of all experts are one matrix there, whose adapter has twice the rank here
        ("Qwen3Moe", {"r": 3, "target_modules": ["gate_proj", "up_proj", "down_proj", "o_proj"]}),
        (
            "Qwen3",
            {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]}
            | {"rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.down_proj": 1}}
            | {"alpha_pattern": {"v_proj": 7}},
        ),
    ],
)
def test_an_adapter_of_peft_is_ours(family, options, saved, tmp_path):
    model, (_, base, frozen) = their_model(family), saved(family)
    plain = their_logits(model, TOKENS)
    theirs = with_peft(model, **options)
    theirs.save_pretrained(tmp_path)
    spec = read_adapter_spec(tmp_path, base)
    params = combine_params(load_adapter(tmp_path, spec), frozen)
    close(our_logits(*merge_adapter(params, spec)), their_logits(theirs, TOKENS))
    if base.moe is None:
        close(our_logits(params, spec), their_logits(theirs, TOKENS))
    if "rank_pattern" in options:
        assert (spec.lora.rank, spec.lora.scale) == (4, 1.5)
    assert np.abs(their_logits(theirs, TOKENS) - plain).max() > 0.1, "the adapter does something"


@pytest.mark.parametrize(
    ("family", "targets", "rslora"),
    [
        ("DeepseekV3", ["all-linear"], False),
        ("Mixtral", ["expert_up"], False),
        ("Qwen3Next", ["q_proj", "in_proj_*", "shared_expert_gate"], True),
    ],
)
def test_an_adapter_of_ours_is_pefts(family, targets, rslora, saved, tmp_path):
    """There and back; parts of one matrix have one A."""
    model, (_, base, frozen) = their_model(family), saved(family)
    plain = their_logits(model, TOKENS)
    spec = adapted(base, *targets, rank=3, rslora=rslora)
    adapter = random_adapter(spec, scale=0.1 if base.delta else 0.3)
    if family == "Qwen3Next":
        names = {name for stack in adapter.values() for name in stack}
        assert {"delta_query_lora_a", "delta_query_lora_b", "delta_gate_lora_b"} <= names
        assert "delta_gate_lora_a" not in names
    save_adapter(tmp_path / "ours", adapter, spec, base="b", dtype=np.float32)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    assert np.abs(their_logits(theirs, TOKENS) - plain).max() > 0.1, "the adapter does something"
    params = combine_params(adapter, frozen)
    close(our_logits(*merge_adapter(params, spec)), their_logits(theirs, TOKENS))
    again = read_adapter_spec(tmp_path / "ours", base)
    read = load_adapter(tmp_path / "ours", again)
    if family == "Mixtral":  # read as one that has a pair for gate, too
        close(
            our_logits(*merge_adapter(combine_params(read, frozen), again)),
            their_logits(theirs, TOKENS),
        )
    else:
        close(our_logits(params, spec), their_logits(theirs, TOKENS))
        assert again == spec
        chex.assert_trees_all_equal(read, adapter)


def test_a_new_adapter_begins_as_pefts_does(saved):
    """A within the same bounds and of the same spread; B zero, so that nothing changes."""
    spec = adapted(saved()[1], "all-linear", rank=64)
    drawn, _ = split_adapter(init_params(spec, key=jax.random.key(0)))
    torch.manual_seed(0)
    config = peft.LoraConfig(r=64, target_modules="all-linear")
    theirs = dict(peft.get_peft_model(their_model("Qwen3"), config).named_parameters())
    declared, _ = split_adapter(declare(spec))
    for decl, ours in zip(jax.tree.leaves(declared), jax.tree.leaves(drawn), strict=True):
        for name, index in decl.hf_indices():
            expected = theirs[name.replace(".weight", ".default.weight")].detach().numpy()
            actual = np.asarray(ours)[index]
            np.testing.assert_allclose(actual.std(), expected.std(), rtol=0.1, err_msg=name)
            np.testing.assert_allclose(np.abs(actual).max(), np.abs(expected).max(), rtol=0.05)


CHANGED_CONFIGS = {
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "peft_type": "IA3",
    "init_lora_weights": "pissa",
    "trainable_token_indices": [1],
}


def test_adapters_that_do_not_fit_are_refused(saved, tmp_path):
    base = saved()[1]
    spec = adapted(base, "q_proj")
    save_adapter(tmp_path, random_adapter(spec), spec, base="b", dtype=np.float32)
    with pytest.raises(FileExistsError):
        save_adapter(tmp_path, random_adapter(spec), spec, base="b", dtype=np.float32)
    config, path = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    written = json.loads(config.read_text())
    for key, value in CHANGED_CONFIGS.items():
        config.write_text(json.dumps(written | {key: value}))
        with pytest.raises(ValueError, match=key):
            read_adapter_spec(tmp_path, base)
    config.write_text(json.dumps(written))

    def refused(named, of=base):
        with pytest.raises(ValueError, match=named):
            load_adapter(tmp_path, read_adapter_spec(tmp_path, of))

    arrays = safetensors.numpy.load_file(path)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    other = name.replace("layers.1", "layers.7")
    fused = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    for stored, named in (
        ({k: v for k, v in arrays.items() if k != name}, name),
        (arrays | {other: arrays[name]}, other),
        ({}, "arrays"),
    ):
        safetensors.numpy.save_file(stored, path)
        refused(named)
    safetensors.numpy.save_file({fused: np.zeros((6, 24), np.float32)}, path)
    refused(r"lora_A\.weight", saved("Mixtral")[1])  # of fused experts that can't be split
    path.write_bytes(b"\x08")
    with pytest.raises(ValueError, match="damaged"):
        load_adapter(tmp_path, spec)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load_adapter(tmp_path, spec)


# ---------------------------------------------------------------------------------------- targets

GATED = dataclasses.replace(DENSE, gated_attention=True)
SHARED = dataclasses.replace(SIGMOID, moe=dataclasses.replace(SIGMOID.moe, shared_ff_width=6))
JOINED = dataclasses.replace(GPT_OSS, moe=dataclasses.replace(GPT_OSS.moe, hf_joined=True))
TARGETS = [
    (DENSE, ["all-linear"], "down gate key output query up value"),
    (DENSE, ["q_proj", "v_proj"], "query value"),
    (DENSE, ["*.self_attn.*", "down"], "down key output query value"),
    (GATED, ["q_proj"], "attention_gate query"),
    (LATENT, ["all-linear"], "down gate kv_a kv_b output query up"),
    (JOINED, ["all-linear"], "key output query value"),  # a checkpoint joins its experts
]


def test_targets_by_our_names_and_theirs():
    for spec, given, expected in TARGETS:
        found = find_targets(given, spec)
        assert found == tuple(expected.split()), given
        assert find_targets(found, spec) == found
    refused = ("lm_head", "embed_tokens", "q_norm", "qproj", "attention_norm")
    for spec, name in [*((DENSE, name) for name in refused), (SHARED, "router")]:
        with pytest.raises(ValueError, match=name):
            find_targets([name], spec)
        lora = LoraSpec(rank=1, alpha=1.0, targets=(name,))
        with pytest.raises(ValueError, match=name):
            declare(dataclasses.replace(spec, lora=lora))
    lora = LoraSpec(rank=1, alpha=1.0, targets=("query",))
    with pytest.raises(ValueError, match="attention_gate"):  # a part of the same matrix
        declare(dataclasses.replace(GATED, lora=lora))


def test_merging_keeps_the_dtypes_and_splitting_the_base():
    params = draw(DENSE)
    low = cast_tree(params, compute_dtypes(DENSE, jnp.bfloat16))
    whole = combine_params(random_adapter(BOTH), low)
    merged, alone = merge_adapter(whole, BOTH)
    assert alone == DENSE
    assert jax.tree.map(lambda x: x.dtype, merged) == compute_dtypes(DENSE, jnp.bfloat16)
    chex.assert_trees_all_equal(split_adapter(whole)[1], low)


# --------------------------------------------------------------------------------------- training

SHAPE = RowShape(rows=8, length=8, sequences=8)
BOTH = adapted(DENSE, "all-linear")
BATCH = make_batch([8, 3, 5, 6], 8)


def learn(mesh, optimizer, *, frozen=True):
    """Return a learner of the adapter, or of the whole model, with what it trains and the rest."""
    whole = combine_params(random_adapter(BOTH), draw(DENSE))
    trained, rest = map(
        jax.device_put, split_adapter(whole), split_adapter(shardings(declare(BOTH), mesh))
    )
    if not frozen:
        trained, rest = combine_params(trained, rest), None
    learner = Learner(
        PolicyObjective(loss=lambda logprobs, advantages: -logprobs * advantages),
        ForwardConfig(model=Decoder(BOTH)),
        optimizer,
        reduce=token_mean,
        shape=SHAPE,
        mesh=mesh,
        params_like=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trained
        ),
        frozen=rest,
    )
    return learner, trained, rest


def updated(mesh, *, frozen=True):
    learner, trained, rest = learn(mesh, optax.sgd(0.1), frozen=frozen)
    state, metrics = learner.update(learner.init(trained), BATCH, {})
    infer = logprob_pass(ForwardConfig(model=Decoder(BOTH)), SHAPE, mesh, frozen=rest)
    return jax.device_get(state.params), metrics, infer(state.params, BATCH) if frozen else None


@pytest.fixture(scope="module")
def one_device():
    return make_mesh({}, jax.devices()[:1])


@pytest.fixture(scope="module")
def on_one_device(one_device):
    return updated(one_device)


def test_only_the_adapter_has_gradients_and_moments(one_device):
    learner, adapter, frozen = learn(one_device, optax.adamw(1e-2))
    state, before = learner.init(adapter), jax.device_get(frozen)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to whole powers
        for _ in range(3):
            state, metrics = learner.update(state, BATCH, {})
    assert float(metrics["grad_norm"]) > 0
    chex.assert_trees_all_equal(frozen, before)  # and it was not donated
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(adapter), strict=True)
    assert not any(np.array_equal(x, y) for x, y in pairs)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(adapter))
    counters = 3 * 4  # updates, skipped, and Adam's own
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == 3 * size + counters
    assert jax.tree.structure(state.params) == jax.tree.structure(adapter)


def test_an_update_is_that_of_the_whole_model_without_the_rest(one_device, on_one_device):
    """With plain gradient descent, freezing the base must not change the adapter's gradient."""
    expected, _ = split_adapter(updated(one_device, frozen=False)[0])
    chex.assert_trees_all_close(on_one_device[0], expected, atol=1e-6)


def test_the_mesh_makes_no_difference(on_one_device):
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    chex.assert_trees_all_close(updated(mesh), on_one_device, atol=2e-5, rtol=1e-4)
