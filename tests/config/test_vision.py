"""What does not go together with models that read images is refused, with the key to change."""

import re

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree, load
from jaxrl_llm.config.programs import PreferConfig, SftConfig, TrainConfig
from jaxrl_llm.training.load_model import model_spec

FROZEN = {"model.vision": "frozen"}
PREFER = {
    **{"run_dir": "run", "export_to": "out", "data": {"train": "pairs.jsonl"}},
    "model": {"path": "model", "vision": "frozen"},
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (FROZEN | {"mesh.train.context": 2}, "mesh.train.context=2: expected 1"),
        (FROZEN | {"mesh.critic.stage": 2}, "mesh.critic.stage=2: expected 1"),
        (FROZEN | {"teacher.path": "t"}, "teacher.path is set"),
        (FROZEN | {"critic.path": "c"}, "critic.path is set"),
        (FROZEN | {"implicit_reward_model.path": "c"}, "implicit_reward_model.path is set"),
        (FROZEN | {"reward.classifier": "c"}, "reward.classifier is set"),
        (
            FROZEN | {"algorithm.pairs": "best_and_worst", "algorithm.pair_loss": "dpo"},
            "algorithm.pairs is set",
        ),
        (FROZEN | {"model.random_init": True}, "model.vision=frozen with model.random_init"),
        ({"model.vision": "trained", "model.lora.rank": 4}, "remove model.lora"),
        (
            FROZEN | {"batch.max_visual_tokens_per_device": 10**6},
            "expected at most batch.max_tokens_per_device",
        ),
        ({"batch.max_visual_tokens_per_device": 8}, "model.vision=none reads no images"),
        (FROZEN | {"model.function": "m.py:make"}, "model.vision='frozen' is for models of a Hugg"),
    ],
)
def test_what_does_not_go_with_images(keys, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(TrainConfig, "quickstart", keys)


def test_supervised_training_sees_and_preferences_do_not():
    keys = FROZEN | {"model.random_init": False}
    assert load(SftConfig, "quickstart_sft", keys).model.vision == "frozen"
    with pytest.raises(ConfigError, match=re.escape("teacher.path is set")):
        load(SftConfig, "quickstart_sft", keys | {"teacher.path": "t"})
    with pytest.raises(ConfigError, match="expected none, as preferences are of text alone"):
        from_tree(PreferConfig, PREFER)


def test_a_model_of_text_has_no_tower():
    config = load(TrainConfig, "quickstart", FROZEN | {"model.path": "configs/agents/model"})
    with pytest.raises((ConfigError, ValueError), match="vision"):
        model_spec(config.model)
