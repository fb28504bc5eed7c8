"""A run's journals of what its tools answered, one for each call of the sampler."""

from pathlib import Path

from jaxrl_llm.runs.files import RunFiles


class Journals:
    """Where a run's journals are; those of steps that are saved are removed.

    Args:
        run_dir: folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        """Remove nothing yet."""
        self._folder, self._run = run_dir / "tools", RunFiles(run_dir)

    def path(self, seed: tuple[int, ...]) -> Path:
        """Return the journal of a call of the sampler, whose folder exists.

        Args:
            seed: of the call: the run's, the step, the use and more numbers.
        """
        self._folder.mkdir(exist_ok=True)
        newest = max(self._run.checkpoints, default=-1)
        for old in self._folder.glob("step_*.jsonl"):
            if int(old.name.split("_")[1]) <= newest:
                old.unlink(missing_ok=True)
        _, step, *use = seed
        return self._folder / f"step_{step:06d}_{'_'.join(map(str, use))}.jsonl"
