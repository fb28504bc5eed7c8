"""Some messages word for word, for those who write them: `messages.txt` beside this has the texts.

    python -m tests.test_messages

writes that file anew. All other tests look at an error's type, keys and rows alone.
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxrl_llm.command import main
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.rows import map_rows, verl_rows
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.sharding.layout import make_mesh
from jaxrl_llm.training.bind import resolve_functions

PATH = Path(__file__).with_name("messages.txt")
COMMANDS = (
    "train --config quickstart stepz=3",
    "train --config quickstart steps=three",
    "train --config quickstart steps=0 rollout.temperature=-1",
    "train --config quickstrat",
    "train --config FOLDER/torn.yaml",
    "train --config FOLDER/short.yaml",
    "train --config quickstart steps",
    "train --config quickstart seed.more=1",
    "train --config quickstart validation.every=5 data.validation=[]",
    "sft --config quickstart_sft batch.examples_per_step=0",
    "export FOLDER/nothing FOLDER/out",
    "report FOLDER/nothing",
    "tran",
)
FUNCTIONS = (
    "algorithm.loss=ppo_clap",
    "algorithm.loss={fn: ppo_clip, clip_hihg: 0.3}",
    "algorithm.loss=FOLDER/mine.py:asking",
    "algorithm.loss=FOLDER/mine.py:nothing",
    "algorithm.loss=FOLDER/none.py:loss",
    "algorithm.correction=[truncated_token, truncated_tokens]",
    "algorithm.penalty=FOLDER/torn.py:score",
    "optim.optimizer={fn: adamw, lerning_rate: 1}",
)
FILES = {
    "torn.yaml": "run_dir: [",
    "short.yaml": "steps: 1\n",
    "mine.py": "def asking(logprobs, moon):\n    return logprobs\n",
    "torn.py": "def score(:\n",
    "config.json": '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
    "rows.jsonl": '{"prompt": "2+2"}\n{"prompt": 3}\n{"answer": "4"}\n',
}


def refusals(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what is done, and what is then said."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for line in COMMANDS:
        words = line.replace("FOLDER", str(folder)).split()
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            assert main(words) != 0, line
        yield line, said.getvalue()
    for override in FUNCTIONS:
        try:
            words = [override.replace("FOLDER", str(folder))]
            resolve_functions(load(TrainConfig, "quickstart", words))
        except ConfigError as error:
            yield override, str(error)
        else:
            raise AssertionError(f"{override} is not refused")
    try:
        map_rows(lambda _, row: row["prompt"].strip(), verl_rows([str(folder / "rows.jsonl")]))
    except ValueError as error:
        yield "rows of data", str(error)
    try:
        read_spec(folder)
    except ValueError as error:
        yield "a model without its sizes", str(error)
    try:
        make_mesh({"fsdp": 3}, jax.devices()[:2])
    except ValueError as error:
        yield "a mesh of three of two devices", str(error)


def messages() -> str:
    """Return all that is said, as the file has it."""
    with tempfile.TemporaryDirectory() as scratch:
        parts = [f"== {done}\n{said.rstrip()}\n" for done, said in refusals(Path(scratch))]
        text = "\n".join(parts).replace(scratch, "FOLDER")
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_messages_are_those_of_the_file():
    assert messages() == PATH.read_text(encoding="utf-8"), "run python -m tests.test_messages"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(PATH.write_text(messages(), encoding="utf-8") == 0)
