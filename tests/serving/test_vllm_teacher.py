import dataclasses
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.rollout.openai_api.client import SAMPLE, ScoringClient, ScoringError
from jaxrl_llm.rollout.vllm.setup import environment, find_python
from jaxrl_llm.serve import bind
from tests.rollout.conftest import far_from_uniform, log_softmax, next_logits
from tests.specs import DENSE
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.guards("jaxrl_llm/rollout/openai_api/client.py"),
]
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
LONGEST = 128
WIDTHS = {"vocab_size": 264, "hidden_size": 64, "head_dim": 32, "ff_width": 96}
SPEC = dataclasses.replace(DENSE, **WIDTHS, tied_embeddings=True, max_positions=LONGEST)


PARAMS = far_from_uniform(SPEC, seed=3, times=6)


@pytest.fixture
def url(tmp_path):
    """A vLLM server of a small model, on a free port."""
    save_params(tmp_path / "model", PARAMS, SPEC, source=None, dtype="float32")
    for path in QUICKSTART.iterdir():
        if path.name != "config.json":
            shutil.copy(path, tmp_path / "model")
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [find_python(None), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", tmp_path / "model", "--served-model-name", "teacher"]
    command += ["--dtype", "float32", "--max-model-len", LONGEST, "--max-num-seqs", 4]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", 2**27, "--block-size", 32]
    command += ["--host", "127.0.0.1", "--port", port]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX", "XLA"))}
    env |= environment(VllmConfig(), 0, cpu=True)
    server = subprocess.Popen([*map(str, command)], env=env, start_new_session=True)

    def listens():
        assert server.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens, 400)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_known_text_has_the_trainers_log_probs(url):
    tokenizer = load_tokenizer(QUICKSTART)
    client = ScoringClient(url, concurrency=2, timeout_s=60)
    assert (client.open(), client.model) == (LONGEST, "teacher")
    client.check_tokens(lambda text: tokenizer(text)["input_ids"], longest=LONGEST, top=4)
    tokens = tokenizer(SAMPLE)["input_ids"]
    expected = log_softmax(next_logits(PARAMS, tokens, SPEC))[:-1]
    (scored,) = client.score([tokens], 4)
    own = expected[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(scored.logprobs[1:], own, atol=1e-4)
    best = np.sort(expected)[:, ::-1][:, :4]
    np.testing.assert_allclose(scored.top_logprobs[1:], best, atol=1e-4)
    with pytest.raises(ScoringError, match="status 400"):
        client.score([tokens * 3])
    client.close()
