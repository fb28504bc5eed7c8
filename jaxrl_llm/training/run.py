"""A whole training run of this process, and the others that the environment tells of."""

import contextlib
import dataclasses
from pathlib import Path

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import ConfigError, Preempted
from jaxrl_llm.config.files import load
from jaxrl_llm.config.load import to_yaml
from jaxrl_llm.config.sft import SftConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.data.generated import build_once, digest, prepare_files
from jaxrl_llm.monitoring.logs import quiet_libraries
from jaxrl_llm.monitoring.report import print_before_and_after
from jaxrl_llm.runs.directory import run_folder
from jaxrl_llm.runs.resume import check_finished, open_watchdog
from jaxrl_llm.sharding import distributed
from jaxrl_llm.training.build import build_stages
from jaxrl_llm.training.loop import Progress, run_loop
from jaxrl_llm.training.precompile import compiling_ahead
from jaxrl_llm.training.resolve import resolve_functions
from jaxrl_llm.training.supervised import run_sft


def run_training(config: TrainConfig) -> Progress:
    """Build a run, run it to its end and print what it has learned."""
    distributed.initialize()
    with distributed.abort_together((Preempted,)):
        quiet_libraries()
        functions = resolve_functions(config)  # wrong names fail before anything is loaded
        prepare_files(config.data.prepare, (*config.data.train, *config.data.validation))
        warm_start(config)
        with (
            contextlib.ExitStack() as stack,
            distributed.abort_together((Preempted,)),
            context.reporting_failure(),
        ):
            watchdog = stack.enter_context(open_watchdog(config))
            folder = stack.enter_context(run_folder(config.run_dir, config))
            with compiling_ahead(config, folder) as wait:
                stages, start, prompt_batches = build_stages(
                    config, functions, folder, stack, watchdog
                )
                wait()
            end = run_loop(stages, start, prompt_batches)
            check_finished(end.step, stages.run.total_steps)
            if distributed.is_first():
                print_before_and_after(folder, stages.run.display)
        return end


def warm_start(config: TrainConfig) -> None:
    """Make the base model by supervised training where there is none yet."""
    if config.model.warm_start is None:
        return
    path = Path(config.model.path)
    try:
        sft = load(SftConfig, config.model.warm_start)
    except ConfigError as error:
        raise ConfigError(f"model.warm_start: {error}") from error
    sft = dataclasses.replace(sft, export_to=str(path), run_dir=f"{path}.sft")
    recipe = to_yaml(sft)
    # another recipe must not continue this one's checkpoints
    sft = dataclasses.replace(sft, run_dir=f"{path}.sft_{digest(recipe)[:8]}")
    build_once(path, recipe, lambda: run_sft(sft))
