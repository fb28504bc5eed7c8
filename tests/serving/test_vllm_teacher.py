import dataclasses
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.rollout.openai_api.client import SAMPLE, ScoringClient, ScoringError
from jaxrl_llm.rollout.vllm.setup import environment, find_python
from tests.rollout.conftest import log_softmax, next_logits
from tests.specs import DENSE
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.guards("jaxrl_llm/rollout/openai_api/client.py"),
]
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
LONGEST = 128
SPEC = dataclasses.replace(
    DENSE,
    **{"vocab_size": 264, "hidden_size": 64, "head_dim": 32, "ff_width": 96},
    tied_embeddings=True,
    max_positions=LONGEST,
)


@pytest.fixture(scope="module")
def params():
    drawn = init_params(SPEC, key=jax.random.key(3))
    return jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, drawn)  # far from uniform


@pytest.fixture(scope="module")
def url(params, tmp_path_factory):
    """A vLLM server of a small model, on a free port."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    save_params(folder, params, SPEC, source=None, dtype="float32")
    for path in QUICKSTART.iterdir():
        if path.name != "config.json":
            shutil.copy(path, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ["--model", folder, "--served-model-name", "teacher", "--dtype", "float32"]
    settings += ["--max-model-len", LONGEST, "--max-num-seqs", 4, "--enforce-eager"]
    settings += ["--kv-cache-memory-bytes", 2**27, "--block-size", 32, "--port", port]
    program = [find_python(None), "-m", "vllm.entrypoints.openai.api_server"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX", "XLA"))}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [str(part) for part in (*program, "--host", "127.0.0.1", *settings)],
            env=inherited | environment(VllmConfig(), 0, cpu=True),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:

        def listens():
            assert server.poll() is None, (folder / "log").read_text()[-2000:]
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listens, 400)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_known_text_has_the_trainers_log_probs(url, params):
    tokenizer = load_tokenizer(QUICKSTART)
    client = ScoringClient(url, concurrency=2, timeout_s=60)
    assert (client.open(), client.model) == (LONGEST, "teacher")
    client.check_tokens(lambda text: tokenizer(text)["input_ids"], longest=LONGEST, top=4)
    tokens = tokenizer(SAMPLE)["input_ids"]
    expected = log_softmax(next_logits(params, tokens, SPEC))[:-1]
    for top in (0, 4):
        (scored,) = client.score([tokens], top)
        own = expected[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(scored.logprobs[1:], own, atol=1e-4)
        best = np.sort(expected)[:, ::-1][:, :top]
        np.testing.assert_allclose(scored.top_logprobs[1:], best, atol=1e-4)
    with pytest.raises(ScoringError, match="status 400"):
        client.score([tokens * 3])
    client.close()
