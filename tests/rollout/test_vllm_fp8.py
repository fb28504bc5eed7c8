import contextlib
import dataclasses
import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.vllm import process, setup
from jaxrl_llm.rollout.vllm.engine import VllmEngine, WeightBuffer
from tests.rollout.conftest import expected_logprobs, far_from_uniform
from tests.specs import DENSE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.guards("jaxrl_llm/rollout/vllm/", "models/hf/fp8.py", "models/quantization.py"),
]

KERNELS = Path(__file__).parent / "vllm_kernels"
SPEC = dataclasses.replace(
    DENSE, vocab_size=96, hidden_size=256, head_dim=64, ff_width=384, max_positions=256
)
PROMPT = tuple(range(7, 27))
NEW = 24
ASKED = Request(PROMPT, SamplingParams(NEW, temperature=0.0), 0)
ALONE = """
import json, sys
import torch_fp8
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
llm = LLM(sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, max_model_len=128, block_size=32,
    max_num_seqs=4, enforce_eager=True, kv_cache_memory_bytes=2**26, generation_config="vllm",
    enable_chunked_prefill=False)
[[answer]] = [output.outputs for output in llm.generate(
    [TokensPrompt(prompt_token_ids=json.loads(sys.argv[2]))],
    SamplingParams(temperature=0.0, max_tokens=int(sys.argv[3]), logprobs=0, detokenize=False,
        ignore_eos=True), use_tqdm=False)]
steps = zip(answer.logprobs, answer.token_ids)
print(json.dumps([list(answer.token_ids), [step[token].logprob for step, token in steps]]))
"""


def sampled_alone(folder, source, params):
    """Return greedy tokens and log-probs of a vLLM that loads by itself what is pushed."""
    folder.mkdir()
    with contextlib.closing(WeightBuffer(SPEC, "bfloat16", quantized=True)) as buffer:
        for _ in buffer.write(params, version=0):
            pass
        arrays = {entry.name: np.array(buffer._array(entry)) for entry in buffer.entries}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    paths = os.pathsep.join(map(str, (KERNELS, process.CODE)))
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env |= setup.environment(VllmConfig(), 0, cpu=True) | {"PYTHONPATH": paths}
    command = [setup.find_python(None), "-c", ALONE, str(folder), json.dumps(PROMPT), str(NEW)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_pushes_are_two_checkpoints(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(setup, "has_amx", lambda: True)
    config = VllmConfig(
        launch=(f"env PYTHONPATH={KERNELS}",),
        engine_args={"worker_extension_cls": "torch_fp8.Worker"},
        start_timeout_s=240.0,
    )
    settings = EngineSettings(4, 128, dtype="bfloat16", quantization="fp8")
    folder = tmp_path_factory.mktemp("vllm")
    engine = VllmEngine(SPEC, settings, source=None, config=config, folder=folder)
    with contextlib.closing(engine):
        for version in range(2):
            params = far_from_uniform(SPEC, version, times=3)
            receipt = engine.load(params, version)
            [answer] = engine.sample([ASKED])
            assert receipt.moved_bytes < 1.2 * sum(leaf.size for leaf in jax.tree.leaves(params))
            source, alone = engine._folder / "model", tmp_path / str(version)
            tokens, logprobs = sampled_alone(alone, source, params)
            assert answer.tokens.tolist() == tokens
            np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-6)
            off = np.abs(expected_logprobs(params, ASKED, answer, SPEC) - answer.logprobs).mean()
            assert 0.03 < off < 0.5  # a rounding, and no other weights
