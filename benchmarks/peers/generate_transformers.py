"""Generation by transformers for `benchmarks.generation.generate`.

`generate_transformers.py JOB RESULT` in its environment.

Each batch is padded on the left and decoded until its longest answer is done. Nothing ends an
answer by itself: there is no token for it.
"""

from meter import Meter, read_job  # isort: skip  (first: it starts the clock)

import sys
from typing import Any


def main() -> None:
    """Generate, pass after pass, and write what it took."""
    import torch
    import transformers

    job = read_job()
    device = "cuda" if job["device"] == "gpu" else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], new_tokens: int, **options: Any) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        sequences = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=0, **options
        )
        return sequences[:, width:].tolist()

    meter = Meter()
    for _ in range(job["passes"]):
        for prompts, lengths in zip(job["tokens"], job["lengths"], strict=True):
            drawn = generate(prompts, max(lengths), do_sample=True, temperature=1.0, top_k=0)
            kept = [row[:length] for row, length in zip(drawn, lengths, strict=True)]
            meter.add(generated=sum(map(len, kept)))
        meter.end_step()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    meter.write(
        **({"peak_gb": peak / 1e9} if peak else {}),
        greedy=generate(job["greedy"], job["greedy_tokens"], do_sample=False),
        versions={
            "Python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
