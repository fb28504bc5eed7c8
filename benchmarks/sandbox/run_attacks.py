"""Runs the attacks at each level, as root and as an ordinary user, and writes their table.

python -m benchmarks.sandbox.run_attacks          prints the table
python -m benchmarks.sandbox.run_attacks --write  writes it into docs/sandbox.md
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sandbox.attacks import Attack, read_attacks
from benchmarks.sandbox.target import Target
from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm.sandbox.interpreter import CodeLimits, CodeResult, Interpreter, open_interpreter
from jaxrl_llm.sandbox.process import ProcessInterpreter, describe_layers, find_layers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "sandbox.md"
BEGIN, END = "<!-- attacks: begin -->\n", "<!-- attacks: end -->"
ORDINARY_USER = 65534  # nobody
LIMITS = CodeLimits(cpu_s=1.0, wall_s=4.0, memory_mb=192, processes=8, file_mb=4, output_bytes=4096)
CASES = ("expression", "process", "process without namespaces")


def opens(case: str, *, keep_state: bool) -> Interpreter:
    """Return an interpreter of a case: a level, or `process` with fewer layers than there are."""
    if case != "process without namespaces":
        return open_interpreter(case, LIMITS, keep_state=keep_state)  # pyright: ignore
    layers = find_layers()._replace(namespaces=False, landlock=1)
    return ProcessInterpreter(LIMITS, layers, keep_state=keep_state)


def attack(target: Target, chosen: Attack, case: str) -> tuple[CodeResult, list[str]]:
    """Run an attack; return what came of it, and the damage that it has done."""
    with opens(case, keep_state=False) as interpreter:
        result = interpreter.run(target.code(chosen))
    if not case.startswith("process"):  # what is expected there is an end of any kind
        chosen = chosen._replace(ends=("error", "timeout", "memory", "killed", None))
    return result, target.damage(chosen, result)


def describe(result: CodeResult, damage: list[str]) -> str:
    """Return a cell of the table."""
    if damage:
        return "**" + "; ".join(damage).replace("\n", " ") + "**"
    if result.failure is None:
        return "runs, bounded"
    kind = result.reason.partition(":")[0]
    is_class = kind.isidentifier() and result.failure == "error"
    return f"{result.failure}, {kind}" if is_class else result.failure


def run_case(case: str) -> dict[str, str]:
    """Run all attacks at a case; return the cells by the attacks' names."""
    if case == "process without namespaces":
        with opens(case, keep_state=False) as tried:
            result = tried.run("1")
        if result.failure is not None:
            return {chosen.name: "refused" for chosen in read_attacks()}
    target = Target(lambda: opens(case if case != "expression" else "process", keep_state=True))
    cells = {}
    try:
        for chosen in read_attacks():
            result, damage = attack(target, chosen, case)
            cells[chosen.name] = describe(result, damage)
            print(f"{case}: {chosen.name}: {cells[chosen.name]}", file=sys.stderr)
    finally:
        target.close()
    return cells


def run_as_ordinary_user(case: str) -> dict[str, str]:
    """Run all attacks at a case, as nobody."""
    python = shutil.which("python3", path="/usr/bin:/bin")  # ours may be in root's home
    assert python is not None
    command = [python, "-m", "benchmarks.sandbox.run_attacks", "--case", case]
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        user=ORDINARY_USER,
        group=ORDINARY_USER,
        extra_groups=[],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def main(words: Sequence[str] | None = None) -> None:
    """Run the attacks, and print or write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/sandbox.md")
    parser.add_argument("--case", choices=CASES, help="this one alone, as JSON")
    parser.add_argument("--as-nobody", choices=CASES, help="the same as an ordinary user")
    options = parser.parse_args(words)
    if options.as_nobody:
        print(json.dumps(run_as_ordinary_user(options.as_nobody)))
        return
    if options.case:
        print(json.dumps(run_case(options.case)))
        return
    columns = {}
    for case in CASES:
        if os.geteuid() == 0 and case.startswith("process"):
            columns[case.replace("process", "process, ordinary user")] = run_as_ordinary_user(case)
            columns[case.replace("process", "process, root")] = run_case(case)
        else:
            columns[case] = run_case(case)
    names = [chosen.name for chosen in read_attacks()]
    rows = [[name, *(cells[name] for cells in columns.values())] for name in names]
    layers = describe_layers(find_layers(), [])
    head = (
        f"{describe_run('sandbox.run_attacks', ['--write'])}, Linux {os.uname().release}, {layers}:"
    )
    table = f"{head}\n\n{markdown_table(['attack', *columns], rows)}\n"
    if not options.write:
        print(table)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
