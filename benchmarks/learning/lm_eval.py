"""The accuracy of one model, by `jaxrl_llm.evaluate` and by lm-eval-harness as a client of `serve`.

    python3 -m venv LM && LM/bin/pip install 'lm-eval[api]'
    python -m benchmarks.learning.lm_eval OUT DATA.parquet --python LM/bin/python

OUT is a Hugging Face directory or the folder of a run, DATA.parquet its held-out rows. Both ask
greedily, in the chat template, and score 1 for the reference answer, spaces around it aside, and
nothing else. What the harness sends to the server is text, and what comes back is text. The two are
compared question by question.

Exit status 1: they don't agree on a question.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.peers.measure import check_python
from benchmarks.tables import parser_of
from jaxrl_llm.data.rows import verl_rows

TASK = """
task: held_out
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], do_sample: false, temperature: 0.0, max_gen_toks: {tokens}}}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    regexes_to_ignore: ['^\\s+', '\\s+$']
"""
START_S = 300


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("data", help="parquet or jsonl file with verl's columns")
    parser.add_argument("--python", required=True, help="interpreter that has lm-eval")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    return parser.parse_args(words)


def by_evaluate(model: str, data: str, tokens: int, folder: Path) -> list[float]:
    """Return the score of each question's greedy response by `jaxrl_llm.evaluate`."""
    keys = [f"max_new_tokens={tokens}", f"out={folder}"]
    command = [sys.executable, "-m", "jaxrl_llm.evaluate", "--model", model, "--data", data]
    function = "reward.function={fn: reasoning_gym, exact: true}"
    subprocess.run([*command, *keys, function], check=True, stdout=sys.stderr)
    rows = pq.read_table(folder / "samples.parquet").to_pylist()
    return [row["score"] for row in sorted(rows, key=lambda row: row["row"])]


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """Serve a model under the name `policy`; yield the address of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "jaxrl_llm.serve",
        "--model",
        model,
        "name=policy",
        "kv_cache_gb=2",
    ]
    server = subprocess.Popen([*command, f"port={port}"], stdout=sys.stderr)
    address, begin = f"http://127.0.0.1:{port}/v1", time.monotonic()
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/models", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() - begin > START_S:
                    raise
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def by_harness(
    python: str, address: str, rows: list[dict[str, Any]], tokens: int, folder: Path
) -> list[float]:
    """Return the score of each question by lm-eval-harness."""
    questions = folder / "questions.jsonl"
    with questions.open("w") as file:
        for row in rows:
            answer = row["reward_model"]["ground_truth"]
            pair = {"question": row["prompt"][-1]["content"], "answer": answer}
            file.write(json.dumps(pair) + "\n")
    (folder / "held_out.yaml").write_text(TASK.format(questions=questions, tokens=tokens))
    system = next((m["content"] for m in rows[0]["prompt"] if m["role"] == "system"), None)
    api = f"model=policy,base_url={address}/chat/completions,num_concurrent=16,eos_string=<none>"
    command = [python, "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", api]
    command += ["--tasks", "held_out", "--include_path", folder, "--apply_chat_template"]
    command += ["--log_samples", "--output_path", folder / "harness"]
    command += ["--system_instruction", system] if system else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    (log,) = (folder / "harness").rglob("samples_held_out_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    return [s["exact_match"] for s in sorted(samples, key=lambda sample: sample["doc_id"])]


def main(words: Sequence[str] | None = None) -> int:
    """Print both accuracies, and on how many questions they agree."""
    args = arguments(words)
    check_python(args.python, "lm_eval")
    rows = verl_rows([args.data])
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        ours = by_evaluate(args.model, args.data, args.max_new_tokens, work / "evaluate")
        with served(args.model) as address:
            theirs = by_harness(args.python, address, rows, args.max_new_tokens, work)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"jaxrl_llm.evaluate {sum(ours) / len(ours):.4f}")
    print(f"lm-eval-harness    {sum(theirs) / len(theirs):.4f}")
    print(f"they agree on {same} of {len(ours)} questions")
    return int(same < len(ours))


if __name__ == "__main__":
    sys.exit(main())
