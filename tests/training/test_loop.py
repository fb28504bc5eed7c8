"""The loop around a step: what it calls in which order, and how a run ends."""

from unittest.mock import Mock, call

import pytest

from jaxrl_llm.config.errors import Preempted
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import SftConfig
from jaxrl_llm.config.sections import ValidationConfig
from jaxrl_llm.data.dataset import batches
from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.profiler import Profiler
from jaxrl_llm.runs.checkpoint import Checkpoints, Saved
from jaxrl_llm.runs.preemption import Preemption, Watchdog
from jaxrl_llm.training.loop import (
    MetricsLog,
    OpenFiles,
    Trainer,
    run_steps,
    train_to_the_end,
    validate_before,
)

TOTAL = 3
STATES = {"actor": "weights"}
SCORE = {"val-core/a/mean@1": 0.5}


class Told(Trainer):
    """Tells `calls` of each call, and the step that the trainer stands at then."""

    def __init__(self, calls, *opened):
        self.calls = calls
        super().__init__(*opened)

    def step(self, clock):
        self.calls.step(at=self.number)
        return {"train/loss": 1.0}

    def validate(self, number):
        self.calls.validate(number, at=self.number)
        return {**SCORE}

    def line(self, number, metrics):
        return f"step {number}"

    def report(self, number, metrics):
        self.calls.report(number, sorted(metrics), at=self.number)

    def get_state(self):
        return super().get_state() | {"at": self.number}


def open_trainer(calls, *, done=None, save_every=2, validation=None):
    """Return a trainer of `TOTAL` steps whose files tell `calls` of what is done with them."""
    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, "export_to": "e"}
    files = {
        "checkpoints": Mock(spec=Checkpoints),
        "log": Mock(spec=MetricsLog),
        "display": Mock(spec=Display),
        "preemption": Mock(spec=Preemption),
        "watchdog": Mock(spec=Watchdog),
        "profiler": Mock(spec=Profiler),
    }
    for name, file in files.items():
        calls.attach_mock(file, name)
    calls.log.position.return_value = 7
    calls.preemption.requested.return_value = False
    opened = OpenFiles(
        config=from_tree(SftConfig, {**tree, "checkpoint": {"every": save_every}}),
        total_steps=TOTAL,
        stream=batches([*range(TOTAL)], batch_size=1, seed=0, epochs=1),
        start_digests={"data": "d"},
        compiled=Mock(spec=CompileCounter, **{"metrics.return_value": {"perf/compilations": 0.0}}),
        **files,
    )
    return Told(calls, opened, done or Saved(0, STATES, {}), validation)


def saved_steps(calls):
    return [given.args[0] for given in calls.checkpoints.save.call_args_list]


def test_a_step_is_validated_reported_counted_and_saved_in_this_order():
    """Neither validation nor a checkpoint is due after the first of three steps."""
    calls = Mock()
    trainer = open_trainer(calls, validation=ValidationConfig(every=2))
    steps = run_steps(trainer)
    assert not calls.mock_calls, "nothing is done before the first step is asked for"
    names = ["perf/compilations", "timing_s/step", "train/loss"]
    watched = {"watchdog.beat", "profiler.turn_to", "checkpoints.check", "preemption.requested"}

    def taken():
        made = [each for each in calls.mock_calls if each[0] not in watched]
        calls.reset_mock()
        return made

    assert next(steps) == trainer.number == 1
    assert {each[0] for each in calls.mock_calls} >= watched
    assert taken() == [call.step(at=0), call.report(1, names, at=0)]
    assert next(steps) == trainer.number == 2
    extra = {"data": trainer.files.stream.get_state(), "at": 2}
    extra |= {"metrics_bytes": 7, "origin": {"data": "d"}}
    assert taken() == [
        call.step(at=1),
        call.validate(2, at=1),
        call.report(2, sorted([*names, "timing_s/testing", *SCORE]), at=1),
        call.log.position(2),
        call.checkpoints.save(2, STATES, extra, {"validation": 0.5}),
    ]
    train_to_the_end(trainer, steps)
    assert trainer.number == TOTAL and saved_steps(calls) == [TOTAL]
    assert calls.validate.mock_calls == [call(TOTAL, at=TOTAL - 1)], "the last step's, too"
    ends = [call.profiler.close(), call.checkpoints.wait()]
    assert calls.mock_calls[-2:] == ends, "or the wait would be in the trace"


def test_a_run_that_is_preempted_saves_and_stops_but_goes_on_by_hand():
    """In its last step it has finished."""
    calls = Mock()
    trainer = open_trainer(calls)
    calls.preemption.requested.return_value = True
    steps = run_steps(trainer)
    for times in (1, 2):  # another time no step is taken
        with pytest.raises(Preempted):
            train_to_the_end(trainer, steps)
        assert trainer.has_ended and saved_steps(calls) == [1]
        assert calls.checkpoints.wait.call_count == times
    assert next(steps) == trainer.number == 2
    assert trainer.has_ended and saved_steps(calls) == [1, 2]
    calls.preemption.requested.return_value = False
    assert next(steps) == TOTAL and not trainer.has_ended
    calls.reset_mock()
    trainer = open_trainer(calls)
    calls.preemption.requested.side_effect = [False, False, True]
    train_to_the_end(trainer, run_steps(trainer))
    assert trainer.number == TOTAL and saved_steps(calls) == [2, TOTAL]


@pytest.mark.parametrize(
    ("failing", "counted", "reported"),
    [("step", 1, [1]), ("report", 1, [1, 2]), ("checkpoints.save", 2, [1, 2])],
)
def test_a_failure_is_raised_and_no_further_step_is_taken(failing, counted, reported):
    """A step counts, and is saved, only once it is validated and reported."""
    calls = Mock()
    trainer = open_trainer(calls, validation=ValidationConfig(every=2))
    steps = run_steps(trainer)
    next(steps)
    calls.configure_mock(**{f"{failing}.side_effect": OSError("full")})
    with pytest.raises(OSError, match="full"):
        train_to_the_end(trainer, steps)
    assert trainer.number == counted and not trainer.has_ended
    assert [given.args[0] for given in calls.report.call_args_list] == reported
    assert saved_steps(calls) == ([2] if failing == "checkpoints.save" else [])
    calls.checkpoints.wait.assert_not_called()
    assert next(steps, None) is None and calls.step.call_count == 2


def test_a_run_goes_on_where_it_stands_and_validates_first_only_where_it_begins():
    calls = Mock()
    begun = open_trainer(calls, validation=ValidationConfig())
    validate_before(begun)
    assert calls.validate.mock_calls == [call(0, at=0)]
    calls.log.write.assert_called_once_with(0, SCORE)
    calls.reset_mock()
    next(begun.files.stream)
    extra = {"data": begun.files.stream.get_state()}
    continued = open_trainer(calls, done=Saved(1, STATES, extra), validation=ValidationConfig())
    validate_before(continued)
    assert not calls.mock_calls
    assert continued.files.stream.get_state() == extra["data"]
    assert [*run_steps(continued)] == [2, 3]
    for validation in (None, ValidationConfig(before=False)):
        validate_before(open_trainer(calls, validation=validation))
    assert calls.validate.mock_calls == [call(TOTAL, at=2)]
