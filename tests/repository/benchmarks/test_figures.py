"""Each figure of the pages has a command that makes it again, and its age is told by commits."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import age_of, measured_lines, read_figures

ROOT = Path(__file__).resolve().parents[3]
TABLE = read_figures(ROOT / "benchmarks/figures.yaml")
SHOWN = [one for figure in TABLE for one in figure.figures]


def test_every_picture_and_its_numbers_are_in_the_table():
    found = [*ROOT.glob("docs/**/*.png"), *ROOT.glob("docs/**/*.svg")]
    found += ROOT.glob("docs/learning/*.json")
    assert {str(path.relative_to(ROOT)) for path in found} <= set(SHOWN)
    assert len(SHOWN) == len(set(SHOWN)), "a figure has two commands"


def test_what_the_table_names_exists(subtests):
    for figure in TABLE:
        with subtests.test(figure.name):
            for one in figure.figures:
                path, _, anchor = one.partition("#")
                assert (ROOT / path).is_file(), path
                assert not anchor or measured_lines((ROOT / path).read_text(), anchor), one
            assert [path for path in figure.code if not (ROOT / path).exists()] == []
            for command in figure.commands:
                words = shlex.split(command)
                module = importlib.util.find_spec(words[words.index("-m") + 1])
                options = known_options(module)
                assert {word for word in words if word.startswith("--")} <= options, command
                configs = [word for word in words if word.startswith("configs/")]
                assert [path for path in configs if not (ROOT / path).exists()] == []


def known_options(module):
    """The options in the source of a program, and in that of what it takes from the benchmarks."""
    folders = module.submodule_search_locations  # of a folder, `__main__.py` is the program
    files = [Path(folders[0], "__main__.py") if folders else Path(module.origin)]
    for name in re.findall(r"^from (benchmarks[\w.]*) import", files[0].read_text(), re.MULTILINE):
        path = ROOT / name.replace(".", "/")
        files += path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    if module.name.startswith("jaxrl_llm."):
        files.append(ROOT / "jaxrl_llm/cli.py")
    return {option for f in files for option in re.findall(r'"(--[\w-]+)"', f.read_text())}


# --------------------------------------------------------------------------------- a repository


PAGE = """\
# Speed

| n | s |
|---|---|
| 1 | 2 |

## Memory

Some text.

```
# no heading
3 GB
```

# Others

| a |
|---|
"""


def test_tables_and_listings_below_a_heading():
    assert measured_lines(PAGE, "speed") == [3, 4, 5, 11, 12, 13, 14]
    assert measured_lines(PAGE, "memory") == [11, 12, 13, 14]
    assert measured_lines(PAGE, "others") == [18, 19]
    with pytest.raises(KeyError):
        measured_lines(PAGE, "no-heading")


class Repository:
    """A small repository, whose commits are a day apart."""

    def __init__(self, root):
        self.root, self.day = root, 0
        self.git("init", "-q", "-b", "main")

    def git(self, *words):
        self.day += 1
        date = f"2026-01-{self.day:02}T12:00:00+00:00"
        env = {"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date, "HOME": str(self.root)}
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *words], cwd=self.root, env=env, check=True)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, name, text, message="change"):
        self.write(name, text)
        self.git("add", name)
        self.git("commit", "-q", "-m", message)


@pytest.fixture
def repository(tmp_path):
    made = Repository(tmp_path)
    made.commit("code/a.py", "1")
    made.commit("plot.png", "1")
    made.commit("page.md", PAGE)
    made.commit(
        "benchmarks/figures.yaml",
        """\
plot: {figures: [plot.png], command: "python -c 'open(\\"plot.png\\", \\"w\\").write(\\"2\\")'",
  code: [code], takes: a second}
table: {figures: [page.md#memory], command: [python -c pass, python -c pass], code: [code/a.py],
  takes: an hour, by_hand: true}
far: {figures: [plot.png], command: python -c 1/0, code: [code], takes: a day, needs: a GPU}
""",
    )
    return made


def check(repository, *words, capsys):
    status = figures.main(words, repository.root)
    lines = capsys.readouterr().out.splitlines()[2:]
    return status, [line.split(" | ")[0].strip("| ") for line in lines if line.startswith("|")]


def test_a_figure_is_old_once_its_code_has_changed(repository, capsys):
    plot, table, _ = read_figures(repository.root / "benchmarks/figures.yaml")
    assert check(repository, "--check", capsys=capsys) == (0, [])
    assert check(repository, capsys=capsys) == (0, ["plot", "table", "far"])
    repository.commit("code/b.py", "1", "Do more")  # not what the table measures
    assert check(repository, "--check", capsys=capsys) == (1, ["plot", "far"])
    assert [line.partition(" ")[2] for line in age_of(repository.root, plot).since] == ["Do more"]
    repository.commit("code/a.py", "2", "Do it faster")
    assert check(repository, "--check", capsys=capsys) == (1, ["plot", "table", "far"])
    assert check(repository, "--check", "table", capsys=capsys) == (1, ["table"])
    # Another text, and another table of the page, make these no newer.
    repository.commit("page.md", PAGE.replace("Some", "More").replace("| 1 | 2 |", "| 1 | 3 |"))
    assert len(age_of(repository.root, table).since) == 1
    repository.write("page.md", (repository.root / "page.md").read_text().replace("3 GB", "2 GB"))
    assert age_of(repository.root, table).made == "not committed"
    assert check(repository, "--check", "table", capsys=capsys) == (0, [])
    repository.git("commit", "-q", "-a", "-m", "Measure again")
    age = age_of(repository.root, table)
    assert (age.made > age.changed, age.since) == (True, ())
