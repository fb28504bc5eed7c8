"""GRPO steps of Tunix for `benchmarks.training.grpo_step`.

`run_tunix.py JOB RESULT` in its environment.

Generation is that of its own ("vanilla") JAX rollout, which decodes a batch until its last answer
is done and stops only at an end of sequence. That and the padding token, which its masks would
drop, are forbidden; each answer is then cut to the length that the workload gives it. To stop some
answers early would save it nothing, since another one has the longest length in every step.
"""

from meter import Meter, read_job, reward, since_begin  # isort: skip  (first: it starts the clock)

import functools
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import jax
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.generate import sampler as sampling
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix_model import model_config


def cluster_config(job: dict[str, Any], mesh: Any) -> Any:
    """Return the settings of Tunix's cluster of one device."""
    prompts_per_step = len(job["prompts"][0])
    return rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(
            (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh
        ),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.chain(
                optax.clip_by_global_norm(job["grad_clip"]),
                optax.adamw(job["learning_rate"], weight_decay=0.0),
            ),
            eval_every_n_steps=10**9,
            max_steps=len(job["prompts"]),
            mini_batch_size=prompts_per_step,
            train_micro_batch_size=job["microbatch"],
            rollout_micro_batch_size=prompts_per_step,
            compute_logps_micro_batch_size=job["microbatch"],
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=job["max_new_tokens"],
            max_prompt_length=job["longest_prompt"],
            kv_cache_size=job["longest_prompt"] + job["max_new_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            eos_tokens=[-1],
        ),
    )


def make_cluster(job: dict[str, Any], tokenizer: Any) -> Any:
    """Load actor and reference onto one device."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    settings = model_config(job)
    actor, reference = (
        qwen3_params.create_model_from_safe_tensors(job["model"], settings, mesh) for _ in range(2)
    )
    return rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=tokenizer,
        cluster_config=cluster_config(job, mesh),
    )


def make_learner(job: dict[str, Any], cluster: Any, rewards: list[float]) -> Any:
    """Make the learner, which appends each step's mean reward to `rewards`."""

    def reward_all(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        values = [reward(text) for text in completions]
        rewards.append(sum(values) / len(values))
        return values

    return grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=job["samples"],
            num_iterations=1,
            beta=job["kl_coef"],
            kl_loss_mode="low_var_kl",
            epsilon=0.2,
        ),
        reward_fns=reward_all,
    )


def metered_generate(
    cluster: Any, tokenizer: Any, lengths: Iterator[list[int]], meter: Meter
) -> Callable[..., Any]:
    """Return the cluster's `generate`, timed, with answers cut to their lengths."""
    generate = cluster.generate

    def run(*args: Any, **kwargs: Any) -> Any:
        wait_for(cluster)
        start = time.perf_counter()
        answers = generate(*args, **kwargs)
        answers.tokens = [
            tokens[:length] for tokens, length in zip(answers.tokens, next(lengths), strict=True)
        ]
        answers.text = [tokenizer.decode(tokens) for tokens in answers.tokens]
        seconds = time.perf_counter() - start
        meter.add(generation_s=seconds, generated=sum(map(len, answers.tokens)))
        return answers

    return run


def metered_prepare(learner: Any, meter: Meter) -> Callable[..., Any]:
    """Return the learner's preparation of a batch, with its tokens counted."""
    prepare = learner._generate_and_compute_advantage

    def run(*args: Any, **kwargs: Any) -> Any:
        example = prepare(*args, **kwargs)
        if example.ref_per_token_logps is None:
            raise RuntimeError("the learner has no reference, but its loss has a KL term")
        trained = int(example.completion_mask.sum())
        meter.add(trained=trained, tokens=trained + int(example.prompt_mask.sum()))
        return example

    return run


def wait_for(cluster: Any) -> None:
    """Wait until the actor's parameters are computed."""
    jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))


def main() -> None:
    """Run all steps and write what they took."""
    job = read_job()
    meter = Meter()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    forbidden = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    sampling.Sampler.__call__ = functools.partialmethod(
        sampling.Sampler.__call__, forbidden_tokens=forbidden
    )
    cluster = make_cluster(job, tokenizer)
    rewards: list[float] = []
    learner = make_learner(job, cluster, rewards)
    run_step, first_s = learner._run_global_step, []

    def metered_step(*args: Any, **kwargs: Any) -> None:
        run_step(*args, **kwargs)  # raises StopIteration when the prompts are used up
        wait_for(cluster)
        meter.end_step()
        first_s.append(since_begin())

    cluster.generate = metered_generate(cluster, tokenizer, iter(job["lengths"]), meter)
    learner._generate_and_compute_advantage = metered_prepare(learner, meter)
    learner._run_global_step = metered_step

    def batches() -> Iterator[dict[str, Any]]:
        for prompts in job["prompts"]:
            yield {"prompts": np.array(prompts)}

    learner.train(batches())
    names = {"Tunix": "google-tunix", "jax": "jax", "flax": "flax"}
    meter.write(
        first_s=first_s[0],
        versions={"Python": sys.version.split()[0]}
        | {name: importlib.metadata.version(package) for name, package in names.items()},
        rewards=rewards,
    )


if __name__ == "__main__":
    main()
