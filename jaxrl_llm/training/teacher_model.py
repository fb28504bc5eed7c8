"""A teacher in this process, run by an update beside the model that learns from it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.config.sections import ModelConfig
from jaxrl_llm.data.chat import VOCABULARIES
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.model import Model, model_of
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.distillation import Distillation
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.load_model import forward_config, read_model
from jaxrl_llm.training.reward_model import check_same_tokens


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


@activity("loading a teacher")
def open_teacher_model(
    path: str, config: ModelConfig, tokenizer: Any, student: Model, layout: Layout, *, longest: int
) -> TeacherModel:
    """Load a teacher in the compute dtype.

    Args:
        path: Hugging Face directory or hub id.
        config: of the student, which says how both are run.
        tokenizer: of the student; None: the teacher has another one.
        student: that learns from it.
        layout: where the teacher stands.
        longest: sequence, in tokens.

    Raises:
        ValueError: it can't be read, has no logits, or other tokens than the student.
    """
    spec = read_spec(path)
    if spec.value_head or spec.reward_head:
        raise ValueError(f"{path} ends in a value head, expected a language model")
    if spec.max_positions is not None and spec.max_positions < longest:
        raise ValueError(
            f"{path} has {spec.max_positions} positions, but the longest sequence has {longest} "
            "tokens"
        )
    spec = spec.for_length(longest)
    vocab = None if tokenizer is None else shared_tokens(path, spec, tokenizer, student)
    params: Any = read_model(path, spec, layout).params
    if config.dtype != "float32":
        params = reshard(params, layout.of(declare(spec)), dtype=compute_dtypes(spec, config.dtype))
    plain = dataclasses.replace(config, router_loss_coef=0.0)
    return TeacherModel(params, forward_config(plain, model_of(spec), layout), vocab)


def shared_tokens(path: str, spec: ModelSpec, tokenizer: Any, student: Model) -> int | None:
    """Return how many token ids a student and its teacher have in common; None: all of both.

    Vocabularies are often padded to different sizes, as Qwen's to 151,936 and 152,064. Ids beyond
    the student's tokenizer are then left out of the distributions.

    Args:
        path: Hugging Face directory of the teacher; one without a tokenizer is believed if its
            vocabulary has the student's size.
        spec: of the teacher.
        tokenizer: of the student.
        student: that learns from it.

    Raises:
        ValueError: one of the student's tokens is another one for the teacher.
    """
    has_tokenizer = any((resolve(path) / name).is_file() for name in VOCABULARIES)
    if has_tokenizer:
        check_same_tokens(path, tokenizer)
    if spec.vocab_size == student.vocab_size:
        return None
    known = max(tokenizer.get_vocab().values()) + 1
    if not has_tokenizer or known > min(spec.vocab_size, student.vocab_size):
        reason = "" if has_tokenizer else "no tokenizer and "
        raise ValueError(
            f"{path} has {reason}vocab_size={spec.vocab_size}, expected the policy's "
            f"{student.vocab_size}, or a tokenizer that says which tokens are padding"
        )
    return known
