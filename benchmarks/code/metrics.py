"""Write the meanings of metrics into the tables of docs/ that list their names.

    python -m benchmarks.code.metrics

`jaxrl_llm/reporting/metrics.yaml` has them. A new metric has an entry there, and a row with its
name in a table `| name | meaning |` or `| name | meaning | verl |` of one of the pages.
`tests/reporting/test_data.py` fails where a page and the table differ.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.tables import markdown_row, parser_of
from jaxrl_llm.reporting.page import find_metric

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("metrics.md", "preference.md")


def names_of(pattern: str) -> list[str]:
    """Return a metric for each of a pattern's alternatives.

    >>> names_of("async/{age,k3_kl}/<k>")
    ['async/age/1', 'async/k3_kl/1']
    """
    names = [re.sub(r"<\w+>", "word", pattern.replace("<k>", "1"))]
    while "{" in names[0]:
        names = [
            re.sub(r"\{.*?\}", part, name, count=1)
            for name in names
            for part in re.findall(r"\{(.*?)\}", name)[0].split(",")
        ]
    return names


def filled(page: str) -> str:
    """Return a page with the meanings of the metrics whose names its tables list."""
    lines = [_row(name, columns) if name else line for line, name, columns in listed(page)]
    return "\n".join([*lines, ""])


def listed(page: str) -> Iterator[tuple[str, str | None, int]]:
    """Yield each line of a page with the metric that it is about, if any, and its columns."""
    columns = 0
    for line in page.splitlines():
        if line.startswith("| name | meaning |"):
            columns = line.count("|") - 1
        elif not line.startswith("|"):
            columns = 0
        name = re.match(r"\| `([^`]+)` \|", line) if columns else None
        yield line, name[1] if name else None, columns


def _row(pattern: str, columns: int) -> str:
    (row,) = {tuple(find_metric(name)[1].items()) for name in names_of(pattern)}
    known = dict(row)
    meaning = "; ".join(known[part] for part in ("meaning", "more") if part in known)
    cells = [f"`{pattern}`", meaning.replace("|", "\\|"), known.get("verl", "ours")]
    return markdown_row(cells[:columns])


def main(words: Sequence[str] | None = None) -> None:
    """Write the pages."""
    parser_of(__doc__).parse_args(words)
    for name in PAGES:
        path = DOCS / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
