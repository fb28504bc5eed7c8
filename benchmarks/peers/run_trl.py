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
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    """Run all steps and write what they took."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    job = read_job()
    meter = Meter()
    steps, sequences = len(job["prompts"]), len(job["lengths"][0])
    microbatch = job["microbatch"] * job["samples"]
    even = len({length for lengths in job["lengths"] for length in lengths}) == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    rewards: list[float] = []

    class EndsAt(transformers.LogitsProcessor):
        """Ends each answer of a batch after its own number of tokens."""

        def __init__(self, lengths: list[int], prompt_tokens: int) -> None:
            self.lengths, self.prompt_tokens = torch.tensor(lengths), prompt_tokens

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            ends = self.lengths <= input_ids.shape[1] - self.prompt_tokens + 1
            keep = scores[:, tokenizer.eos_token_id].clone()
            scores[:, tokenizer.eos_token_id] = -torch.inf
            scores[ends] = -torch.inf
            scores[ends, tokenizer.eos_token_id] = keep[ends]
            return scores

    generate, all_lengths = model.generate, iter(job["lengths"])

    @functools.wraps(generate)
    def generate_to_lengths(**inputs: Any) -> Any:
        processor = EndsAt(next(all_lengths), inputs["input_ids"].shape[1])
        return generate(**inputs, logits_processor=transformers.LogitsProcessorList([processor]))

    if not even:
        model.generate = generate_to_lengths

    class Metered(trl.GRPOTrainer):
        """Times generation and counts tokens; the trainer itself only reports a whole step."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = super()._generate_single_turn(*args, **kwargs)
            meter.add(generation_s=time.perf_counter() - start, generated=sum(map(len, found[0])))
            return found

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            if "ref_per_token_logps" not in inputs:
                raise RuntimeError("the trainer has no reference, but its loss has a KL term")
            trained, prompts = (int(inputs[f"{n}_mask"].sum()) for n in ("completion", "prompt"))
            meter.add(trained=trained, tokens=trained + prompts)
            return super()._compute_loss(model, inputs)

    class EndOfStep(transformers.TrainerCallback):
        """Ends the meter's step with the trainer's."""

        first_s = 0.0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.end_step()
            self.first_s = self.first_s or since_begin()

    def reward_all(completions: list[str], **_: Any) -> list[float]:
        found = [reward(text) for text in completions]
        rewards.append(sum(found) / len(found))
        return found

    ends = EndOfStep()
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            max_steps=steps,
            shuffle_dataset=False,
            per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=sequences // microbatch,
            gradient_checkpointing=False,
            num_generations=job["samples"],
            max_completion_length=job["max_new_tokens"],
            generation_kwargs={"min_new_tokens": job["max_new_tokens"]} if even else {},
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
        trainer = Metered(
            model=model,
            args=config,
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
