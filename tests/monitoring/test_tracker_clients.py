"""Trackers with the packages that they are for; each is skipped where its package is missing.

A process without keys or a network writes two steps, and continues the run with two more.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from pathlib import Path
import numpy as np
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.training.loop import MetricsLog

logging.basicConfig()
name, folder = sys.argv[1:]
config = {"seed": 1, "model": {"path": "m", "lora": None}}
answers = [{"prompt": "2+2|", "answer": "4\\n<b>", "score": 1.0, "advantage": None}]
for done in (0, 2):
    spec = [FunctionSpec(name)]
    log = MetricsLog(Path(folder), step=done, position=0, trackers=spec, config=config)
    for step in (done + 1, done + 2):
        metrics = {"loss": step / 2, "val-core/a b/acc/mean@1": 1.0}
        log.write(step, metrics, answers, {"score": np.array([0.0, 1.0, 1.0])})
    log.close()
    assert log._trackers[0].dropped == 0, name
"""
SECRETS = ("API_KEY", "TOKEN", "TRACKING_URI", "WANDB", "COMET", "SWANLAB", "TRACKIO", "MLFLOW")


FILES = {
    "mlflow": "my run/mlflow/artifacts/*/artifacts/answers/step_000003.json",
    "trackio": "trackio/jaxrl_llm.db",
    "wandb": "my run/wandb/offline-run-*/*.wandb",
    "swanlab": "my run/swanlab/run-*/*.swanlab",
    "comet": "my run/comet/*.zip",
}
PACKAGES = {"comet": "comet_ml"}


@pytest.mark.parametrize("name", FILES)
def test_a_run_is_kept_by_its_real_package_and_continued(tmp_path, name):
    if importlib.util.find_spec(PACKAGES.get(name, name)) is None:
        pytest.skip(f"{name} is not installed")
    inherited = {k: v for k, v in os.environ.items() if not any(s in k for s in SECRETS)}
    env = inherited | {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", PROGRAM, name, str(tmp_path / "my run")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "can't write to" not in done.stderr, done.stderr
    assert len([*tmp_path.glob(FILES[name])]) == (1 if name in ("mlflow", "trackio") else 2)
