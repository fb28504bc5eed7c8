"""The log lines that a run shows."""

import logging
import os
import sys
import warnings
from typing import Any

from jaxrl_llm.monitoring.streams import log_to_stderr
from jaxrl_llm.sharding import distributed

_shown = sys.unraisablehook


def quiet_libraries() -> None:
    """Keep libraries' chatter off the screen; warnings and errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, in a notebook
    who = f"process {distributed.process_index()} " if distributed.process_count() > 1 else ""
    log_to_stderr(logging.WARNING, f"%(levelname)s {who}%(name)s: %(message)s")
    for name in ("huggingface_hub", "datasets"):  # they print by themselves, too
        logging.getLogger(name).propagate = False
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # it warns of each NaN
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax raises its errors, too
    logging.getLogger("jaxrl_llm").setLevel(
        logging.INFO if distributed.is_first() else logging.WARNING
    )
    global _shown
    if sys.unraisablehook is not _show_unraisable:
        _shown, sys.unraisablehook = sys.unraisablehook, _show_unraisable


def _show_unraisable(unraisable: Any) -> None:
    """Leave out what comes back to orbax after its first error, which the run reports."""
    late = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
    if not late:
        _shown(unraisable)
