"""What is looked at before a model is loaded, besides what functions return."""

import logging

from jaxrl_llm.config.fields import asks_for, name_of
from jaxrl_llm.config.functions import DATASETS, PREPARATIONS, load_function
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.monitoring.trackers.loading import check_trackers
from jaxrl_llm.rewards.scoring import check_scoring
from jaxrl_llm.rollout.load_agent import check_episode_functions
from jaxrl_llm.rollout.vllm.environment import find_python
from jaxrl_llm.training.load_functions import AlgorithmFunctions

log = logging.getLogger(__name__)


def check_inputs(config: TrainConfig, functions: AlgorithmFunctions) -> None:
    """Import the functions that get no arrays, look for vLLM, and warn of what can't learn.

    Raises:
        ConfigError: a function can't be imported, or a tracker's package or vLLM's environment is
            not there.
    """
    data, rollout = config.data, config.rollout
    if config.reward.function:
        check_scoring(config.reward, config.reward.function)
    load_function(data.dataset, DATASETS, passed=("paths",), key="data.dataset")
    if data.prepare:
        load_function(data.prepare, PREPARATIONS, key="data.prepare")
    check_trackers(config)
    if rollout.has_episodes:
        check_episode_functions(rollout)
    if rollout.engine == "vllm" and not (rollout.nodes or rollout.vllm.launch):
        find_python(rollout.vllm.python)  # elsewhere this machine need not have it
    advantage = functions.advantage
    if rollout.samples_per_prompt == 1 and advantage and "group_ids" in asks_for(advantage):
        log.warning(
            "rollout.samples_per_prompt=1, but %s (algorithm.advantage) compares the answers to a "
            "prompt with each other, and there is one: set 2 or more, or take an advantage without "
            "groups, as reinforce_plus_plus",
            name_of(advantage),
        )
