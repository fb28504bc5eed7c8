"""The log lines that a run shows."""

import logging
import os
import warnings

from jaxrl_llm.monitoring.streams import log_to_stderr
from jaxrl_llm.sharding import distributed


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
