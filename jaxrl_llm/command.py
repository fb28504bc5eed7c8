"""`jaxrl-llm PROGRAM …` runs any of the programs, as `python -m jaxrl_llm.PROGRAM` does."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from jaxrl_llm.version import __version__

PROGRAMS = {
    "train": "train a language model with reinforcement learning",
    "sft": "train one to imitate responses",
    "prefer": "train one, or a reward model, on preferences",
    "evaluate": "sample answers to the prompts of data files, and score them",
    "serve": "answer OpenAI's clients",
    "export": "write a run's checkpoint as a Hugging Face directory, or push it there",
    "plan": "say what memory and time a run needs, without its GPUs",
    "report": "write a page of what runs have learned",
}
"""What each program does, by the name of its module."""

SHELLS = ("bash", "zsh", "fish")
COMPLETION = 'print what completes in a shell: eval "$(jaxrl-llm completion bash)"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Without `arguments` it is the process's own, and the program's is the rest of it.
    """
    from jaxrl_llm.config.help import ASKED

    if ASKED in os.environ:
        return _complete()
    words = sys.argv[1:] if arguments is None else [*arguments]
    if not words or words[0] not in PROGRAMS:
        known = [*PROGRAMS, "completion"]
        if words and not words[0].startswith("-") and words[0] not in known:
            from jaxrl_llm.config.functions import closest

            _parser().error(f"no program {words[0]!r}; {closest(words[0], known)}")
        shell = _parser().parse_args(words).shell
        from argcomplete.shell_integration import shellcode  # which only shells need

        sys.stdout.write(shellcode(["jaxrl-llm"], shell=shell))
        return 0
    module = importlib.import_module(f"jaxrl_llm.{words[0]}")
    if arguments is not None:
        return module.main(words[1:])
    sys.argv = [f"jaxrl-llm {words[0]}", *words[1:]]
    return module.main()  # which begins again with huge pages


def _parser() -> argparse.ArgumentParser:
    """Return the parser of what is no program's own."""
    parser = argparse.ArgumentParser(
        prog="jaxrl-llm",
        description="Reinforcement learning of large language models in JAX.",
        epilog="`jaxrl-llm PROGRAM --help` has a program's options and keys.",
    )
    parser.add_argument("--version", action="version", version=f"jaxrl_llm {__version__}")
    programs = parser.add_subparsers(title="programs", metavar="PROGRAM", required=True)
    for name, meaning in PROGRAMS.items():
        programs.add_parser(name, help=meaning, add_help=False)
    completion = programs.add_parser("completion", help=COMPLETION, description=COMPLETION)
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _complete() -> int:
    """Answer a shell that completes: a program's words are its own parser's to complete."""
    from jaxrl_llm.config.help import ASKED, complete_words

    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = line.split() + [""] * line[-1:].isspace()
    if len(words) > 2 and words[1] in PROGRAMS:
        os.environ[ASKED] = "2"  # the word at which the program's command line begins
        return importlib.import_module(f"jaxrl_llm.{words[1]}").main(words[2:])
    complete_words(_parser())
    return 0
