"""`python -m jaxrl_llm.export RUN_DIR OUT_DIR`: a checkpoint as a Hugging Face directory."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.config.functions import ConfigError
from jaxrl_llm.config.keys import LoraConfig
from jaxrl_llm.config.load import build, read_yaml

if TYPE_CHECKING:  # which loads jax
    from jaxrl_llm.models.spec import ModelSpec

ROLES = ("actor", "critic", "reward_model")


class Trained(NamedTuple):
    """What a checkpoint of a run holds of one model.

    Attributes:
        params: on the host; of an adapter only what was trained.
        spec: with the adapter, if there is one.
        source: Hugging Face directory that the model began as.
        step: of the checkpoint.
    """

    params: Any
    spec: "ModelSpec"
    source: str
    step: int


def restore(run_dir: str | Path, *, step: int | None, role: str = "actor") -> Trained:
    """Read the parameters of a run's checkpoint.

    Args:
        run_dir: of `train` or `sft`.
        step: of the checkpoint, or None for the newest.
        role: which of the models that the run trains.

    Raises:
        ConfigError: no run, no such checkpoint, or the run trains no such model.
    """
    import jax

    from jaxrl_llm.models.hf_config import read_spec
    from jaxrl_llm.models.lora import split_adapter
    from jaxrl_llm.models.spec import initialize
    from jaxrl_llm.runs.checkpoint import CheckpointError, Checkpoints
    from jaxrl_llm.training.setup import adapted_spec

    folder = Path(run_dir)
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"{str(run_dir)!r} is not a run: it has no checkpoints")
    config = read_yaml(folder / "config.yaml")
    source = config.get(role, {}).get("path") or config["model"]["path"]
    try:
        spec = read_spec(source)
        if role == "critic":
            spec = dataclasses.replace(spec, value_head=True, reward_head=False)
        if role == "actor":
            spec = adapted_spec(spec, *adapter_keys(config["model"]))
        checkpoints = Checkpoints(folder / "checkpoints", keep=None, read_only=True)
        like = jax.eval_shape(lambda: initialize(spec, key=jax.random.key(0)))
        like = split_adapter(like)[0] if spec.lora else like
        began = checkpoints.extra(step)["origin"]
        trained = [name for name in ROLES if name in began]
        if role not in trained:
            raise ConfigError(f"{str(run_dir)!r} trains no {role}, only {', '.join(trained)}")
        saved = checkpoints.restore_params(like, step, role=role)
    except (CheckpointError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return Trained(saved.state, spec, source, saved.step)  # numpy arrays, as `like` has no layout


def export(
    run_dir: str | Path,
    out: str | Path,
    *,
    step: int | None,
    dtype: str,
    role: str = "actor",
    adapter: bool = False,
) -> int:
    """Write the parameters of a run's checkpoint as a Hugging Face directory.

    A run that trained an adapter gives the model with the adapter merged into it.

    Args:
        run_dir: of `train` or `sft`.
        out: directory to write; it must not exist.
        step: of the checkpoint, or None for the newest.
        dtype: of the saved arrays.
        role: which of the models that the run trains.
        adapter: write the adapter alone, in PEFT's format.

    Returns:
        The checkpoint's step.

    Raises:
        ConfigError: no run, no such checkpoint, no adapter, or `out` exists.
    """
    import jax

    from jaxrl_llm.models.hf import save_params
    from jaxrl_llm.models.hf_adapter import save_adapter
    from jaxrl_llm.training.setup import merged_into_base

    params, spec, source, found = restore(run_dir, step=step, role=role)
    kind = jax.numpy.dtype(dtype)
    if adapter and spec.lora is None:
        raise ConfigError(f"the {role} of {str(run_dir)!r} has no adapter: leave --adapter out")
    try:
        if adapter:
            save_adapter(out, params, spec, base=source, dtype=kind)
            return found
        if spec.lora:
            params, spec = merged_into_base(params, spec, source)
        save_params(out, params, spec, source=source, dtype=kind)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return found


def adapter_keys(model: Mapping[str, Any]) -> tuple[LoraConfig | None, str | None]:
    """Return the keys of a run's model that say which adapter it trained."""
    lora = model.get("lora")  # runs of earlier versions have no such key
    return lora and build(LoraConfig, lora, "model.lora."), model.get("adapter")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.export",
        description="Write a run's checkpoint as a Hugging Face directory.",
    )
    parser.add_argument("run_dir", help="folder of a run of train or sft")
    parser.add_argument("out", help="directory to write; it must not exist")
    parser.add_argument("--step", type=int, help="which checkpoint; default the newest")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the saved arrays"
    )
    parser.add_argument("--role", default="actor", choices=ROLES, help="which model of the run")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapter alone, in PEFT's format, and not the model with it merged in",
    )
    options = parser.parse_args(arguments)
    try:
        step = export(
            options.run_dir,
            options.out,
            step=options.step,
            dtype=options.dtype,
            role=options.role,
            adapter=options.adapter,
        )
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"wrote step {step} to {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
