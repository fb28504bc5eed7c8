"""A teacher in this process, run by an update beside the model that learns from it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.config.sections.model import ModelConfig
from jaxrl_llm.data.chat import VOCABULARIES, load_tokenizer
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.model import Model, model_of
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.distillation import Distillation
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.load_model import forward_config, read_model


class TeacherModel(NamedTuple):
    """A loaded teacher.

    Attributes:
        params: its parameters, in the compute dtype.
        forward: how it is run.
        vocab: the tokens that it and the student have; None: all of both.
    """

    params: Params
    forward: ForwardConfig
    vocab: int | None

    def compared_by(self, divergence: Callable[..., Any], shape: RowShape) -> Distillation:
        """Return how an update compares its model with this teacher.

        Args:
            divergence: of the model from the teacher.
            shape: of the micro-batches, which suits the model.
        """
        forward = self.forward.over(shape)
        if shape.longest is not None:  # a kernel has its own limits; see `takes_long_rows`
            forward = dataclasses.replace(forward, kernel=None)
        return Distillation(divergence=divergence, teacher=forward, vocab=self.vocab)


@activity("loading the teacher")
def open_teacher_model(
    path: str, key: str, config: ModelConfig, student: Model, layout: Layout, *, longest: int
) -> TeacherModel:
    """Load a teacher in the compute dtype, where the student is trained.

    Args:
        path: Hugging Face directory or hub id.
        key: its config key, for messages.
        config: of the student, which says how both are run.
        student: that learns from it.
        layout: where both stand.
        longest: sequence, in tokens.

    Raises:
        ConfigError: it can't be read, has no logits, or other tokens than the student.
    """
    with config_errors_at(key):
        spec = read_spec(path)
        if spec.value_head or spec.reward_head:
            raise ValueError(f"{path} ends in a value head, expected a language model")
        if spec.max_positions < longest:
            raise ValueError(
                f"{path} has {spec.max_positions} positions, but the longest sequence has {longest}"
            )
        vocab = common_tokens(config.path, student.vocab_size, path, spec.vocab_size)
        params: Any = read_model(path, spec, layout).params
    if config.dtype != "float32":
        params = reshard(params, layout.of(declare(spec)), dtype=compute_dtypes(spec, config.dtype))
    return TeacherModel(params, forward_config(config, model_of(spec), layout), vocab)


def common_tokens(student: str, student_size: int, teacher: str, teacher_size: int) -> int | None:
    """Return how many token ids a student and its teacher have in common; None: all.

    Vocabularies are often padded to different sizes, as Qwen's to 151,936 and 152,064. Ids beyond
    both tokenizers are then left out of the distributions.

    Args:
        student: Hugging Face directory.
        student_size: rows of its embedding.
        teacher: Hugging Face directory; one without a tokenizer is believed if it has the student's
            size.
        teacher_size: rows of its embedding.

    Raises:
        ValueError: the two have different tokens.
    """
    own, theirs = (_tokens(path) for path in (student, teacher))
    if own is not None and theirs is not None and own != theirs:
        token = next(t for t in (*own, *theirs) if own.get(t) != theirs.get(t))
        raise ValueError(
            f"{teacher} has another tokenizer than {student}: {token!r} is {theirs.get(token)} "
            f"there and {own.get(token)} here; a divergence over the vocabulary needs the same "
            "tokens"
        )
    if student_size == teacher_size:
        return None
    known = max(own.values()) + 1 if own and theirs else None
    if known is None or known > min(student_size, teacher_size):
        raise ValueError(
            f"{teacher} has vocab_size={teacher_size} and {student} has {student_size}; expected "
            "the same, or two tokenizers that say which ids are padding"
        )
    return known


def _tokens(path: str) -> dict[str, int] | None:
    """Return the ids of a directory's tokens; None where it has no tokenizer."""
    if not any((resolve(path) / name).is_file() for name in VOCABULARIES):
        return None
    return load_tokenizer(path).get_vocab()
