"""A training run of this process, and the others that the environment tells of."""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import SftConfig, TrainConfig, processes_can_train
from jaxrl_llm.data.dataset import Prompt, PromptLike, as_prompts
from jaxrl_llm.data.generated import build_once, digest, prepare_files
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.evaluation.policy import Policy
from jaxrl_llm.monitoring.activity import ACTIVITIES, activity
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.dumps import answer_rows, print_before_and_after
from jaxrl_llm.monitoring.logs import quiet_libraries
from jaxrl_llm.monitoring.notebook import open_display
from jaxrl_llm.monitoring.tables import AnswerTable
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.rollout.types import SamplingParams
from jaxrl_llm.runs.directory import RunFolder, recipe_of, run_folder
from jaxrl_llm.runs.files import RunFiles
from jaxrl_llm.runs.preemption import interrupted_between_steps
from jaxrl_llm.runs.resume import check_finished, open_watchdog
from jaxrl_llm.runs.summary import closing_lines
from jaxrl_llm.runs.together import ending_together, join
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.offload import copy_on_device
from jaxrl_llm.training.bind import AlgorithmFunctions, check_inputs, resolve_functions
from jaxrl_llm.training.build import build_stages, read_checked_rows
from jaxrl_llm.training.layouts import all_devices
from jaxrl_llm.training.loop import FinishedStep, TrainingLoop, save
from jaxrl_llm.training.precompile import compiling_ahead
from jaxrl_llm.training.sft import run_sft

log = logging.getLogger(__name__)

CLOSED = "the run is closed: open_run opens it again"
UNFINISHED = (
    "step {} did not come to its end: open the run again, it continues from its newest checkpoint"
)


class Run(RunFiles):
    """A run that is open: it holds its folder and the devices, and trains a step at a time.

    Iterating over it takes the steps that are left, each when it is asked for. Ctrl-C lets the step
    end that is being taken; a later loop goes on after it, with the same result. It is closed by
    `close`, or at the end of a `with`; it goes on from its newest checkpoint when it is opened
    again.

    Attributes:
        last: the newest step; None before the first one that was taken here.
    """

    def __init__(self, folder: Path, loop: TrainingLoop, stack: contextlib.ExitStack) -> None:
        """Take over what is open; see `open_run`."""
        super().__init__(folder)
        self._loop, self._stack = loop, stack
        stack.callback(loop.close)
        self._unusable: str | None = None
        self.last: FinishedStep | None = None
        self._watchdog.rest()

    @property
    def config(self) -> TrainConfig:
        """The config, with the functions that were given from Python."""
        return self._loop.stages.run.config

    @property
    def number(self) -> int:
        """How many steps are done, those before the run was opened included."""
        return self._loop.progress.step

    @property
    def total_steps(self) -> int:
        """How many steps the run has in all."""
        return self._loop.stages.run.total_steps

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that the run trains on."""
        return self._loop.stages.run.prompts

    @property
    def validation_prompts(self) -> list[Prompt]:
        """The prompts that it validates on."""
        return self._loop.stages.run.validation_prompts

    @property
    def policy(self) -> Policy:
        """The policy as it is now. The next step writes over its weights.

        Of a run that is closed it is that of the newest checkpoint.
        """
        if self._unusable == CLOSED:
            return super().policy
        self._check_usable()
        at = self._loop.progress
        params = jax.tree.map(copy_on_device, at.states["actor"].params)
        return self._loop.stages.rollout.policy(params, at.step)

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL term from the next step on; it may be set."""
        return self._loop.progress.coefs.kl_coef

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        algorithm = self.config.algorithm
        self._set_coef("kl_coef", value, algorithm.kl_loss or algorithm.kl_reward, "kl_loss")

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus from the next step on; it may be set."""
        return self._loop.progress.coefs.entropy_coef

    @entropy_coef.setter
    def entropy_coef(self, value: float) -> None:
        self._set_coef("entropy_coef", value, self.config.algorithm.entropy_coef, "entropy_coef")

    def __iter__(self) -> Iterator[FinishedStep]:
        """Take the steps that are left."""
        try:
            while self.number < self.total_steps and not self._loop.ended:
                yield self.step()
        finally:  # of the loop, also where it is left before the last step
            self._loop.stages.run.display.flush()

    def step(self) -> FinishedStep:
        """Take the next step.

        Raises:
            RunError: it failed, the run is closed, or all its steps are done.
            KeyboardInterrupt: Ctrl-C was pressed; the step is `last` then, and the run can go on.
        """
        if self._unusable is None and self.number >= self.total_steps:
            raise RunError(f"all {self.total_steps} steps are done: give the run more (steps)")
        self._check_usable()
        self._unusable = UNFINISHED.format(self.number + 1)
        self._watchdog.beat()
        try:
            with interrupted_between_steps():
                self.last = self._loop.step()
                self._unusable = None
        finally:
            self._watchdog.rest()
        return self.last

    def sample(
        self,
        prompts: Sequence[PromptLike],
        *,
        n: int = 1,
        seed: int = 0,
        **sampling: Any,
    ) -> Rollouts:
        """Draw n answers to each prompt from the policy as it is now; no step depends on them.

        They are episodes with the run's agent, tools and environment, where it has such.

        Args:
            prompts: some of `prompts` or `validation_prompts`; texts or chats, which are put into
                the chat template; or token ids.
            n: answers to each.
            seed: the same weights and seed give the same answers.
            **sampling: `max_new_tokens`, `temperature`, `top_p` and `top_k`, where they are not the
                config's.

        Raises:
            EngineError: a prompt and its answer don't fit.
            RunError: the run is closed, or a step has failed.
        """
        self._check_usable()
        rollout, policy, stage = self.config.rollout, self.policy, self._loop.stages.rollout
        names = ("max_new_tokens", "temperature", "top_p", "top_k")
        settings = {name: getattr(rollout, name) for name in names} | sampling
        variables = self.config.data.chat_template_kwargs
        chats = as_prompts(
            prompts, policy.tokenizer, vocab_size=policy.model.vocab_size, **variables
        )
        if stage.episodes is not None:
            chats = [stage.episodes.with_tools_in_prompt(chat) for chat in chats]
        with stage.awake():
            if stage.episodes is not None:
                sampling_params = SamplingParams(**settings, stop_ids=policy.stops)
                return stage.episodes.sample(
                    stage.engine, chats, sampling_params, samples=n, seed=(seed,)
                )
            return policy.sample(stage.engine, chats, n=n, seed=seed, **settings)

    def score(self, rollouts: Rollouts) -> AnswerTable:
        """Return answers with the scores that the run's reward function gives them."""
        self._check_usable()
        scores = self._loop.stages.scoring.score_validation(rollouts)
        tokenizer = self._loop.stages.rollout.tokenizer
        decode = text_decoder(tokenizer, skip_special_tokens=False)
        return AnswerTable(answer_rows(rollouts, scores), decode)

    def save(self) -> int:
        """Write a checkpoint where the run stands, and return its step once it is on disk.

        Raises:
            RunError: it could not be written, or the run has taken no step yet.
        """
        self._check_usable()
        stages, at = self._loop.stages, self._loop.progress
        if at.step not in self.checkpoints:
            if self.last is None:
                raise RunError("there is nothing to save: expected a step to be taken first")
            save(stages.run, at, self._loop.window, self.last.metrics)
        stages.run.checkpoints.wait()
        return at.step

    def finish(self) -> None:
        """Take all steps that are left, and print what the run has learned. Ctrl-C ends it at once.

        Raises:
            RunError: it failed; `Preempted` if it was told to end and has saved.
        """
        self._check_usable()
        self._unusable = UNFINISHED.format(self.number + 1)
        self._watchdog.beat()
        for step in self._loop:
            self.last = step
        self._unusable = None
        with activity("saving"):
            self._loop.stages.run.checkpoints.wait()
        check_finished(self.number, self.total_steps)
        if distributed.is_first():
            display = self._loop.stages.run.display
            print_before_and_after(self.metrics, display)
            print_closing(self.config, display)

    def close(self) -> None:
        """Wait for the last checkpoint, and let go of the folder and the devices."""
        self.__exit__(None, None, None)

    def __enter__(self) -> "Run":
        """Return the run."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the run, as `close`."""
        self._unusable, opened = CLOSED, self._stack.pop_all()
        self._watchdog.beat()
        with activity("ending the run"):
            opened.__exit__(kind, error, traceback)

    @property
    def _watchdog(self) -> Any:
        return self._loop.stages.run.watchdog

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise RunError(self._unusable)

    def _set_coef(self, name: str, value: float, is_used: Any, key: str) -> None:
        if not is_used:
            raise ConfigError(
                f"algorithm.{key} is {getattr(self.config.algorithm, key)}, so there is no such "
                f"term for {name}={value}: open the run with one"
            )
        if not math.isfinite(value):
            raise ConfigError(f"{name}: got {value}, expected a finite number")
        log.info("%s=%g from step %d on, set by hand", name, value, self.number + 1)
        progress = self._loop.progress
        coefs = progress.coefs._replace(**{name: float(value)})
        self._loop.progress = progress._replace(coefs=coefs)


def open_run(config: TrainConfig) -> Run:
    """Open a run where it stands: make it, or continue the one in its folder.

    Raises:
        ConfigError: it can't be run.
        RunError: it failed.
    """
    if config.cluster is not None:
        raise ConfigError("cluster is set: a run on a cluster is run to its end, by `train`")
    return open_here(config)


def open_here(config: TrainConfig) -> Run:
    """Open a run in this process, which may be one of a cluster's."""
    with contextlib.ExitStack() as stack:  # on an error, closes what was opened
        return _build(config, *_claim(config, stack), stack)


def run_training(config: TrainConfig) -> None:
    """Open a run, run it to its end and print what it has learned."""
    with contextlib.ExitStack() as stack:
        functions, folder = _claim(config, stack)
        if _is_finished(config, folder.path):
            return
        with _build(config, functions, folder, stack) as run:
            run.finish()


def _claim(
    config: TrainConfig, stack: contextlib.ExitStack
) -> tuple[AlgorithmFunctions, RunFolder]:
    """Check what needs no model, and hold the run's folder."""
    join(config, processes_can_train)
    stack.enter_context(ending_together())
    quiet_libraries()
    all_devices()
    stack.enter_context(ACTIVITIES.reported())
    with activity("checking the config"):
        functions = resolve_functions(config)  # wrong names fail before anything is loaded
        check_inputs(config, functions)
    return functions, stack.enter_context(run_folder(config.run_dir, config))


def _build(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    folder: RunFolder,
    stack: contextlib.ExitStack,
) -> Run:
    """Make what the run needs, and build it where it stands; it takes over the stack."""
    prepare_files(config.data.prepare, (*config.data.train, *config.data.validation))
    warm_start(config)
    stack.enter_context(ending_together())
    stack.enter_context(context.reporting_failure())
    watchdog = stack.enter_context(open_watchdog(config))
    path = folder.path
    with compiling_ahead(config, path) as wait:
        stages, start, window = build_stages(config, functions, path, stack, watchdog)
        wait()
    folder.record()
    loop = TrainingLoop(stages, start, window)
    return Run(path, loop, stack.pop_all())


def _is_finished(config: TrainConfig, folder: Path) -> bool:
    """Tell whether a run has no step left to take, and print then what it has learned."""
    done = distributed.run_on_first(lambda: max(RunFiles(folder).checkpoints, default=0))
    if config.steps is None or done < config.steps or config.checkpoint.resume == "never":
        return False
    display = open_display("training", config.steps, config.steps)
    display.line(
        f"nothing to do: the run in {str(folder)!r} has taken {done} steps, and steps="
        f"{config.steps}; more steps continue it"
    )
    if distributed.is_first():
        print_before_and_after(RunFiles(folder).metrics, display)
        print_closing(config, display)
    display.close()
    return True


def print_closing(config: TrainConfig, display: Display) -> None:
    """Print where a run is, and what to do next."""
    for line in closing_lines(config):
        display.line(line)


def warm_start(config: TrainConfig) -> None:
    """Make the base model by supervised training where there is none yet.

    The rows to train on are read first: what is wrong with them should not wait for it.
    """
    if config.model.warm_start is None:
        return
    path = Path(config.model.path)
    with _errors_of_warm_start():
        sft = load(SftConfig, config.model.warm_start)
    if not path.exists():
        read_checked_rows(config)
    sft = dataclasses.replace(sft, export_to=str(path), run_dir=f"{path}.sft")
    if config.model.function is not None:
        own = dataclasses.replace(sft.model, function=config.model.function)
        mesh = dataclasses.replace(sft.mesh, rules=config.mesh.rules)
        sft = dataclasses.replace(sft, model=own, mesh=mesh)
    recipe = recipe_of(sft)
    text = json.dumps(recipe, sort_keys=True)  # another one has checkpoints of its own
    sft = dataclasses.replace(sft, run_dir=f"{path}.sft_{digest(text)[:8]}")
    with _errors_of_warm_start(), activity("making the base model"):
        build_once(path, recipe, lambda: run_sft(sft, hints=False))


@contextlib.contextmanager
def _errors_of_warm_start() -> Iterator[None]:
    """Say of which config an error is, as the run has keys of the same names."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"model.warm_start: {line}" for line in error.args)) from error
