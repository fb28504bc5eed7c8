"""GRPO of TRL for `benchmarks.learning.against_trl`: `learn_trl.py JOB RESULT`, in its venv.

`device` and `seconds` in the job are as for `learn_ours.py`.
"""

from meter import exact_match, peak_gb, read_job, since_begin  # isort: skip  (starts the clock)

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import transformers
import trl
from datasets import Dataset


class EndsOfSteps(transformers.TrainerCallback):
    """Keeps when each step ended, and ends the run when its seconds are over."""

    def __init__(self, seconds: float | None) -> None:
        """Begin without any."""
        self.ends: list[float] = []
        self._seconds = seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the time."""
        self.ends.append(since_begin())
        if self._seconds is not None and self.ends[-1] > self._seconds:
            control.should_training_stop = True


def config_of(job: dict[str, Any], folder: str) -> trl.GRPOConfig:
    """Return the trainer's settings."""
    sequences = job["prompts_per_step"] * job["samples"]
    return trl.GRPOConfig(
        output_dir=folder,
        seed=job["seed"],
        use_cpu=job.get("device", "cpu") == "cpu",
        bf16=job.get("device", "cpu") != "cpu",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_steps=job["steps"],
        shuffle_dataset=False,
        per_device_train_batch_size=job["microbatch"],
        gradient_accumulation_steps=sequences // job["microbatch"],
        gradient_checkpointing=False,
        num_generations=job["samples"],
        max_completion_length=job["max_new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=job["grad_clip"],
        beta=0.0,
        loss_type="grpo",
    )


def main() -> None:
    """Take all steps; write the mean reward of each, and when it ended."""
    job = read_job()
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    ends = EndsOfSteps(job.get("seconds"))

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [exact_match(text, truth) for text, truth in zip(texts, answer, strict=True)]

    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in job["rows"]]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model,
            args=config_of(job, folder),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            callbacks=[ends],
        )
        trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    result = {
        "rewards": [line["reward"] for line in lines],
        "lengths": [line["completions/mean_length"] for line in lines],
        "ends": ends.ends,
        "peak_gb": peak_gb(),
        "versions": {
            "Python": sys.version.split()[0],
            "TRL": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
