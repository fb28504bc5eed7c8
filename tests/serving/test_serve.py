import os
import shutil
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import openai
import psutil
import pytest
import torch
import transformers

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import ServeConfig
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.openai_api.client import ScoringClient
from jaxrl_llm.serve import bind, default_cache_gb, open_served_model
from jaxrl_llm.serve import main as serve_main
from jaxrl_llm.serving.app import make_app
from tests.listening import listening
from tests.serving.conftest import QUICKSTART
from tests.waiting import wait_until

transformers.utils.logging.disable_progress_bar()
ROOT = Path(__file__).parents[2]
CLIENT = {"api_key": "secret", "max_retries": 0, "timeout": 120}
IDS = {"extra_body": {"return_token_ids": True}}
END, VOCAB = 257, 264
HI = [{"role": "user", "content": "Hi é"}]


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"tie_word_embeddings": True, "pad_token_id": 256, "eos_token_id": END}
    config = transformers.Qwen3Config(
        **sizes, **heads, **more, initializer_range=0.4, max_position_embeddings=96
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    for path in QUICKSTART.iterdir():
        if path.name != "config.json":
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def opened(directory):
    """What is served, and the engine, on two of the devices."""
    tree = {"model": str(directory), "name": "tiny", "max_running_sequences": 8}
    config = from_tree(ServeConfig, tree | {"mesh": {"rollout": {"devices": 2}}})
    served, engine = open_served_model(config)
    yield served, engine, config.limits
    engine.close()


@pytest.fixture(scope="module")
def address(opened):
    served, engine, limits = opened
    with listening(make_app(engine, served, limits, "secret")) as address:
        yield address


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", **CLIENT) as client:
        yield client


def random_prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, 21)).tolist() for _ in range(count)]


def test_a_cache_takes_what_is_left_of_the_memory_and_no_more(directory, opened, monkeypatch):
    """Without a bound, 64 sequences of 8,192 tokens of a small model were killed for memory."""
    total = psutil.virtual_memory().total
    for devices in (1, 2):
        left = default_cache_gb({}, jax.devices()[:devices])
        assert left == pytest.approx(total / 2e9 / devices, rel=1e-3)
    gpu = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 80_000_000_000})
    weights = {"a": np.zeros((1000, 500_000), np.int8), "b": np.zeros((500_000_000,), np.int8)}
    assert default_cache_gb(weights, [gpu, gpu]) == pytest.approx(63)  # a fifth is not taken
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64}
    monkeypatch.setattr(os, "sysconf", pages.get)
    for name in ("compile_ahead", "load"):
        monkeypatch.setattr(NativeEngine, name, lambda *_, **__: None)
    tree = {"model": str(directory), "max_running_sequences": 8}
    served, engine = open_served_model(
        from_tree(ServeConfig, tree | {"mesh": {"rollout": {"devices": 1}}})
    )
    engine.close()
    room = [each.stats().cache_tokens for each in (opened[1], engine)]
    assert room[0] >= 8 * served.max_tokens > room[1] >= served.max_tokens


def test_greedy_answers_are_those_of_transformers(client, model, opened):
    def greedy(prompt):
        rows = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(rows), "eos_token_id": END, "pad_token_id": 256}
        with torch.no_grad():
            sequences = model.generate(rows, **given, max_new_tokens=24, do_sample=False)
        return sequences[0, len(prompt) :].tolist()

    tokenizer, prompts = opened[0].tokenizer, random_prompts(4)
    fields = {"model": "tiny", "max_tokens": 24, "temperature": 0} | IDS
    answer = client.completions.create(prompt=prompts, **fields)
    expected = [greedy(prompt) for prompt in prompts]
    assert len(np.unique(np.concatenate(expected))) > 8
    assert [choice.token_ids for choice in answer.choices] == expected
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    assert [choice.text for choice in answer.choices] == texts
    answer = client.chat.completions.create(messages=HI, **fields)
    assert tokenizer.decode(answer.prompt_token_ids) == "<|user|>Hi é<|end|><|assistant|>"
    assert answer.choices[0].token_ids == greedy(answer.prompt_token_ids)


def logprobs_of(model, tokens):
    """Return the log-probs [n V] after each token, by transformers."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)


def test_logprobs_are_those_of_transformers(client, model):
    (prompt,) = random_prompts(1, seed=5)
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "seed": 4, "logprobs": 3} | IDS
    choice = client.completions.create(**fields, temperature=0.7).choices[0]
    after = logprobs_of(model, prompt + choice.token_ids)[len(prompt) - 1 : -1]
    after = torch.log_softmax(after / 0.7, -1)
    own = after[range(len(choice.token_ids)), choice.token_ids]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, own, atol=1e-4)
    for top, expected in zip(choice.logprobs.top_logprobs, after, strict=True):
        best = torch.topk(expected, 3).values.tolist()
        np.testing.assert_allclose(sorted(top.values())[::-1][:3], best, atol=1e-4)


def test_prompts_are_scored_as_by_transformers(address, model):
    prompts = random_prompts(3, seed=6)
    scorer = ScoringClient(f"{address}/v1", api_key="secret")
    assert scorer.open() == 96
    scored = scorer.score(prompts, 3)
    scorer.close()
    for prompt, scores in zip(prompts, scored, strict=True):
        expected = logprobs_of(model, prompt)[:-1]
        own = expected[range(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(scores.logprobs[1:], own, atol=1e-4)
        best = torch.topk(expected, 3)
        np.testing.assert_allclose(scores.top_logprobs[1:], best.values, atol=1e-4)
        assert scores.top_ids[1:].tolist() == best.indices.tolist()


def is_healthy(address):
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


def test_the_program_serves_and_ends_with_a_signal(directory, monkeypatch):
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    words = ["--model", str(directory), "name=tiny", f"port={port}"]
    words += ["max_running_sequences=8", "mesh.rollout.devices=2"]
    monkeypatch.setenv("JAXRL_LLM_API_KEY", "secret")
    address, texts = f"http://127.0.0.1:{port}", []

    def ask():
        try:
            wait_until(lambda: is_healthy(address), 300)
            with openai.OpenAI(base_url=f"{address}/v1", **CLIENT) as client:
                fields = {"model": "tiny", "prompt": "a", "max_tokens": 80, "seed": 0}
                fields["extra_body"] = {"ignore_eos": True}
                texts.append(client.completions.create(**fields).choices[0].text)
                pieces = client.completions.create(**fields, stream=True)
                text = next(pieces).choices[0].text
                os.kill(os.getpid(), signal.SIGTERM)
                texts.append(text + "".join(piece.choices[0].text for piece in pieces))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def too_early(*_):
        raise AssertionError("it had not begun to serve")

    handler = signal.signal(signal.SIGTERM, too_early)
    try:
        client = threading.Thread(target=ask)
        client.start()
        assert serve_main(words) == 0
        client.join(120)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert len(texts) == 2 and texts[0] == texts[1]


def test_what_can_not_be_served_is_said(capsys):
    assert serve_main(["--model", "/no/such", "port=0"]) == 2
    assert "model: " in capsys.readouterr().err
    assert serve_main(["--model", "123", "--api-key", "456", "--print-config"]) == 0
    assert "api_key: '456'" in capsys.readouterr().out
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="port"):
            bind("127.0.0.1", taken.getsockname()[1])
