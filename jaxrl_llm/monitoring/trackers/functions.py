"""Tracker functions, by the names that `log.trackers` uses.

Each is called with a `TrackedRun`, has keyword settings, and returns a sink of `TrackedStep`: an
object with `name`, `open`, `write` and `close`, which a thread of its own calls. Nothing begins
before `open`.
"""

from jaxrl_llm.monitoring.trackers.comet import comet
from jaxrl_llm.monitoring.trackers.mlflow import mlflow
from jaxrl_llm.monitoring.trackers.swanlab import swanlab
from jaxrl_llm.monitoring.trackers.tensorboard import tensorboard
from jaxrl_llm.monitoring.trackers.trackio import trackio
from jaxrl_llm.monitoring.trackers.wandb import wandb

__all__ = ["comet", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
