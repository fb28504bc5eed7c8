"""A reward model that vLLM serves scores as transformers does."""

import asyncio
import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
import transformers

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.rewards.remote import classify
from jaxrl_llm.rollout.vllm.setup import environment, find_python
from tests.e2e.comparing import random_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.guards("jaxrl_llm/rewards/", "models/hf/"),
]

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A random reward model, and the address of a server that holds it."""
    folder, kind = tmp_path_factory.mktemp("served") / "model", "Qwen3ForSequenceClassification"
    random_model(folder, QUICKSTART, kind=kind, num_labels=1, initializer_range=0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", folder, "--served-model-name", "rm", "--runner", "pooling"]
    words += ["--dtype", "float32", "--max-model-len", "64", "--port", str(port), "--enforce-eager"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= environment(VllmConfig(), 0, cpu=True) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [find_python(None), "-m", "vllm.entrypoints.openai.api_server", *words]
    url = f"http://127.0.0.1:{port}"
    with (folder.parent / "log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        while not is_up(url):
            assert server.poll() is None, (folder.parent / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield folder, url
    finally:
        server.terminate()
        server.wait()


def is_up(url):
    with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/health"):
        return True
    return False


@pytest.mark.parametrize("by_ids", [False, True])
def test_its_scores_are_those_of_transformers(served, by_ids):
    folder, url = served
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    prompt, scores = [{"role": "user", "content": "12+34="}], []
    for answer in ("46", "046", "7"):
        chat = [*prompt, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        with torch.no_grad():
            scores.append(model(torch.tensor([ids])).logits.item())
        asked = {"url": url, "model": "rm", "tokenizer": str(folder) if by_ids else None}
        got = asyncio.run(classify("", answer, None, {"prompt": prompt}, **asked))
        assert got == pytest.approx(scores[-1], abs=1e-4)
    assert max(scores) - min(scores) > 0.01
