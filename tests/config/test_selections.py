"""What does not go together with pairs, with a filter of answers and with a refresh is refused."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest
import yaml

from jaxrl_llm.algorithms.pairs import Pairs
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.training.bind import resolve_functions

PAIRS = {"algorithm.pairs": "best_and_worst", "algorithm.pair_loss": "dpo"}


def resolved(keys):
    return resolve_functions(load(TrainConfig, "quickstart", keys))


def of_scores(scores):
    return scores


def one_too_many(scores):
    place = jnp.arange(scores.shape[0])
    return Pairs(place, place[1:], place > 0)


def one_number(chosen_logps):
    return chosen_logps.mean()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"algorithm.pairs": "best_and_worst"},
            "algorithm.pair_loss is null: name a loss of pairs",
        ),
        ({"algorithm.pair_loss": "dpo"}, "algorithm.pairs is null: name what makes them"),
        *(
            (PAIRS | {f"algorithm.{name}": value}, f"algorithm.{name} has no effect on pairs: ")
            for name, value in {
                "advantage": "rloo",
                "loss": "reinforce",
                "reduce": "token_sum",
                "kl_loss": "k3",
                "kl_reward": "k1",
                "kl_coef": 0.5,
                "kl_controller": "adaptive",
                "entropy_coef": 0.1,
                "correction": [],
                "use_rollout_logprobs": True,
                "high_covariance": "select_kl_cov",
                "answer_filter": "best_of_group",
            }.items()
        ),
        (PAIRS | {"critic.warmup_steps": 2}, "critic is set, but no function asks for"),
        (PAIRS | {"rollout.samples_per_prompt": 1}, "needs a better and a worse answer"),
        (PAIRS | {"batch.max_tokens_per_device": 31}, "can't hold the longest pair of algorithm.p"),
        (PAIRS | {"algorithm.pair_loss": "kto"}, "algorithm.pair_loss: kto asks for 'logps'"),
        (
            PAIRS | {"algorithm.pair_loss": "bradley_terry"},
            "bradley_terry asks for 'chosen_scores', which nothing produces there",
        ),
        (PAIRS | {"algorithm.pair_loss": "ppo_clip"}, "no function 'ppo_clip' in"),
        (PAIRS | {"algorithm.pairs": of_scores}, "expected Pairs(chosen, rejected, valid)"),
        (PAIRS | {"algorithm.pairs": one_too_many}, "returned int32[511] as 'rejected'; expected"),
        (PAIRS | {"algorithm.pair_loss": one_number}, "returned float32[] as 'loss'; expected a"),
        ({"algorithm.answer_filter": of_scores}, "expected one true or false for each answer [B]"),
        ({"reference.mix": 0.5}, "set reference.refresh_every"),
        ({"reference.refresh_every": 2}, "but no function asks for the reference's log-probs"),
        (
            PAIRS | {"algorithm.pair_loss": "simpo", "reference.refresh_every": 2},
            "but no function asks for the reference's log-probs",
        ),
        (
            {"algorithm.kl_loss": "k3", "reference.refresh_every": 2, "reference.mix": 0.5}
            | {"model.lora.rank": 2},
            "reference.mix=0.5: expected 1 with an adapter",
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_refused(keys, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolved(keys)


def test_what_the_page_shows_can_be_configured(tmp_path):
    page = (Path(__file__).parents[2] / "docs/preference.md").read_text()
    (source,) = (b for b in re.findall("```python\n(.*?)```", page, re.S) if "clear_pairs" in b)
    (shown,) = (b for b in re.findall("```yaml\n(.*?)```", page, re.S) if "pair_loss" in b)
    (tmp_path / "my_pairs.py").write_text(source)
    own = {"fn": f"{tmp_path}/my_pairs.py:clear_pairs", "margin": 0.5}
    functions = resolved(yaml.safe_load(shown) | {"algorithm.pairs": own})
    scores, groups = jnp.array([0.0, 0.4, 0.0, 1.0]), jnp.array([0, 0, 1, 1])
    assert functions.pairs(scores, groups).valid.tolist() == [False, False, False, True]


def test_what_pairs_ask_for_decides_the_models_of_a_run():
    functions = resolved(PAIRS)
    assert functions.needs_reference and functions.probes_only and not functions.on_policy
    assert not resolved(PAIRS | {"algorithm.pair_loss": "orpo"}).needs_reference
    filtered = {"algorithm.answer_filter": "best_of_group"}
    assert not resolved(filtered).probes_only, "ppo_clip asks for the old log-probs"
    assert resolved(filtered | {"algorithm.loss": "negative_log_likelihood"}).probes_only


def test_pairs_take_answers_of_other_engines_and_older_policies_as_they_are():
    assert resolved(PAIRS | {"rollout.staleness": 1}).corrections == ()
    assert resolved({"rollout.staleness": 1}).corrections != ()
