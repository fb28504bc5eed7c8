import os
import subprocess
import sys

import pytest
import yaml

from jaxrl_llm import cli
from jaxrl_llm.cli import config_main
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import describe, load
from jaxrl_llm.config.programs import SftConfig, TrainConfig
from jaxrl_llm.evaluate import main as evaluate_main
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.train import main as train_main

TRAIN = "run_dir: runs/a\nmodel: {path: m}\ndata: {train: t.parquet}\n"


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(TRAIN)
    return str(path)


def call(run, *arguments):
    return config_main("jaxrl_llm.train", "About.", TrainConfig, run, arguments)


def test_help_prints_every_key_with_its_default_and_meaning(capsys):
    for main, name, cls in ((train_main, "train", TrainConfig), (sft_main, "sft", SftConfig)):
        with pytest.raises(SystemExit) as caught:
            main(["--help"])
        assert caught.value.code == 0
        printed = capsys.readouterr().out
        assert f"python -m jaxrl_llm.{name}" in printed and "--print-config" in printed
        for key, default, meaning in describe(cls):
            shown = default if default == "(required)" else f"(default {default})"
            assert f"\n  {key}  {shown}\n      {meaning}" in printed


def test_print_config_prints_yaml_that_loads_back(config_file, tmp_path, capsys):
    overrides = ["seed=3", "optim.schedule={fn: constant_schedule, value: 1e-5}", "run_dir='1e-6'"]
    assert train_main(["--config", config_file, "--print-config", *overrides]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    (tmp_path / "printed.yaml").write_text(printed.out)
    config = load(TrainConfig, tmp_path / "printed.yaml")
    assert config == load(TrainConfig, config_file, overrides)
    assert (config.seed, config.run_dir) == (3, "1e-6")
    assert config.optim.schedule.kwargs == {"value": 1e-5}
    keys = {key for key, _, _ in describe(TrainConfig)}
    tree = yaml.safe_load(printed.out)
    assert all(key.split(".")[0] in tree for key in keys)
    assert set(tree["optim"]) == {k.split(".")[1] for k in keys if k.startswith("optim.")}


def test_options_of_keys_win_over_the_file_and_overrides_over_both(tmp_path, capsys):
    path = tmp_path / "evaluate.yaml"
    path.write_text("model: a\ndata: a.parquet\nsamples: 4\ntemperature: 1\n")
    words = ["--config", str(path), "--data", "b.parquet", "k=[2]", "--data", "c.parquet"]
    assert evaluate_main([*words, "--print-config", "model=b", "--model", "c"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["model"], shown["data"]) == ("b", ["b.parquet", "c.parquet"])
    assert (shown["samples"], shown["k"]) == (4, [2])


def test_errors_of_the_user_are_one_line_and_status_2(config_file, tmp_path, capsys):
    for words, key in [
        *((["sed=1"], "'sed'"), (["seed=one"], "seed: "), (["seed"], "'seed'")),
        (["--config", str(tmp_path / "no.yaml")], "no.yaml"),
    ]:
        assert train_main(["--config", config_file, *words]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("error: ") and key in printed.err
        assert printed.err.count("\n") == 1, words
    with pytest.raises(SystemExit) as caught:
        train_main(["seed=1"])
    assert caught.value.code == 2
    assert "--config" in capsys.readouterr().err


def test_how_a_run_ends_is_the_status(config_file, capsys):
    def ending(error):
        def run(config):
            raise error

        return call(run, "--config", config_file)

    seen = []
    words = ["seed=5", "--config", config_file, "batch.prompts_per_step=8"]
    assert call(seen.append, *words) == 0
    assert [(c.seed, c.batch.prompts_per_step, c.run_dir) for c in seen] == [(5, 8, "runs/a")]
    assert ending(ConfigError("data.train: no such file\nas this one")) == 2
    assert capsys.readouterr().err == "error: data.train: no such file as this one\n"
    assert ending(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.startswith("interrupted")
    with pytest.raises(RuntimeError):  # others keep their traceback
        ending(RuntimeError("a bug"))


def test_as_a_program_without_importing_jax(config_file):
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['train', '--config', {config_file!r}, 'seeed=1']\n"
        "try:\n"
        "    runpy.run_module('jaxrl_llm.train', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'jax' in sys.modules)\n"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith("error: unknown key 'seeed'")


def test_a_program_starts_again_once_to_ask_for_huge_pages(monkeypatch, tmp_path):
    started, offered = [], "always [madvise] never"
    monkeypatch.setattr(cli, "HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jaxrl_llm.train", "--config", "x"])
    monkeypatch.setattr(os, "execv", lambda *program: started.append(program))
    for pages, glibc, tunables in [
        ("[always] madvise never", "glibc 2.36", ""),
        (offered, "glibc 2.34", ""),
        (offered, None, ""),
        (offered, "glibc 2.36", "glibc.malloc.check=1"),
        (offered, "glibc 2.36", ""),
    ]:
        (tmp_path / "enabled").write_text(pages)
        monkeypatch.setattr(os, "confstr", lambda _, known=glibc: known)
        monkeypatch.setenv("GLIBC_TUNABLES", tunables)
        if not tunables:
            monkeypatch.delenv("GLIBC_TUNABLES")
        assert not started, "but for the last"
        cli.take_huge_pages()
    cli.take_huge_pages()  # as the program does that was started
    assert started == [(sys.executable, [sys.executable, "-m", "jaxrl_llm.train", "--config", "x"])]
    (tmp_path / "enabled").unlink()
    cli.take_huge_pages()
