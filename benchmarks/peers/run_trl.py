"""GRPO steps of TRL for `benchmarks.training.grpo_step`.

`run_trl.py JOB RESULT` in its environment.

Generation is that of transformers, as `GRPOTrainer` runs it without vLLM. Where all answers are
equally long, the end of sequence is suppressed by `min_new_tokens`; else a logits processor forbids
it up to the length that the workload gives an answer, and forces it there.
"""

from meter import Meter, read_job, reward, since_begin  # isort: skip  (starts the clock)

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import transformers
import trl
from datasets import Dataset


class EndsAt(transformers.LogitsProcessor):
    """Ends each answer of a batch after its own number of tokens."""

    def __init__(self, lengths: list[int], prompt_tokens: int, end: int) -> None:
        """Keep the lengths of a batch's answers, and the token that ends one."""
        self.lengths, self.prompt_tokens, self.end = torch.tensor(lengths), prompt_tokens, end

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Force the end of answers that are done, and forbid that of all others."""
        ends = self.lengths <= input_ids.shape[1] - self.prompt_tokens + 1
        keep = scores[:, self.end].clone()
        scores[:, self.end] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, self.end] = keep[ends]
        return scores


def to_lengths(
    generate: Callable[..., Any], lengths: Iterator[list[int]], end: int
) -> Callable[..., Any]:
    """Return a model's `generate` whose answers have given lengths, those of a batch a call."""

    @functools.wraps(generate)
    def generate_to_lengths(**inputs: Any) -> Any:
        processor = EndsAt(next(lengths), inputs["input_ids"].shape[1], end)
        return generate(**inputs, logits_processor=transformers.LogitsProcessorList([processor]))

    return generate_to_lengths


class Metered(trl.GRPOTrainer):
    """Times generation and counts tokens; the trainer itself only reports a whole step."""

    def __init__(self, step_meter: Meter, **keywords: Any) -> None:
        """Make the trainer."""
        self.step_meter = step_meter
        super().__init__(**keywords)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        answers = super()._generate_single_turn(*args, **kwargs)
        seconds = time.perf_counter() - start
        self.step_meter.add(generation_s=seconds, generated=sum(map(len, answers[0])))
        return answers

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if "ref_per_token_logps" not in inputs:
            raise RuntimeError("the trainer has no reference, but its loss has a KL term")
        trained, prompts = (int(inputs[f"{n}_mask"].sum()) for n in ("completion", "prompt"))
        self.step_meter.add(trained=trained, tokens=trained + prompts)
        return super()._compute_loss(model, inputs)


class EndOfStep(transformers.TrainerCallback):
    """Ends the meter's step with the trainer's."""

    first_s = 0.0

    def __init__(self, meter: Meter) -> None:
        """Keep the meter."""
        self.meter = meter

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """End the step."""
        self.meter.end_step()
        self.first_s = self.first_s or since_begin()


def config_of(job: dict[str, Any], folder: str, *, equal: bool) -> trl.GRPOConfig:
    """Return the trainer's settings; `equal` says that all answers are equally long."""
    microbatch = job["microbatch"] * job["samples"]
    return trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_steps=len(job["prompts"]),
        shuffle_dataset=False,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=len(job["lengths"][0]) // microbatch,
        gradient_checkpointing=False,
        num_generations=job["samples"],
        max_completion_length=job["max_new_tokens"],
        generation_kwargs={"min_new_tokens": job["max_new_tokens"]} if equal else {},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=job["grad_clip"],
        beta=job["kl_coef"],
        loss_type="grpo",
    )


def main() -> None:
    """Run all steps and write what they took."""
    job = read_job()
    meter = Meter()
    equal = len({length for lengths in job["lengths"] for length in lengths}) == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    if not equal:
        model.generate = to_lengths(model.generate, iter(job["lengths"]), tokenizer.eos_token_id)
    rewards: list[float] = []

    def reward_all(completions: list[str], **_: Any) -> list[float]:
        values = [reward(text) for text in completions]
        rewards.append(sum(values) / len(values))
        return values

    ends = EndOfStep(meter)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Metered(
            meter,
            model=model,
            args=config_of(job, folder, equal=equal),
            processing_class=tokenizer,
            reward_funcs=reward_all,
            train_dataset=Dataset.from_list(
                [{"prompt": prompt} for prompts in job["prompts"] for prompt in prompts]
            ),
            callbacks=[ends],
        )
        trainer.train()
    meter.write(
        first_s=ends.first_s,
        versions={
            "Python": sys.version.split()[0],
            "TRL": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        threads=torch.get_num_threads(),
        rewards=rewards,
        kl=next(line["kl"] for line in reversed(trainer.state.log_history) if "kl" in line),
    )


if __name__ == "__main__":
    main()
