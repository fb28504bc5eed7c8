"""What the keys of a teacher with a prompt or with the policy's weights must not say."""

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import TeacherConfig
from jaxrl_llm.training.layouts import longest_teacher_sequence


def check_teacher_prompt(config: TrainConfig) -> None:
    """Refuse prompts of a teacher that could not be followed by the answers."""
    teacher, room = config.teacher, config.batch.max_tokens_per_device
    if teacher.prompt is None:
        if teacher.max_prompt_tokens is not None:
            raise ConfigError("teacher.max_prompt_tokens is set, but teacher.prompt is null")
        return
    if config.rollout.has_episodes:
        raise ConfigError(
            "teacher.prompt is set, but rollout has tools, an environment or an agent: only plain "
            "answers can be read behind another prompt"
        )
    if teacher.url is not None or teacher.tokenizer is not None:
        key = "url" if teacher.url is not None else "tokenizer"
        raise ConfigError(
            f"teacher.prompt is set, and so is teacher.{key}: only a teacher in this process with "
            "the policy's tokens reads another prompt"
        )
    refuse_distributions(config, "prompt")
    longest = longest_teacher_sequence(config)
    if config.mesh.train.context == 1 and room < longest:
        raise ConfigError(
            f"batch.max_tokens_per_device={room} can't hold the longest sequence that the teacher "
            f"reads: its longest prompt + rollout.max_new_tokens = {longest}"
        )


def check_own_teacher(config: TrainConfig) -> None:
    """Refuse keys that contradict the teacher's weights, and a teacher that is the policy."""
    teacher, weights = config.teacher, config.teacher.weights
    if weights != "ema" and teacher.ema != TeacherConfig.ema:
        raise ConfigError(f"teacher.ema={teacher.ema}, but teacher.weights={weights}: remove it")
    if weights == "given":
        return
    refuse_distributions(config, f"weights={weights}")
    for key in ("path", "url", "tokenizer"):
        if getattr(teacher, key) is not None:
            raise ConfigError(
                f"teacher.{key} is set, but teacher.weights={weights} are the policy's own: remove "
                "one"
            )
    if weights == "live" and teacher.prompt is None:
        raise ConfigError(
            "teacher.weights=live without teacher.prompt is the policy itself, from which nothing "
            "is learned: set teacher.prompt, or take other weights"
        )
    is_adapter = config.model.lora is not None or config.model.adapter is not None
    elsewhere = {"mesh.teacher": config.mesh.teacher, "offload.teacher": config.offload.teacher}
    for key in (key for key, value in elsewhere.items() if value):
        if weights == "live" or is_adapter:
            reason = "weights=live are those" if weights == "live" else "base is that"
            raise ConfigError(
                f"{key} is set, but the teacher's {reason} of the policy, where it is trained: "
                "remove it"
            )


def refuse_distributions(config: TrainConfig, key: str) -> None:
    """Refuse a key beside what compares more than the log-probs of the drawn tokens."""
    if config.algorithm.distillation is not None or config.teacher.top_k is not None:
        other = "teacher.top_k" if config.teacher.top_k else "algorithm.distillation"
        raise ConfigError(
            f"teacher.{key} gives log-probs of the drawn tokens alone, but {other} is set: remove "
            "one of them"
        )
