"""`jaxrl-llm`: its programs, and what a shell completes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm import cli, command

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "import sys; from jaxrl_llm.command import main; sys.exit(main())\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a shell that finds `jaxrl-llm` as an install writes it."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "jaxrl-llm").write_text(f"#!{sys.executable}\n{SCRIPT}")
    (folder / "jaxrl-llm").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(folder)}


# -------------------------------------------------------------------------------- programs


def test_all_programs_are_listed_with_what_they_do(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, meaning in command.PROGRAMS.items():
        assert f"{name} {meaning}" in shown


@pytest.mark.parametrize("name", command.PROGRAMS)
def test_a_program_gets_its_words_and_gives_its_status(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"python -m jaxrl_llm.{name}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        command.main([name, "--no-such-option"])
    assert stopped.value.code == 2


def test_a_programs_errors_and_status_are_its_own(capsys):
    assert command.main(["train", "--config", "quickstart", "no_such_key=1"]) == 2
    assert "error: unknown key 'no_such_key'" in capsys.readouterr().err
    assert command.main(["train", "--config", "quickstart", "--print-config"]) == 0
    assert "run_dir: runs/quickstart" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"), [(["tran"], "no program 'tran'; did you mean 'train'?"), ([], "PROGRAM")]
)
def test_what_is_no_program_is_an_error(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        command.main(["--version"])
    assert capsys.readouterr().out == f"jaxrl_llm {jaxrl_llm.__version__}\n"


def test_the_processs_own_command_line_begins_again_with_huge_pages(monkeypatch, tmp_path):
    """As `python -m` does: with the words that the process was started with."""
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(cli, "HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    begun = []
    monkeypatch.setattr(os, "execv", lambda *words: begun.append(words))
    own = ["/usr/bin/python", "/bin/jaxrl-llm", "train", "--config", "quickstart"]
    monkeypatch.setattr(sys, "orig_argv", own)
    monkeypatch.setattr(sys, "argv", [*own[1:], "--print-config"])
    assert command.main() == 0
    assert begun == [(sys.executable, [sys.executable, *own[1:]])]
    begun.clear()
    assert command.main(["train", "--config", "quickstart", "--print-config"]) == 0
    assert begun == []


# -------------------------------------------------------------------------------- completion


@pytest.fixture
def complete(installed, tmp_path):
    """Asks as a shell does; returns the completions, and what they are said to mean."""

    def ask(line, cwd=tmp_path):
        answer = tmp_path / "answer"
        asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
        asked |= {"_ARGCOMPLETE_DFS": "\t", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
        source = f"import os; os.dup2(os.open({str(answer)!r}, 0o102, 0o600), 8)\n{SCRIPT}"
        words = [sys.executable, "-X", "importtime", "-c", source]
        done = subprocess.run(
            words, env=installed | asked, cwd=cwd, capture_output=True, text=True, check=True
        )
        heavy = {"jax", "numpy", "transformers", "huggingface_hub"}
        assert not heavy & {part.split("|")[-1].strip() for part in done.stderr.splitlines()}
        found = [word for word in answer.read_text().split("\x0b") if word]
        answer.unlink()
        return dict(word.split("\t") for word in found)

    return ask


def test_programs_options_and_choices_are_completed(complete):
    found = complete("jaxrl-llm ")
    assert found.keys() - {"--help", "--version"} == {*command.PROGRAMS, "completion"}
    assert found["sft"] == command.PROGRAMS["sft"]
    assert [*complete("jaxrl-llm ev")] == ["evaluate"]
    assert [*complete("jaxrl-llm export --pu")] == ["--push-to"]
    assert [*complete("jaxrl-llm plan --gpu H")] == ["H100", "H200"]
    assert [*complete("jaxrl-llm completion ")] == ["--help", *command.SHELLS]


def test_configs_are_packaged_ones_and_files(complete, tmp_path):
    (tmp_path / "quick.yaml").touch()
    (tmp_path / "quick.txt").touch()
    (tmp_path / "quicker").mkdir()
    own = ["quick.yaml", "quicker/"]
    names = "", "_lora", "_online_dpo", "_raft", "_sft"
    packaged = [f"quickstart{name}" for name in names]
    assert [*complete("jaxrl-llm train --config quick")] == own + packaged
    assert "recipes/dapo" in complete("jaxrl-llm train --config re")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_after_what_is_printed_for_it(installed, tmp_path):
    script = """
        eval "$(jaxrl-llm completion bash)"
        complete -p jaxrl-llm
        COMP_LINE="jaxrl-llm train --config recipes/dap"
        COMP_POINT=${#COMP_LINE} COMP_TYPE=9
        _python_argcomplete jaxrl-llm
        echo "${COMPREPLY[@]}"
    """
    words = ["bash", "-c", script]
    done = subprocess.run(
        words, env=installed, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    registered, completed = done.stdout.splitlines()
    assert registered.endswith("-F _python_argcomplete jaxrl-llm")
    assert completed.strip() == "recipes/dapo"


@pytest.mark.parametrize("shell", command.SHELLS)
def test_every_shell_has_its_text(shell, capsys):
    assert command.main(["completion", shell]) == 0
    assert "jaxrl-llm" in capsys.readouterr().out
