"""The policy that preferences are measured against: the model as its run begins, or another one."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.config.programs import PreferConfig
from jaxrl_llm.data.preferences import Preference, preference_batch
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.inference import Inference, logprob_pass
from jaxrl_llm.training.load_model import LoadedModel, forward_config, open_model
from jaxrl_llm.training.preference_objective import split_sums
from jaxrl_llm.training.update import Learner
from jaxrl_llm.types import Batch


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A reference policy.

    Attributes:
        params: of the reference; where the policy is an adapter, of that adapter as it began.
        infer: (params, batch) -> log-probs of its tokens.
        policy: the same pass of the policy that learns.
    """

    params: Params
    infer: Inference
    policy: Inference

    def annotate(
        self,
        items: Sequence[Preference],
        *,
        width: int,
        size: int,
        tell: Callable[[int], None] = lambda rows: None,
    ) -> list[Preference]:
        """Return preferences with the log-probs of their answers.

        Args:
            items: without them.
            width: of a batch, in tokens.
            size: of a batch, in rows.
            tell: is told how many rows are done, after each batch.
        """
        annotated = []
        for first in range(0, len(items), size):
            some = list(items[first : first + size])
            sums = answer_sums(self.infer, self.params, preference_batch(some, width))
            for index, item in enumerate(some):
                known = {f"ref_{name}": float(values[index]) for name, values in sums.items()}
                columns = {**item.columns, **known}
                annotated.append(dataclasses.replace(item, columns=columns))
            tell(len(some))
        return annotated

    def kl_baseline(self, params: Params, rotated: Batch) -> float:
        """Return KTO's z₀ in nats: the mean log-ratio of answers to other prompts, at least 0.

        KTO (https://arxiv.org/abs/2402.01306, section 4.1).

        Args:
            params: of the policy that learns.
            rotated: the mini-batch, with the answers of other rows.
        """
        policy = answer_sums(self.policy, params, rotated)["logps"]
        reference = answer_sums(self.infer, self.params, rotated)["logps"]
        return max(0.0, float(np.mean(policy - reference)))


def answer_sums(infer: Inference, params: Params, batch: Batch) -> dict[str, np.ndarray]:
    """Return the sums of log-probs of each answer [P], by the names that losses ask for."""
    logprobs = np.where(batch["mask"], infer(params, batch)["logprobs"], 0.0)
    sums = split_sums(logprobs, dict(batch.fields), ("chosen_logps", "rejected_logps"), "logps")
    return {name: np.asarray(values, np.float32) for name, values in sums.items()}


def open_reference(
    config: PreferConfig, model: LoadedModel, learner: Learner, layout: Layout
) -> Reference:
    """Take the model as it was loaded for the reference, or load the one that the config names.

    Args:
        config: of the run.
        model: as it was loaded, before any update.
        learner: of the policy.
        layout: of the policy.

    Raises:
        ConfigError: the reference can't be loaded, or knows other tokens.
    """
    shape, mesh = learner.shape, learner.mesh
    policy = logprob_pass(learner.model, shape, mesh, ("logprobs",), frozen=model.frozen)
    if config.reference is None:
        return Reference(params=model.params, infer=policy, policy=policy)  # updates have a copy
    with config_errors_at("reference"):
        alone = dataclasses.replace(
            config.model, path=config.reference, lora=None, adapter=None, random_init=False
        )
        other = open_model(alone, layout, seed=config.seed).for_length(config.data.max_tokens)
        if other.model.vocab_size != model.model.vocab_size:
            raise ValueError(
                f"{config.reference} has vocab_size={other.model.vocab_size}, expected the "
                f"policy's {model.model.vocab_size}"
            )
    forward = forward_config(alone, other.model, layout).over(shape)
    infer = logprob_pass(forward, shape, mesh, ("logprobs",))
    return Reference(params=other.params, infer=infer, policy=policy)
