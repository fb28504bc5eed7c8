"""The steps of a planned run, compiled for GPUs that are not there, as files of text.

    python benchmarks/planning/compile_steps.py ORDER.json

`benchmarks.planning.gpu_programs` starts it with the library's tree on the path that is to be
measured, so it uses nothing of this tree.
"""

import argparse
import gzip
import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

SIZES = ("argument", "output", "alias", "temp")


def compile_steps(order: dict) -> None:
    """Compile the steps that are not in the folder yet, one after another.

    Args:
        order: `config`, `overrides`, `target` (a GpuTargetConfigProto as text), `topology`,
            `steps`, `options` of the compiler for each, and the `folder` for the programs and
            their sizes.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jax.experimental import topologies

    from jaxrl_llm.config.load import load
    from jaxrl_llm.config.programs import TrainConfig
    from jaxrl_llm.training.compile import plan_shapes

    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=order["target"], topology=order["topology"]
    ).devices
    shapes = plan_shapes(load(TrainConfig, order["config"], order["overrides"]), devices)
    folder = Path(order["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    for step, trace in shapes.trace.items():
        name = str(step)
        file = folder / f"{name.replace(' ', '_')}.json"
        if name not in order["steps"] or file.exists():
            continue
        lowered, begun = trace().lower(), time.perf_counter()
        compiled = lowered.compile(compiler_options=order["options"][name])
        seconds = time.perf_counter() - begun
        with gzip.open(file.with_suffix(".hlo.gz"), "wt") as program:
            program.write(compiled.as_text())
        layout = shapes.layouts.rollout if step.role == "engine" else shapes.roles[step.role].layout
        memory = compiled.memory_analysis()
        known = {
            "axes": dict(layout.mesh.shape),
            "seconds": seconds,
            "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "sizes": {kind: getattr(memory, f"{kind}_size_in_bytes") for kind in SIZES},
        }
        file.write_text(json.dumps(known))
        print(f"{name}: {seconds:.1f} s", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("order", type=Path, help="JSON: see compile_steps")
    compile_steps(json.loads(parser.parse_args(words).order.read_text()))


if __name__ == "__main__":
    main()
