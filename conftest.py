"""Test set-up: eight CPU devices, so that every test can build real meshes; no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PJRT_NPROC"] = "128"  # threads for eight devices that wait for each other
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import jax

if not os.environ.get("JAX_PLATFORMS", "").startswith("cuda"):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

collect_ignore = ["jaxrl_llm/rollout/vllm/sidecar"]  # it runs where vLLM is, and we are not

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("fixed")
