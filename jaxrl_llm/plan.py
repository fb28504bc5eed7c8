"""`python -m jaxrl_llm.plan --config X.yaml --devices N`: memory and time of a run, without GPUs.

The run's own steps are lowered and compiled for N simulated devices, with shapes in place of
arrays. What they need is read off the compiled programs; see docs/planning.md. With
`--compile-for H200` the compiler is that GPU's.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.help import complete_words
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.monitoring.activity import ACTIVITIES, activity


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


def open_devices(devices: int, target: str | None) -> Sequence[Any] | None:
    """Return so many GPUs to compile for; without one named simulate CPU devices instead."""
    if target is None:
        simulate_devices(devices)
        gpus = None
    else:
        from jaxrl_llm.planning.steps import gpu_devices

        gpus = gpu_devices(target, devices)
    from jaxrl_llm.monitoring.writer import quiet_libraries  # which imports jax

    quiet_libraries()
    return gpus


def plan_run(
    config: TrainConfig,
    gpu: str,
    change: Callable[[Sequence[str]], TrainConfig],
    devices: Sequence[Any] | None = None,
) -> str:
    """Plan a run and return the plan as text.

    Args:
        config: of the run.
        gpu: one of `planning.steps.GPUS`.
        change: overrides -> the config with them.
        devices: the GPUs to compile for; by default jax's own, which are of the CPU.
    """
    from jaxrl_llm.models.kernels import cuda_device
    from jaxrl_llm.planning import report, steps
    from jaxrl_llm.training.compile import plan_shapes

    device = steps.GPUS[gpu]
    shapes = plan_shapes(config, devices, cuda_device(device.capability))
    compiled_for = gpu if devices else None
    compiled = steps.compile_planned_steps(shapes, device, steps.UNTUNED if devices else None)
    scratch = {planned.step: planned.scratch for planned in compiled}
    phases, limit = steps.memory_by_phase(shapes, scratch), device.memory * steps.USABLE
    lines = [*report.describe_run(shapes), *report.describe_compiler(compiled_for), ""]
    lines += report.describe_memory(phases, limit, gpu)
    if max(phase.total for phase in phases) > limit:
        remedies = report.advise(shapes, scratch, limit, change, devices=devices)
        lines += ["", *report.describe_advice(remedies, limit)]
    lines += ["", *report.describe_operations(compiled), "", *report.describe_collectives(compiled)]
    if compiled_for:
        lines += ["", *report.describe_kernels(compiled)]
    lines += ["", *report.describe_time(compiled, shapes, gpu)]
    lines += report.describe_window(compiled, shapes)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.plan",
        description="Say what memory, operations, communication and time a run needs.",
    )
    parser.add_argument("--config", required=True, metavar="FILE.yaml", help="the run's config")
    parser.add_argument("--devices", required=True, type=int, help="how many GPUs")
    kinds = ("H100", "H200", "B200")
    parser.add_argument("--gpu", choices=kinds, help="whose figures to take; H100 by default")
    parser.add_argument(
        "--compile-for",
        choices=kinds,
        help="compile for this GPU, which need not be there, instead of for the CPU; implies --gpu",
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="keys to change")
    complete_words(parser)
    options = parser.parse_intermixed_args(arguments)
    target = options.compile_for
    if target and options.gpu not in (None, target):
        parser.error(f"--gpu: got {options.gpu}, expected {target} as in --compile-for")

    def change(more: Sequence[str]) -> TrainConfig:
        given = list(options.overrides)
        if target is None:  # the kernels for Triton do not compile here
            given.append("model.experts=xla")
        given += more
        config = load(TrainConfig, options.config, given)
        if config.model.attention != "cudnn":
            return config
        return load(TrainConfig, options.config, [*given, "model.attention=auto"])  # nor does it

    try:
        config = change(())
        with ACTIVITIES.reported():
            with activity("starting"):
                devices = open_devices(options.devices, target)
            plan = plan_run(config, target or options.gpu or "H100", change, devices)
        sys.stdout.write(plan)
    except ConfigError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
