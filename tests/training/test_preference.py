"""Updates on preferences: the same for every cut and mesh, and those that TRL makes with torch."""

import collections
import contextlib
import dataclasses
import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms import preferences
from jaxrl_llm.algorithms.reduce import sequence_mean_token_mean
from jaxrl_llm.config.functions import call
from jaxrl_llm.data.dataset import Preference, preference_batch, rotate_answers
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.sharding.layout import batch_shards
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.offline import annotate, answer_sums, kl_baseline
from jaxrl_llm.training.update import PreferenceObjective
from tests.updates import assert_same, learn, mesh_of, place, updated

VOCABULARY, MOST, PAIRS = 40, 12, 6
BETA = 0.3


def make_items(*, pairs):
    """Ragged rows; the end token is also the padding."""
    rng = np.random.default_rng(0)

    def draw(low, high):
        return tuple(rng.integers(1, VOCABULARY, rng.integers(low, high)).tolist())

    items = []
    for i in range(PAIRS):
        answers = tuple((*draw(2, 6), 0) for _ in range(2 if pairs else 1))
        items.append(Preference(draw(2, 6), answers, {} if pairs else {"labels": i % 3 != 0}))
    return items


def torch_model(folder, kind, seed):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
        num_labels=1,
    )
    model = kind(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy, its reference and a reward model: in torch, and as (spec, parameters)."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {
        "policy": transformers.Qwen3ForCausalLM,
        "reference": transformers.Qwen3ForCausalLM,
        "scorer": transformers.Qwen3ForSequenceClassification,
    }
    made = {}
    for seed, (name, kind) in enumerate(kinds.items()):
        theirs = torch_model(folder / name, kind, seed)
        spec = read_spec(folder / name)
        made[name] = SimpleNamespace(
            torch=theirs, spec=spec, params=load_params(folder / name, spec)
        )
    return made


def build(model, *, loss, tokens=4 * 2 * MOST, **sizes):
    """Return a function from a batch to the gradient and metrics of an update."""
    mesh = mesh_of(**sizes)
    placed, ranks = place(model.params, model.spec, mesh), batch_shards(mesh)
    shape = row_shape(tokens, 2 * MOST, sequences=PAIRS, multiple_of=ranks)
    objective = PreferenceObjective(loss=loss)
    learner = learn(
        model.spec, placed, objective, shape, mesh=mesh, reduce=sequence_mean_token_mean
    )
    return lambda batch: updated(learner, placed, batch)[:2]


def pass_of(models, name):
    """Return a model's pass, and its parameters."""
    shape = row_shape(4 * 2 * MOST, 2 * MOST, sequences=PAIRS)
    forward = ForwardConfig(model=Decoder(models[name].spec))
    return logprob_pass(forward, shape, mesh_of(), ("logprobs",)), models[name].params


@pytest.fixture(scope="module")
def pairs(models):
    """Pairs with the reference's log-probs."""
    items = make_items(pairs=True)
    return annotate(items, *pass_of(models, "reference"), width=2 * MOST, size=4)


dpo = functools.partial(preferences.dpo, beta=BETA)


@pytest.fixture(scope="module")
def expected(models, pairs):
    return build(models["policy"], loss=dpo)(preference_batch(pairs, 2 * MOST))


def test_cuts_and_a_mesh_change_nothing(models, pairs, expected):
    run = build(models["policy"], loss=dpo, tokens=4 * 2 * MOST, fsdp=4, tensor=2)
    gradient, metrics = run(preference_batch(pairs[::-1], 2 * MOST))
    assert_same(gradient, expected[0])
    for name in ("loss", "rewards/margins", "rewards/accuracies", "grad_norm"):
        assert_allclose(metrics[name], expected[1][name], rtol=2e-5)


class TorchPolicy:
    """A model of transformers as TRL's trainers call it."""

    training = True

    def __init__(self, model):
        self.model = model

    def __call__(self, *, input_ids, attention_mask, labels, **_):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        logps = torch.log_softmax(logits, -1)
        targets = labels[:, 1:]
        taken = logps.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        nothing = torch.zeros_like(taken)
        return SimpleNamespace(
            log_probs=torch.where(targets >= 0, taken, nothing),
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing > 0,
            logits=logits,
        )


def torch_batch(sequences, starts):
    """Pad with the end token, as of a tokenizer that has no other."""
    width = max(map(len, sequences))
    ids, mask = torch.zeros(len(sequences), width, dtype=torch.long), []
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.tensor(sequence)
        mask.append([j < len(sequence) for j in range(width)])
    attention = torch.tensor(mask).long()
    place = torch.arange(width)[None]
    completion = attention * (place >= torch.tensor(starts)[:, None])
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def trainer(model, reference, **settings):
    """Stand in for a trainer of TRL, of which only the loss is run."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        unwrap_model=lambda x: x,
    )
    return SimpleNamespace(
        model=TorchPolicy(model),
        ref_model=reference and TorchPolicy(reference),
        accelerator=accelerator,
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        beta=BETA,
        **settings,
    )


def check_gradients(model, gradient):
    for name, module in {"embed": model.model.embed_tokens, "final_norm": model.model.norm}.items():
        value = module.weight.grad.numpy()
        assert_allclose(gradient[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max())


TYPES = {
    "sigmoid": (preferences.dpo, {}),
    "robust": (preferences.robust_dpo, {"label_smoothing": 0.1}),
    "ipo": (preferences.ipo, {}),
    "hinge": (preferences.slic, {}),
    "nca_pair": (preferences.nca, {}),
    "apo_zero": (preferences.apo_zero, {}),
    "apo_down": (preferences.apo_down, {}),
    "sigmoid_norm": (preferences.dpo_length_normalized, {}),
}


def no_context(*_):
    return contextlib.nullcontext()


def test_losses_of_pairs_are_trls(models, pairs, expected, monkeypatch):
    """The gradient of an update is that of the first one."""
    pytest.importorskip("trl", reason="trl is not installed")
    from trl.trainer import dpo_trainer

    monkeypatch.setattr(dpo_trainer, "disable_gradient_checkpointing", no_context)
    monkeypatch.setattr(dpo_trainer, "is_peft_model", lambda model: False)
    sides = [[(*p.prompt, *p.answers[side]) for p in pairs] for side in (0, 1)]
    inputs = torch_batch(sides[0] + sides[1], [len(p.prompt) for p in pairs] * 2)
    infer, params = pass_of(models, "policy")
    batch = preference_batch(pairs, 2 * MOST)
    fields = batch.fields | answer_sums(infer, params, batch)
    for number, side in enumerate(("chosen", "rejected")):
        fields[f"{side}_lengths"] = np.array([len(pair.answers[number]) for pair in pairs])
    theirs = models["policy"].torch
    for name, (function, keywords) in TYPES.items():
        bound = functools.partial(function, beta=BETA, **keywords)
        ours = call(bound, {key: jnp.asarray(x) for key, x in fields.items() if x.ndim == 1})
        stub = trainer(
            theirs,
            models["reference"].torch,
            ld_alpha=None,
            f_divergence_type="reverse_kl",
            loss_types=[name],
            loss_weights=[1.0],
            use_weighting=False,
            label_smoothing=keywords.get("label_smoothing", 0.0),
        )
        theirs.zero_grad()
        loss = dpo_trainer.DPOTrainer._compute_loss(stub, stub.model, inputs, False)
        assert_allclose(ours.loss.mean(), loss.item(), rtol=1e-5, err_msg=name)
        if name != "sigmoid_norm":  # TRL's rewards are of sums there, too
            for metric in ("chosen", "rejected", "margins", "accuracies"):
                (logged,) = stub._metrics["train"][f"rewards/{metric}"]
                own = ours.diagnostics[f"rewards/{metric}"].mean()
                assert_allclose(own, logged, rtol=1e-4, err_msg=name)
        if name == "sigmoid":
            loss.backward()
            check_gradients(theirs, expected[0])
            assert_allclose(expected[1]["loss"], loss.item(), rtol=1e-5)


def test_kto_is_trls(models, monkeypatch):
    pytest.importorskip("trl", reason="trl is not installed")
    from trl.trainer import kto_trainer

    monkeypatch.setattr(kto_trainer, "disable_gradient_checkpointing", no_context)
    monkeypatch.setattr(kto_trainer, "is_peft_model", lambda model: False)
    items, (infer, params) = make_items(pairs=False), pass_of(models, "policy")
    rotated = preference_batch(rotate_answers(items, MOST), 2 * MOST)
    annotated = annotate(items, infer, params, width=2 * MOST, size=PAIRS)
    learned = answer_sums(*pass_of(models, "reference"), rotated)["logps"]
    baseline = kl_baseline(learned, answer_sums(infer, params, rotated)["logps"])
    batch = preference_batch(annotated, 2 * MOST)
    batch = batch.add(kl_baseline=np.full(PAIRS, baseline, np.float32))
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.8}
    loss = functools.partial(preferences.kto, beta=BETA, **weights)
    gradient, metrics = build(models["reference"], loss=loss)(batch)

    def sequences(items):
        return [item.tokens for item in items], [len(item.prompt) for item in items]

    mismatched = torch_batch(*sequences(rotate_answers(items, MOST)))
    inputs = torch_batch(*sequences(items)) | {
        f"KL_{name}": value for name, value in mismatched.items()
    }
    inputs["label"] = torch.tensor([item.columns["labels"] for item in items])
    theirs = models["reference"].torch
    theirs.zero_grad()
    settings = {"loss_type": "kto", "calculate_KL": True, **weights}
    stub = trainer(theirs, models["policy"].torch, **settings)
    trl = kto_trainer.KTOTrainer
    stub._compute_kl_logps = lambda model, batch: trl._compute_kl_logps(stub, model, batch)
    theirs_loss = trl._compute_loss(stub, stub.model, inputs, return_outputs=False)
    theirs_loss.backward()
    assert baseline > 0.01
    assert_allclose(baseline, stub._metrics["train"]["kl"][0], rtol=1e-4)
    assert_allclose(metrics["loss"], theirs_loss.item(), rtol=1e-5)
    check_gradients(theirs, gradient)
    for kind, name in (("desirable", "chosen"), ("undesirable", "rejected")):
        (shown,) = stub._metrics["train"][f"rewards/{name}"]
        assert_allclose(metrics[f"rewards/{kind}"], shown, rtol=1e-4)


def test_the_rewards_of_a_kind_are_means_over_its_rows(models):
    """However the rows are cut, and absent where there are none of the kind."""
    infer, params = pass_of(models, "policy")
    items = annotate(make_items(pairs=False), infer, params, width=2 * MOST, size=PAIRS)
    batch, others = preference_batch(items, 2 * MOST), np.linspace(-20, 5, PAIRS)
    rewards = BETA * (batch["ref_logps"] - others)
    loss = functools.partial(preferences.apo_zero_labelled, beta=BETA)
    run = build(models["policy"], loss=loss, tokens=2 * 2 * MOST, fsdp=2)
    for desirable in (0, 1, 5, 6):
        labels = np.arange(PAIRS) < desirable
        _, metrics = run(batch.add(labels=labels, ref_logps=others.astype(np.float32)))
        for kind, own in (("desirable", rewards[labels]), ("undesirable", rewards[~labels])):
            assert (f"rewards/{kind}" in metrics) == (len(own) > 0)
            if len(own):
                assert_allclose(metrics[f"rewards/{kind}"], own.mean(), rtol=1e-4)


def test_a_reward_models_loss_is_trls(models, pairs):
    pytest.importorskip("trl", reason="trl is not installed")
    from trl.trainer.reward_trainer import RewardTrainer

    items = [dataclasses.replace(p, columns={"margins": 0.1 * i}) for i, p in enumerate(pairs)]
    loss = functools.partial(preferences.bradley_terry_margin, center_coef=0.01)
    gradient, metrics = build(models["scorer"], loss=loss)(preference_batch(items, 2 * MOST))
    sides = [[(*p.prompt, *p.answers[side]) for p in pairs] for side in (0, 1)]
    inputs = torch_batch(sides[0] + sides[1], [0] * 2 * PAIRS)
    del inputs["completion_mask"]
    theirs = models["scorer"].torch
    theirs.zero_grad()

    def model(*, input_ids, attention_mask, margin, **_):
        """Score the last token, though it is the one that pads, too."""
        hidden = theirs.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        last = attention_mask.sum(1) - 1
        return SimpleNamespace(logits=theirs.score(hidden[torch.arange(len(last)), last]))

    stub = trainer(theirs, None)
    stub.args.center_rewards_coefficient = 0.01
    inputs["margin"] = torch.tensor([0.1 * i for i in range(PAIRS)])
    theirs_loss = RewardTrainer.compute_loss(stub, model, inputs)
    theirs_loss.backward()
    assert_allclose(metrics["loss"], theirs_loss.item(), rtol=1e-5)
    assert_allclose(metrics["rewards/accuracies"], stub._metrics["train"]["accuracy"][0])
    assert_allclose(metrics["rewards/margins"], stub._metrics["train"]["margin"][0], rtol=1e-4)
    check_gradients(theirs, gradient)


def test_losses_without_reference_are_trls():
    pytest.importorskip("trl", reason="trl is not installed")
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    rng = np.random.default_rng(1)
    sums = [rng.uniform(-9, -1, 4).astype(np.float32) for _ in range(2)]
    lengths = np.array([3, 4, 5, 6]), np.array([2, 6, 3, 4])
    means = [torch.tensor(s / n) for s, n in zip(sums, lengths, strict=True)]
    arrays = [*map(jnp.asarray, (*sums, *lengths))]
    stub = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))
    wanted = -means[0] - ORPOTrainer.odds_ratio_loss(stub, *means)[0]
    assert_allclose(preferences.orpo(*arrays, beta=BETA).loss, wanted.numpy(), rtol=1e-5)
    stub = SimpleNamespace(**vars(stub), label_smoothing=0.0, simpo_gamma=0.5, alpha=0.0)
    stub.loss_type = "simpo"
    wanted = CPOTrainer.cpo_loss(stub, *means)[0]
    got = preferences.simpo(*arrays, beta=BETA, gamma=0.5)
    assert_allclose(got.loss, wanted.numpy(), rtol=1e-5)
    stub.loss_type = "sigmoid"
    wanted = CPOTrainer.cpo_loss(stub, *map(torch.tensor, sums))[0]
    got = preferences.cpo(*arrays[:3], beta=BETA, nll_coef=0.0)
    assert_allclose(got.loss, wanted.numpy(), rtol=1e-5)
