"""`python -m jaxrl_llm.export RUN_DIR OUT_DIR`: a checkpoint as a Hugging Face directory."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.config import read_yaml
from jaxrl_llm.functions import ConfigError

ROLES = ("actor", "critic", "reward_model")


def export(
    run_dir: str | Path, out: str | Path, *, step: int | None, dtype: str, role: str = "actor"
) -> int:
    """Write the parameters of a run's checkpoint as a Hugging Face directory.

    Args:
        run_dir: of `train` or `sft`.
        out: directory to write; it must not exist.
        step: of the checkpoint, or None for the newest.
        dtype: of the saved arrays.
        role: which of the models that the run trains.

    Returns:
        The checkpoint's step.

    Raises:
        ConfigError: no run, no such checkpoint, or `out` exists.
    """
    import jax
    import numpy as np

    from jaxrl_llm.checkpoint import CheckpointError, Checkpoints
    from jaxrl_llm.models.hf import save_params
    from jaxrl_llm.models.hf_config import read_spec
    from jaxrl_llm.models.spec import initialize

    folder = Path(run_dir)
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"{str(run_dir)!r} is not a run: it has no checkpoints")
    config = read_yaml(folder / "config.yaml")
    source = config.get(role, {}).get("path") or config["model"]["path"]
    try:
        spec = dataclasses.replace(read_spec(source), value_head=role == "critic")
        checkpoints = Checkpoints(folder / "checkpoints", keep=None, read_only=True)
        like = jax.eval_shape(lambda: initialize(spec, key=jax.random.key(0)))
        trained = [name for name in checkpoints.extra(step)["origin"] if name != "data"]
        if role not in trained:
            raise ConfigError(f"{str(run_dir)!r} trains no {role}, only {', '.join(trained)}")
        saved = checkpoints.restore_params(like, step, role=role)
        params = jax.tree.map(np.asarray, saved.state)
        save_params(out, params, spec, source=source, dtype=jax.numpy.dtype(dtype))
    except (CheckpointError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return saved.step


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
    options = parser.parse_args(arguments)
    try:
        step = export(
            options.run_dir,
            options.out,
            step=options.step,
            dtype=options.dtype,
            role=options.role,
        )
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"wrote step {step} to {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
