"""How long `jaxrl_llm.evaluate` and `jaxrl_llm.serve` take from their start to what they are for.

    python -m benchmarks.generation.start runs/quickstart \\
        --evaluate data=runs/quickstart/data/validation.parquet max_new_tokens=5 \\
        reward.function=arithmetic

Seconds from the start of the process to the end of an evaluation of all rows, and to the server's
first response. "cold" has an empty cache of compiled programs, "warm" is the same again, the median
of several. One process at a time; run it on a machine that does nothing else.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from benchmarks.tables import parser_of

LIMIT_S = 300


def evaluation_s(model: str, keys: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return the seconds of a whole evaluation."""
    command = [sys.executable, "-m", "jaxrl_llm.evaluate", "--model", model, *keys]
    begin = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr, timeout=LIMIT_S)
    return time.perf_counter() - begin


def first_answer_s(model: str, environment: Mapping[str, str]) -> float:
    """Return the seconds from a server's start to the first text that it returns."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxrl_llm.serve", "--model", model, f"port={port}", "name=m"]
    body = json.dumps({"model": "m", "prompt": "12+34=", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while time.perf_counter() - begin < LIMIT_S and server.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
                    json.load(response)["choices"][0]["text"]
                return time.perf_counter() - begin
            time.sleep(0.02)
    finally:
        server.terminate()
        server.wait()
    raise SystemExit(f"{' '.join(command)} returned no response")


def main(words: Sequence[str] | None = None) -> None:
    """Measure both and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a Hugging Face directory or a run's folder")
    parser.add_argument(
        "--evaluate", nargs="+", required=True, metavar="KEY=VALUE", help="keys of the evaluation"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each warm start")
    options = parser.parse_args(words)
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    print("| program | cold, s | warm, s (least to most) |\n| --- | --- | --- |")
    for name, measure in (
        ("evaluate, to its end", lambda env: evaluation_s(options.model, options.evaluate, env)),
        ("serve, to the first response", lambda env: first_answer_s(options.model, env)),
    ):
        with tempfile.TemporaryDirectory() as cache:
            environment = kept | {"XDG_CACHE_HOME": cache, "JAX_PLATFORMS": "cpu"}
            cold, *warm = (measure(environment) for _ in range(options.repeats + 1))
        spread = f"{statistics.median(warm):.1f} ({min(warm):.1f} to {max(warm):.1f})"
        print(f"| {name} | {cold:.1f} | {spread} |")


if __name__ == "__main__":
    main()
