"""`python -m jaxrl_llm.plan --config X.yaml --devices N`: memory and time of a run, without GPUs.

The run's own steps are lowered and compiled for N simulated devices, with shapes in place of
arrays. What they need is read off the compiled programs; see docs/planning.md.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.files import load
from jaxrl_llm.config.train import TrainConfig


def simulate_devices(devices: int) -> None:
    """Make jax believe in so many CPU devices; it must not have looked at any yet.

    The CPU's compiler widens matrices before it multiplies them. It must do so where they are used
    and not ahead, or all of them would be there at once, as they never are on a GPU.
    """
    flags = "--xla_disable_hlo_passes=while-loop-invariant-code-motion"
    flags += ",while-loop-expensive-invariant-code-motion"
    flags += " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def plan_run(config: TrainConfig, gpu: str, change: Callable[[Sequence[str]], TrainConfig]) -> str:
    """Plan a run and return the plan as text.

    Args:
        config: of the run.
        gpu: one of `planning.estimate.GPUS`.
        change: overrides -> the config with them.
    """
    from jaxrl_llm.planning import report
    from jaxrl_llm.planning.advice import advise
    from jaxrl_llm.planning.estimate import GPUS, USABLE
    from jaxrl_llm.planning.memory import memory_by_phase, plan_shapes
    from jaxrl_llm.planning.steps import compile_planned_steps

    shapes = plan_shapes(config)
    steps = compile_planned_steps(shapes, GPUS[gpu])
    scratch = {planned.step: planned.scratch for planned in steps}
    memory = memory_by_phase(shapes, scratch)
    limit = GPUS[gpu].memory * USABLE
    lines = [*report.describe_run(shapes), "", *report.describe_memory(memory, limit, gpu)]
    if max(p.total for p in memory) > limit:
        lines += ["", *report.describe_advice(advise(shapes, scratch, limit, change), limit)]
    lines += ["", *report.describe_operations(steps), "", *report.describe_collectives(steps)]
    return "\n".join([*lines, "", *report.describe_time(steps, shapes, gpu)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.plan",
        description="Say what memory, operations, communication and time a run needs.",
    )
    parser.add_argument("--config", required=True, metavar="FILE.yaml", help="the run's config")
    parser.add_argument("--devices", required=True, type=int, help="how many GPUs")
    parser.add_argument("--gpu", default="H100", choices=("H100", "H200", "B200"))
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="keys to change")
    options = parser.parse_intermixed_args(arguments)

    from jaxrl_llm.monitoring.logs import quiet_libraries  # which imports jax

    def change(more: Sequence[str]) -> TrainConfig:
        own = [*options.overrides, "model.attention=xla"]  # no GPU's kernel compiles here
        return load(TrainConfig, options.config, [*own, *more])

    try:
        config = change(())
        simulate_devices(options.devices)
        quiet_libraries()
        sys.stdout.write(plan_run(config, options.gpu, change))
    except ConfigError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
