"""Adapters against the `peft` library, merged against unmerged, and what alone is trained."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import safetensors.numpy
import torch
import transformers

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.adapter import load_adapter, read_adapter_spec, save_adapter
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.lora import (
    combine_params,
    find_targets,
    merge_adapter,
    split_adapter,
    without_adapter,
)
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.moe.spec import ClippedSwiglu, MoeSpec
from jaxrl_llm.models.parameters import compute_dtypes, declare, init_params
from jaxrl_llm.models.spec import LoraSpec
from jaxrl_llm.sharding.layout import make_mesh, shardings
from jaxrl_llm.sharding.reshard import cast_tree
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch
from tests.decoders import forward, logits
from tests.guarded import MODEL, UPDATE

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

pytestmark = [
    # peft asks transformers under a name that transformers has deprecated
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning"),
    # peft looks for its own pattern among modules, and applies it to parameters
    pytest.mark.filterwarnings("ignore:.*ignored.*gate_up_proj:RuntimeWarning"),
    pytest.mark.guards(*MODEL, *UPDATE),
]

TINY = dict(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=40,
    tie_word_embeddings=True,
    max_position_embeddings=64,
)
FAMILIES = {
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {}),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, {"head_dim": 6}),
}
DELTA = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
JOINED = {  # arrays of ours are parts of one that has an adapter
    "qwen3_5": (transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig, DELTA),
    "qwen3_next": (
        transformers.Qwen3NextForCausalLM,
        transformers.Qwen3NextConfig,
        DELTA
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
        | dict(shared_expert_intermediate_size=14),
    ),
    "phi3": (
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config,
        dict(head_dim=6, pad_token_id=None, original_max_position_embeddings=64),
    ),
}
KINDS = {
    "queries and values": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all, rank-stabilized": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": "all-linear",
        "use_rslora": True,
    },
    "one": {"r": 1, "lora_alpha": 1.5, "target_modules": ["down_proj"]},
}
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=12)
ROUTED = {
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        EXPERTS | dict(num_experts=4, norm_topk_prob=True),
    ),
    "mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=12),
    ),
    "deepseek_v3": (
        transformers.DeepseekV3ForCausalLM,
        transformers.DeepseekV3Config,
        EXPERTS
        | dict(
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            num_key_value_heads=4,
            head_dim=4,
            q_lora_rank=6,
            kv_lora_rank=8,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            v_head_dim=6,
        ),
    ),
}
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTED_KINDS = {
    "parameters": {"target_modules": ["o_proj"], "target_parameters": FUSED},
    "gate and up": {"target_modules": [], "target_parameters": FUSED[:1], "use_rslora": True},
    "down": {"target_modules": [], "target_parameters": FUSED[1:]},
    "modules": {"target_modules": ["gate", "up", "down", "o_proj"]},  # gate and up: twice the rank
    "rank-stabilized modules": {"target_modules": ["gate", "up", "down"], "use_rslora": True},
}
OUR_ROUTED = {
    "all": (["all-linear"], False),
    "experts, rank-stabilized": (["*.experts.*", "o_proj"], True),
    "up alone": (["expert_up"], False),
}
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 11))


def their_model(family="qwen3"):
    torch.manual_seed(0)
    model, config, changes = (FAMILIES | ROUTED | JOINED)[family]
    made = model(config(**TINY | changes))
    with torch.no_grad():
        for parameter in made.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(around + 0.2 * torch.randn_like(parameter))
    return made.eval()


def with_peft(model, seed=1, **options):
    """A model with an adapter both of whose matrices are random."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return adapted.eval()


def our_logits(params, spec):
    positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    rows = map(jnp.asarray, (TOKENS, positions, np.ones_like(TOKENS)))
    return np.asarray(compiled_logits(params, spec, *rows))


@partial(jax.jit, static_argnums=1)
def compiled_logits(params, spec, *rows):
    return logits(params, spec, forward(params, spec, *rows))


def their_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    their_model().save_pretrained(directory)
    return directory


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


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_peft_is_ours(family, kind, tmp_path):
    model = their_model(family)
    model.save_pretrained(tmp_path / "base")
    plain = their_logits(model)
    theirs = with_peft(model, **kind)
    theirs.save_pretrained(tmp_path / "adapter")
    spec = read_adapter_spec(tmp_path / "adapter", read_spec(tmp_path / "base"))
    adapter = load_adapter(tmp_path / "adapter", spec)
    params = combine_params(adapter, load_params(tmp_path / "base", without_adapter(spec)))
    close(our_logits(params, spec), their_logits(theirs))
    close(our_logits(*merge_adapter(params, spec)), their_logits(theirs))
    assert np.abs(their_logits(theirs) - plain).max() > 0.1, "the adapter does something"


@pytest.mark.parametrize(
    ("family", "targets", "first", "other"),
    [
        pytest.param(
            "qwen3_5",
            ("q_proj", "in_proj_*", "out_proj"),
            "delta_query",
            "delta_value",
            marks=pytest.mark.slow,
        ),
        ("qwen3_next", ("q_proj", "in_proj_*", "shared_expert_gate"), "delta_query", "delta_gate"),
        pytest.param(
            "phi3", ("qkv_proj", "gate_up_proj"), "query", "value", marks=pytest.mark.slow
        ),
    ],
)
def test_an_adapter_of_joined_matrices_is_pefts(family, targets, first, other, tmp_path):
    """One A for all parts of a matrix, there and back."""
    model = their_model(family)
    model.save_pretrained(tmp_path / "base")
    base = read_spec(tmp_path / "base")
    spec = adapted(base, *targets, rank=3, rslora=True)
    adapter = random_adapter(spec, scale=0.1)
    names = {name for stack in adapter.values() for name in stack}
    assert {f"{first}_lora_a", f"{first}_lora_b", f"{other}_lora_b"} <= names
    assert f"{other}_lora_a" not in names
    save_adapter(tmp_path / "ours", adapter, spec, base=str(tmp_path / "base"), dtype=np.float32)
    frozen = load_params(tmp_path / "base", base)
    params = combine_params(adapter, frozen)
    plain = their_logits(model)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    assert np.abs(their_logits(theirs) - plain).max() > 0.1, "the adapter does something"
    close(our_logits(params, spec), their_logits(theirs))
    close(our_logits(*merge_adapter(params, spec)), their_logits(theirs))
    theirs.save_pretrained(tmp_path / "theirs")
    again = read_adapter_spec(tmp_path / "theirs", base)
    assert again == spec
    assert bits(load_adapter(tmp_path / "theirs", again)) == bits(adapter)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_an_adapter_of_ours_is_pefts(base, kind, tmp_path):
    targets, rank = kind["target_modules"], kind["r"]
    targets = [targets] if isinstance(targets, str) else targets
    spec = adapted(read_spec(base), *targets, rank=rank, rslora=kind.get("use_rslora", False))
    adapter = random_adapter(spec)
    save_adapter(tmp_path / "adapter", adapter, spec, base=str(base), dtype=np.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    params = combine_params(adapter, load_params(base, without_adapter(spec)))
    close(our_logits(params, spec), their_logits(theirs))
    merged = theirs.merge_and_unload()
    close(our_logits(*merge_adapter(params, spec)), their_logits(merged))


@pytest.mark.parametrize("kind", ROUTED_KINDS)
@pytest.mark.parametrize("family", ROUTED)
def test_an_adapter_of_peft_over_routed_experts_is_ours(family, kind, tmp_path):
    model = their_model(family)
    model.save_pretrained(tmp_path / "base")
    plain = their_logits(model)
    base = read_spec(tmp_path / "base")
    names = dict(zip(("gate", "up", "down"), base.moe.hf_projections, strict=True))
    modules = [names.get(name, name) for name in ROUTED_KINDS[kind]["target_modules"]]
    options = ROUTED_KINDS[kind] | {"target_modules": modules}
    theirs = with_peft(model, r=3, lora_alpha=5, **options)
    theirs.save_pretrained(tmp_path / "adapter")
    spec = read_adapter_spec(tmp_path / "adapter", base)
    params = combine_params(
        load_adapter(tmp_path / "adapter", spec), load_params(tmp_path / "base", base)
    )
    close(our_logits(*merge_adapter(params, spec)), their_logits(theirs))
    assert np.abs(their_logits(theirs) - plain).max() > 0.1, "the adapter does something"


@pytest.mark.parametrize("kind", OUR_ROUTED)
@pytest.mark.parametrize("family", ROUTED)
def test_an_adapter_of_ours_over_routed_experts_is_pefts(family, kind, tmp_path):
    model = their_model(family)
    model.save_pretrained(tmp_path / "base")
    alone = read_spec(tmp_path / "base")
    targets, rslora = OUR_ROUTED[kind]
    spec = adapted(alone, *targets, rank=3, rslora=rslora)
    assert ("expert_gate" in spec.lora.targets) == (kind != "up alone")
    adapter = random_adapter(spec)
    save_adapter(tmp_path / "adapter", adapter, spec, base="b", dtype=np.float32)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    frozen = load_params(tmp_path / "base", alone)
    close(our_logits(*merge_adapter(combine_params(adapter, frozen), spec)), their_logits(theirs))
    if kind == "all":
        close(our_logits(combine_params(adapter, frozen), spec), their_logits(theirs))
    again = read_adapter_spec(tmp_path / "adapter", alone)
    assert (again == spec) == (kind == "all")
    same = combine_params(load_adapter(tmp_path / "adapter", again), frozen)
    close(our_logits(*merge_adapter(same, again)), their_logits(theirs))


def test_fused_experts_that_can_not_be_split_are_refused(tmp_path):
    their_model("mixtral").save_pretrained(tmp_path / "base")
    base = read_spec(tmp_path / "base")
    spec = adapted(base, "o_proj")
    save_adapter(tmp_path / "a", random_adapter(spec), spec, base="b", dtype=np.float32)
    path = tmp_path / "a/adapter_model.safetensors"
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    safetensors.numpy.save_file({name: np.zeros((6, 24), np.float32)}, path)
    with pytest.raises(
        ValueError, match=r"lora_A.weight has shape \(6, 24\); expected one of 4 exp"
    ):
        read_adapter_spec(tmp_path / "a", base)


def test_ranks_and_alphas_by_pattern_become_one(base, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = with_peft(
        model,
        r=2,
        lora_alpha=3,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"q_proj": 4, r"layers\.1\.mlp\.down_proj": 1},
        alpha_pattern={"v_proj": 7},
    )
    theirs.save_pretrained(tmp_path / "a")
    spec = read_adapter_spec(tmp_path / "a", read_spec(base))
    assert (spec.lora.rank, spec.lora.scale) == (4, 1.5)
    params = combine_params(
        load_adapter(tmp_path / "a", spec), load_params(base, without_adapter(spec))
    )
    close(our_logits(params, spec), their_logits(theirs))


def test_an_adapter_comes_back_bit_for_bit(base, tmp_path):
    spec = adapted(read_spec(base), "q_proj", "down_proj", rank=3, rslora=True)
    adapter = random_adapter(spec)
    save_adapter(tmp_path / "a", adapter, spec, base=str(base), dtype=np.float32)
    assert read_adapter_spec(tmp_path / "a", read_spec(base)) == spec
    assert bits(load_adapter(tmp_path / "a", spec)) == bits(adapter)
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj"]
    with pytest.raises(FileExistsError, match="not empty"):
        save_adapter(tmp_path / "a", adapter, spec, base=str(base), dtype=np.float32)


def test_a_new_adapter_begins_as_pefts_does(base):
    """A within the same bounds and of the same spread; B zero, so that nothing changes."""
    spec = adapted(read_spec(base), "all-linear", rank=64)
    drawn = init_params(spec, key=jax.random.key(0))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=64, target_modules="all-linear")
    theirs = dict(peft.get_peft_model(model, config).named_parameters())
    for decl, ours in zip(
        jax.tree.leaves(split_adapter(declare(spec))[0]),
        jax.tree.leaves(split_adapter(drawn)[0]),
        strict=True,
    ):
        for name, index in decl.hf_indices():
            expected = theirs[name.replace(".weight", ".default.weight")].detach().numpy()
            actual = np.asarray(ours[index])
            np.testing.assert_allclose(actual.std(), expected.std(), rtol=0.1, err_msg=name)
            np.testing.assert_allclose(np.abs(actual).max(), np.abs(expected).max(), rtol=0.05)
    alone = split_adapter(drawn)[1]
    close(our_logits(drawn, spec), our_logits(alone, without_adapter(spec)))  # B is zero


CHANGED_CONFIGS = {
    "use_dora": (True, "use_dora=True; supported is False"),
    "bias": ("all", "bias='all'; supported is 'none'"),
    "modules_to_save": (["lm_head"], r"modules_to_save=\['lm_head'\]; supported is None"),
    "peft_type": ("IA3", "peft_type='IA3'; supported is 'LORA'"),
    "init_lora_weights": ("pissa", "init_lora_weights='pissa' changes the base"),
    "trainable_token_indices": ([1], "trainable_token_indices="),
}


@pytest.mark.parametrize("key", CHANGED_CONFIGS)
def test_other_kinds_of_adapters_are_refused(base, key, tmp_path):
    value, message = CHANGED_CONFIGS[key]
    spec = adapted(read_spec(base), "q_proj")
    save_adapter(tmp_path / "a", random_adapter(spec), spec, base="b", dtype=np.float32)
    path = tmp_path / "a/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=message):
        read_adapter_spec(tmp_path / "a", read_spec(base))


def test_adapters_that_do_not_fit_are_refused(base, tmp_path):
    spec = adapted(read_spec(base), "q_proj")
    save_adapter(tmp_path / "a", random_adapter(spec), spec, base="b", dtype=np.float32)
    path = tmp_path / "a/adapter_model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    safetensors.numpy.save_file({k: v for k, v in arrays.items() if k != name}, path)
    with pytest.raises(ValueError, match=f"1 arrays; {name}: got nothing, expected"):
        load_adapter(tmp_path / "a", read_adapter_spec(tmp_path / "a", read_spec(base)))
    other = name.replace("layers.1", "layers.7")
    safetensors.numpy.save_file(arrays | {other: arrays[name]}, path)
    with pytest.raises(ValueError, match=f"1 surplus arrays, as {other}"):
        read_adapter_spec(tmp_path / "a", read_spec(base))
    safetensors.numpy.save_file({}, path)
    with pytest.raises(ValueError, match="it has no arrays"):
        read_adapter_spec(tmp_path / "a", read_spec(base))
    path.write_bytes(b"\x08")
    with pytest.raises(ValueError, match="damaged or truncated"):
        load_adapter(tmp_path / "a", spec)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="expected an adapter in PEFT's format"):
        load_adapter(tmp_path / "a", spec)


# ---------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("expected", "names"),
    [
        (["all-linear"], "down gate key output query up value"),
        (["q_proj", "v_proj"], "query value"),
        (["query", "value"], "query value"),
        (["*_proj"], "down gate key output query up value"),
        (["*.self_attn.*", "down"], "down key output query value"),
    ],
)
def test_targets_by_our_names_and_theirs(spec, expected, names):
    assert find_targets(expected, spec) == tuple(names.split())
    assert find_targets(find_targets(expected, spec), spec) == tuple(names.split())


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "q_norm", "qproj", "attention_norm"])
def test_what_can_have_no_adapter_is_refused(spec, name):
    with pytest.raises(ValueError, match=f"{name!r} is no matrix .*all-linear, or some of down_pr"):
        find_targets([name], spec)
    lora = LoraSpec(rank=1, alpha=1.0, targets=(name,))
    with pytest.raises(ValueError, match=f"{name!r} is no matrix"):
        declare(dataclasses.replace(spec, lora=lora))


def test_parts_of_one_matrix_have_an_adapter_together(spec):
    gated = dataclasses.replace(spec, gated_attention=True)
    for name in ("q_proj", "query", "attention_gate"):
        assert find_targets([name], gated) == ("attention_gate", "query")
    lora = LoraSpec(rank=1, alpha=1.0, targets=("query",))
    with pytest.raises(ValueError, match=r"\['attention_gate'\] are parts of matrices that have"):
        declare(dataclasses.replace(gated, lora=lora))


# ----------------------------------------------------------------------------------------- merged


def test_merged_is_unmerged(spec, params):
    both = adapted(spec, "all-linear")
    adapter = random_adapter(both)
    whole = combine_params(adapter, params)
    close(our_logits(*merge_adapter(whole, both)), our_logits(whole, both))
    assert np.abs(our_logits(whole, both) - our_logits(params, spec)).max() > 0.1
    scale, layer = 8.0 / 4, 1
    a, b = (np.asarray(adapter["layers"][f"output_lora_{x}"][layer], np.float64) for x in "ab")
    expected = np.asarray(params["layers"]["output"][layer], np.float64)
    expected = expected + scale * np.einsum("nhr,rd->nhd", a, b)
    merged = merge_adapter(whole, both)[0]["layers"]["output"][layer]
    np.testing.assert_allclose(merged, expected, atol=1e-6)
    assert bits(split_adapter(whole)[1]) == bits(params)


@pytest.mark.parametrize("kind", ["latent attention", "shared experts", "gpt-oss"])
def test_attention_and_dense_parts_of_other_families(spec, draw, kind):
    """Routers can have no adapter; what stands beside them can."""
    changes, expected = {
        "latent attention": (
            {
                "kv_heads": 4,
                "qk_norm": False,
                "latent": LatentSpec(
                    query_rank=5, kv_rank=8, nope_width=4, rope_width=2, value_width=3
                ),
            },
            "down gate kv_a kv_b output query_a query_b up",
        ),
        "shared experts": (
            {
                "moe": MoeSpec(
                    experts=4, experts_per_token=2, ff_width=5, shared_ff_width=7, dense_layers=1
                )
            },
            "down expert_down expert_gate expert_up gate key output query shared_down shared_gate "
            "shared_up up value",
        ),
        "gpt-oss": (
            {
                "qkv_bias": True,
                "attention_sinks": True,
                "moe": MoeSpec(
                    **dict(experts=4, experts_per_token=2, ff_width=5, biases=True),
                    **dict(swiglu=ClippedSwiglu(alpha=1.7, limit=7.0), hf_joined=True),
                ),
            },
            "key output query value",  # a checkpoint joins its experts
        ),
    }[kind]
    both = adapted(dataclasses.replace(spec, vocab_size=61, **changes), "all-linear")
    assert both.lora.targets == tuple(expected.split())
    whole = combine_params(random_adapter(both), draw(without_adapter(both)))
    close(our_logits(*merge_adapter(whole, both)), our_logits(whole, both))
    with pytest.raises(ValueError, match="'router' is no matrix"):
        find_targets(["router"], both)


def test_merging_keeps_the_dtypes_of_the_base(spec, params):
    both = adapted(spec, "all-linear")
    low = cast_tree(params, compute_dtypes(spec, jnp.bfloat16))
    merged, alone = merge_adapter(combine_params(random_adapter(both), low), both)
    assert alone == spec
    assert jax.tree.map(lambda x: x.dtype, merged) == compute_dtypes(spec, jnp.bfloat16)


# --------------------------------------------------------------------------------------- training

SIZES = np.array([8, 3, 5, 6], np.int32)
SHAPE = RowShape(rows=8, length=8, sequences=8)


def make_batch():
    rng = np.random.default_rng(0)
    place = np.arange(8)
    return Batch(
        rng.integers(0, 37, (4, 8)).astype(np.int32),
        SIZES,
        {
            "mask": (place >= 2) & (place < SIZES[:, None]),
            "advantages": rng.normal(size=(4, 8)).astype(np.float32),
        },
    )


def reinforce(logprobs, advantages):
    return -logprobs * advantages


def place(tree, spec, mesh):
    layout = shardings(declare(spec), mesh)
    return tuple(map(jax.device_put, split_adapter(tree), split_adapter(layout)))


def learn(spec, adapter, frozen, mesh, optimizer):
    return Learner(
        PolicyObjective(loss=reinforce),
        ForwardConfig(model=Decoder(spec)),
        optimizer,
        reduce=token_mean,
        shape=SHAPE,
        mesh=mesh,
        params_like=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), adapter
        ),
        frozen=frozen,
    )


@pytest.fixture(scope="module")
def whole(spec, params):
    both = adapted(spec, "all-linear")
    return both, combine_params(random_adapter(both), params)


@pytest.fixture(scope="module")
def one_device():
    return make_mesh({}, jax.devices()[:1])


def test_only_the_adapter_has_gradients_and_moments(whole, one_device):
    spec, params = whole
    adapter, frozen = place(params, spec, one_device)
    learner = learn(spec, adapter, frozen, one_device, optax.adamw(1e-2))
    state, before = learner.init(adapter), bits(frozen)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to whole powers
        for _ in range(3):
            state, metrics = learner.update(state, make_batch(), {})
    assert float(metrics["grad_norm"]) > 0
    assert bits(frozen) == before, "the base is bit-identical, and was not donated"
    assert all(x != y for x, y in zip(bits(state.params), bits(adapter), strict=True))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(adapter))
    counters = 3 * 4  # updates, skipped, and Adam's own
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == 3 * size + counters
    assert jax.tree.structure(state.params) == jax.tree.structure(adapter)


def test_an_update_is_that_of_the_whole_model_without_the_rest(whole, one_device):
    """With plain gradient descent, freezing the base must not change the adapter's gradient."""
    spec, params = whole
    adapter, frozen = place(params, spec, one_device)
    everything = combine_params(adapter, frozen)
    part = learn(spec, adapter, frozen, one_device, optax.sgd(0.1))
    full = learn(spec, everything, None, one_device, optax.sgd(0.1))
    updated, _ = part.update(part.init(adapter), make_batch(), {})
    expected, _ = full.update(full.init(everything), make_batch(), {})
    for x, y in zip(
        jax.tree.leaves(updated.params),
        jax.tree.leaves(split_adapter(expected.params)[0]),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"fsdp": 8}, marks=pytest.mark.slow), {"data": 2, "fsdp": 2, "tensor": 2}],
)
def test_the_mesh_makes_no_difference(whole, one_device, sizes):
    spec, params = whole

    def trained(mesh):
        adapter, frozen = place(params, spec, mesh)
        learner = learn(spec, adapter, frozen, mesh, optax.sgd(0.1))
        state, metrics = learner.update(learner.init(adapter), make_batch(), {})
        infer = logprob_pass(ForwardConfig(model=Decoder(spec)), SHAPE, mesh, frozen=frozen)
        return jax.device_get(state.params), metrics, infer(state.params, make_batch())

    actual, expected = trained(make_mesh(sizes)), trained(one_device)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4)


def test_zeros_are_the_base(whole, one_device):
    """The reference of a run with an adapter: the same arrays, without a second program."""
    spec, params = whole
    adapter, frozen = place(params, spec, one_device)
    infer = logprob_pass(ForwardConfig(model=Decoder(spec)), SHAPE, one_device, frozen=frozen)
    actual = infer(jax.tree.map(jnp.zeros_like, adapter), make_batch())
    alone = logprob_pass(ForwardConfig(model=Decoder(without_adapter(spec))), SHAPE, one_device)
    expected = alone(frozen, make_batch())
    np.testing.assert_allclose(actual["logprobs"], expected["logprobs"], atol=5e-6)
    assert np.abs(infer(adapter, make_batch())["logprobs"] - expected["logprobs"]).max() > 0.01
