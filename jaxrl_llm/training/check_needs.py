"""What functions ask for, held against the keys of a config that produce or read it."""

import logging

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.fields import asks_for, fields_of_model
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import AlgorithmConfig, TeacherConfig
from jaxrl_llm.training.check_own_teacher import check_own_teacher, check_teacher_prompt
from jaxrl_llm.training.distillation import OF_TOP
from jaxrl_llm.training.load_functions import AlgorithmFunctions
from jaxrl_llm.training.objective import PolicyObjective

log = logging.getLogger(__name__)


def check_producers(config: TrainConfig, needs: frozenset[str]) -> None:
    """Refuse fields that no key produces, and keys that produce what nothing asks for."""
    producers = {
        "high_covariance": ("algorithm.high_covariance", config.algorithm.high_covariance),
        "score_components": ("reward.components", config.reward.components),
    }
    for field, (key, value) in producers.items():
        if field in needs and not value:
            raise ConfigError(f"{key} is not set, but a function asks for {field!r}")
        if value and field not in needs:
            raise ConfigError(f"{key} is set, but no function asks for {field!r}: remove it")


def check_scores_are_used(algorithm: AlgorithmConfig, functions: AlgorithmFunctions) -> None:
    """Refuse keys that change scores and rewards where no function asks for them afterwards.

    The group filter and the penalty are called before, and see the scores as they were.
    """
    later = functions.advantage, functions.answer_filter, functions.pairs, *functions.corrections
    asked = {name for function in later if function for name in asks_for(function)}
    asked = asked.union(*(update.objective.asks_for() for update in functions.updates.values()))
    for name in ("penalty", "kl_reward"):
        if getattr(algorithm, name) and not asked & {"scores", "rewards"}:
            raise ConfigError(
                f"algorithm.{name} changes the scores and rewards, but no function asks for "
                "them afterwards: remove it, or name an advantage that does"
            )


def check_skipped_pass(algorithm: AlgorithmConfig, needs: frozenset[str]) -> None:
    """Refuse to skip the pass for the old log-probs where a function needs what it computes."""
    missing = sorted(needs & {"entropy", "sum_pi_squared"})
    if algorithm.use_rollout_logprobs and missing:
        raise ConfigError(
            f"algorithm.use_rollout_logprobs skips the pass that computes {missing[0]!r}, "
            "which a function asks for: set it to false"
        )


def check_staleness(config: TrainConfig, needs: frozenset[str], policy: PolicyObjective) -> None:
    """Refuse what compares answers of several policies, and warn of a trust region around one.

    A loss that asks for ages and the engine's log-probs weighs tokens of older policies by itself.
    """
    staleness = config.rollout.staleness
    weighs = policy.asks_for() >= {"ages", "rollout_logprobs"}
    if weighs and policy.corrected:
        raise ConfigError(
            "algorithm.loss asks for 'ages' and 'rollout_logprobs', so that algorithm.correction "
            "would weigh tokens a second time: set algorithm.use_rollout_logprobs to true, which "
            "also skips the pass for the old log-probs"
        )
    if staleness and "greedy_scores" in needs:
        raise ConfigError(
            f"rollout.staleness={staleness}, but a function asks for 'greedy_scores': greedy "
            "answers of the newest policy are no baseline for answers of older ones"
        )
    if staleness and config.algorithm.use_rollout_logprobs and not weighs:
        log.warning(
            "algorithm.use_rollout_logprobs with rollout.staleness=%d: the loss clips around "
            "policies that are up to %d updates old (docs/async.md)",
            *(staleness, staleness),
        )


def check_router_replay(config: TrainConfig, functions: AlgorithmFunctions) -> None:
    """Refuse to replay choices of experts that nothing has recorded, or that an update can't."""
    replay, key = config.model.router_replay, f"model.router_replay={config.model.router_replay}"
    if replay == "none":
        return
    if config.algorithm.pairs is not None:
        raise ConfigError(f"{key}, but algorithm.pairs takes answers of any policy: remove it")
    if replay == "rollout" and config.rollout.engine == "vllm":
        raise ConfigError(
            f"{key}, but rollout.engine=vllm: only the native engine says which experts it has "
            "chosen; set rollout.engine to native, or replay old_policy"
        )
    if replay == "rollout":
        return
    if functions.on_policy:
        raise ConfigError(
            f"{key}, but a step is one update on all of its answers, whose own pass is that of the "
            "old policy: remove it, or lower batch.prompts_per_minibatch"
        )
    if config.algorithm.use_rollout_logprobs or functions.probes_only:
        raise ConfigError(
            f"{key}, but there is no pass for the old log-probs of all answers: set "
            "algorithm.use_rollout_logprobs to false, or replay rollout"
        )
    if config.mesh.train.stage > 1:
        raise ConfigError(
            f"{key}, but mesh.train.stage={config.mesh.train.stage}: stages do not report which "
            "experts their layers chose; expected stage=1, or replay rollout"
        )


def check_refresh(config: TrainConfig, needs: frozenset[str]) -> None:
    """Refuse to refresh a reference that there is not."""
    every = config.reference.refresh_every
    if every is not None and not needs & fields_of_model("reference"):
        raise ConfigError(
            f"reference.refresh_every={every}, but no function asks for the reference's log-probs: "
            "remove it, or name a KL, as in algorithm.kl_loss=k3, or a loss of pairs with a "
            "reference"
        )


def check_teacher(config: TrainConfig, needs: frozenset[str]) -> None:
    """Refuse a teacher that no function asks for, none where one does, and tempered samples."""
    asked = sorted(needs & fields_of_model("teacher"))
    if config.algorithm.distillation:
        asked.append("algorithm.distillation")
    of_top = sorted(needs & set(OF_TOP))
    if bool(of_top) != (config.teacher.top_k is not None):
        raise ConfigError(
            f"teacher.top_k is not set, but a function asks for {of_top[0]!r}"
            if of_top
            else f"teacher.top_k is set, but no function asks for {' or '.join(OF_TOP)}, and there "
            "is no algorithm.distillation: remove it"
        )
    places = config.teacher.path, config.teacher.url
    if asked and places == (None, None) and config.teacher.weights == "given":
        by = f"a function asks for {asked[0]!r}"
        by = "algorithm.distillation needs a teacher" if config.algorithm.distillation else by
        raise ConfigError(
            f"teacher.path is not set, but {by}: name a teacher there, or in teacher.url, or take "
            "the policy's own weights by teacher.weights"
        )
    if not asked and config.teacher != TeacherConfig():
        raise ConfigError(
            "teacher is set, but no function asks for teacher_logprobs, and there is no "
            "algorithm.distillation: remove it, or name an advantage that does, as reverse_kl, or "
            "a divergence"
        )
    check_teacher_keys(config)
    check_teacher_prompt(config)
    check_own_teacher(config)
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    sampled = {key: getattr(config.rollout, key) for key in plain}
    changed = [f"rollout.{key}={value}" for key, value in sampled.items() if value != plain[key]]
    if "teacher_logprobs" in needs and changed:
        raise ConfigError(
            f"{' and '.join(changed)}, but a teacher's log-probs are compared with those of plain "
            "samples: expected rollout.temperature=1, top_p=1 and top_k=0"
        )


def check_teacher_keys(config: TrainConfig) -> None:
    """Refuse keys of a teacher that contradict each other, or that nothing would read."""
    teacher, default = config.teacher, TeacherConfig()
    if teacher.path is not None and teacher.url is not None:
        raise ConfigError(
            "teacher.path and teacher.url are both set: a teacher stands in one place"
        )
    readers = {
        "url": ("model", "api_key", "concurrency", "timeout_s", "retries"),
        "tokenizer": ("chat_template_kwargs", "max_tokens"),
    }
    for reader, keys in readers.items():
        changed = [key for key in keys if getattr(teacher, key) != getattr(default, key)]
        if getattr(teacher, reader) is None and changed:
            raise ConfigError(
                f"teacher.{changed[0]} is set, but teacher.{reader} is not: nothing reads it"
            )
    if teacher.tokenizer is not None and teacher.top_k is not None:
        raise ConfigError(
            "teacher.tokenizer and teacher.top_k are both set: the likeliest tokens of another "
            "tokenizer are none of the policy's"
        )
    if teacher.tokenizer is not None and config.rollout.has_episodes:
        raise ConfigError(
            "teacher.tokenizer is set, but rollout has tools, an environment or an agent: only "
            "plain answers can be written in another tokenizer's tokens"
        )


def check_distillation(config: TrainConfig) -> None:
    """Refuse contradictions between the teacher's keys and what is distilled from it."""
    algorithm, teacher = config.algorithm, config.teacher
    spec, of_top = algorithm.distillation, teacher.top_k is not None
    if spec is None:
        if algorithm.loss is None:
            raise ConfigError("algorithm.loss is null, and so is algorithm.distillation: set one")
        if algorithm.distillation_coef != AlgorithmConfig().distillation_coef:
            raise ConfigError(
                "algorithm.distillation_coef is set, but algorithm.distillation is null: remove it"
            )
        return
    default = AlgorithmConfig().advantage
    if algorithm.loss is None and (algorithm.advantage != default or algorithm.correction):
        key = "correction" if algorithm.advantage == default else "advantage"
        raise ConfigError(
            f"algorithm.loss is null, so that nothing is learned by algorithm.{key}: remove it, or "
            f"set it to {'null' if key == 'correction' else getattr(default, 'fn', default)}"
        )
    if of_top and spec.kwargs.get("temperature", 1) != 1:
        raise ConfigError(
            f"algorithm.distillation.temperature={spec.kwargs['temperature']}, but of the tokens "
            "beyond teacher.top_k only the sum is known, and not at another temperature: "
            "set it to 1, or teacher.top_k to null"
        )
    if not of_top and (teacher.url is not None or teacher.tokenizer is not None):
        key = "url" if teacher.url is not None else "tokenizer"
        raise ConfigError(
            f"teacher.{key} is set, but over the whole vocabulary algorithm.distillation runs a "
            "teacher with the policy's tokens in this process: "
            + ("set teacher.top_k, too" if key == "url" else "remove it")
        )
    if not of_top and (isinstance(teacher.path, dict) or config.mesh.teacher is not None):
        key = (
            "teacher.path has several" if isinstance(teacher.path, dict) else "mesh.teacher is set"
        )
        raise ConfigError(
            f"{key}, but over the whole vocabulary algorithm.distillation runs one teacher where "
            "the policy is trained: set teacher.top_k, or name one teacher without a mesh"
        )
