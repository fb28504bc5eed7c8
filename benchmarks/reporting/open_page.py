"""Measure how large a run's page is, and how long it takes to write and to open.

    python -m benchmarks.reporting.open_page runs/quickstart --steps 1000

The run's lines and answers are repeated until there are so many steps. It is opened in a headless
Chromium that is running already; each time is the median of several pages.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser

from benchmarks.reporting.browser import open_browser, open_file
from benchmarks.tables import describe_run, parser_of
from jaxrl_llm.reporting.page import write_report
from jaxrl_llm.training.run_files import read_run

DRAWN = {"curves": ".plot .main-svg", "answers": "table.answers td", "time": "#time-plot .main-svg"}
"""An element of each view that is there once the view is drawn."""


def stretch(run: Path, steps: int, out: Path) -> None:
    """Write a folder with a run's lines and answers, repeated up to a number of steps."""
    out.mkdir()
    files = read_run(run)
    shutil.copy(run / "config.yaml", out)
    lines = [line for line in files.metrics if line["step"]]
    with (out / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({**lines[(step - 1) % len(lines)], "step": step}) + "\n")
    (out / "rollouts").mkdir()
    kept, first = files.dumped_steps, 0
    while kept and first < steps:
        for step in kept:
            if first + step <= steps:
                source = run / "rollouts" / f"step_{step:06d}.parquet"
                shutil.copy(source, out / "rollouts" / f"step_{first + step:06d}.parquet")
        first += len(lines)


def time_views(browser: Browser, path: Path) -> dict[str, float]:
    """Return the seconds until a page can be read, is whole, and its other views are drawn."""
    start = time.perf_counter()
    page = open_file(browser, path)
    taken = {"readable": float(page.get_attribute("body", "data-ready") or "nan") / 1000}
    page.wait_for_selector(".main-svg", state="attached")
    taken["whole"] = time.perf_counter() - start
    for view, element in DRAWN.items():
        start = time.perf_counter()
        page.click(f"#tab-{view}")
        page.wait_for_selector(f"#{view} {element}", state="attached")
        taken[view] = time.perf_counter() - start
    page.close()
    return taken


def main(words: Sequence[str] | None = None) -> None:
    """Print the sizes and times of a run's page."""
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="folder of a run of train with answers")
    parser.add_argument("--steps", type=int, default=1000, help="of the page")
    parser.add_argument("--repeats", type=int, default=5, help="pages that are opened")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        run = Path(folder) / "run"
        stretch(options.run, options.steps, run)
        start = time.perf_counter()
        path = write_report(run)
        print(describe_run("reporting.open_page", words))
        print(f"{options.steps} steps, {len(read_run(run).dumped_steps)} with answers")
        print(f"written in {time.perf_counter() - start:.1f} s, {path.stat().st_size / 1e6:.2f} MB")
        taken = [time_views(browser, path) for _ in range(options.repeats)]
        for view in taken[0]:
            print(f"{view:8} {statistics.median(times[view] for times in taken):.2f} s")


if __name__ == "__main__":
    main()
