"""Draw the pictures of docs/report.md.

    python -m benchmarks.reporting.screenshots
    python -m benchmarks.reporting.screenshots --small --runs RUNS --out PICTURES

It trains three runs in `runs/report`, unless they are there: the quickstart, the same with GSPO,
and an agent with a tool. On two cores they take ten minutes or so; with `--small` they have two
steps each, which is enough for all pictures but those of an episode with calls and of a prompt
over steps, which are left out.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

from benchmarks.learning.recipes import ROOT, SHORT, place_configs
from benchmarks.reporting.browser import open_browser, open_file
from benchmarks.tables import parser_of
from jaxrl_llm.reporting.page import write_report

RUNS = {
    "quickstart": ["--config", "quickstart", "rollout.dump_every=10"],
    "gspo": [
        *("--config", "quickstart", "rollout.dump_every=10", "algorithm.loss=gspo"),
        *("optim.schedule.init_value=3e-4", "algorithm.kl_loss=k3"),
    ],
    "look_up": ["--config", "agents/look_up", "rollout.dump_every=10", "steps=20"],
}
COLORS = 256
"""Of a picture."""


def train_missing(trained: Path, *, small: bool) -> None:
    """Train the runs that are not there."""
    place_configs(trained, small=small)
    keys = (*SHORT, "rollout.dump_every=1") if small else ()
    for name, words in RUNS.items():
        if not (trained / name / "config.yaml").exists():
            command = [sys.executable, "-m", "jaxrl_llm.train", *words, *keys, f"run_dir={name}"]
            subprocess.run(command, check=True, cwd=trained)


def show(page: Page, view: str, drawn: str) -> None:
    """Show a view, and wait until an element of it is there and all plots are drawn."""
    page.click(f"#tab-{view}")
    page.wait_for_selector(f"#{view} {drawn}", state="attached")
    page.wait_for_timeout(1500)


def picture_curves(page: Page) -> None:
    """Show smoothed curves of two runs."""
    show(page, "curves", ".plot .main-svg")
    set_to = "slider => { slider.value = 0.8; slider.dispatchEvent(new Event('input')); }"
    page.evaluate(set_to, page.query_selector("#smoothing"))
    page.wait_for_timeout(1500)


def first_step(page: Page) -> str:
    """Return the first step whose answers the page has."""
    values = page.eval_on_selector_all(
        "select[aria-label=step] option", "all => all.map(o => o.value)"
    )
    return min(filter(None, values), key=int)  # the first option stands for all steps


def picture_answers(page: Page) -> None:
    """Show the answers of an early step, some of which are wrong."""
    show(page, "answers", "table.answers td")
    page.select_option("select[aria-label=step]", first_step(page))


def picture_answer(page: Page) -> None:
    """Show an early answer of the quickstart, coloured by entropy."""
    picture_answers(page)
    page.click("th.advantage button")
    page.locator("table.answers tbody tr").first.click()
    page.click("#answer [data-value=ent]")


def picture_episode(page: Page) -> None:
    """Show an episode with calls of a tool."""
    picture_answers(page)
    page.click("th.advantage button")
    page.click("th.advantage button")
    page.locator("table.answers tbody tr").first.click()
    page.locator("details.told summary").first.click()


def picture_prompt(page: Page) -> None:
    """Show how the answers to a prompt change."""
    show(page, "answers", "table.answers td")
    page.click("text=same prompt over steps")
    page.wait_for_selector("#prompt-plot .main-svg", state="attached")
    page.wait_for_timeout(500)


PICTURED: dict[str, tuple[tuple[str, ...], bool, Callable[[Page], None]]] = {
    "overview": (("quickstart",), False, lambda page: show(page, "overview", ".main-svg")),
    "curves": (("quickstart", "gspo"), False, picture_curves),
    "answers": (("quickstart",), False, picture_answers),
    "answer": (("quickstart",), False, picture_answer),
    "episode": (("look_up",), False, picture_episode),
    "prompt": (("quickstart",), False, picture_prompt),
    "time": (("quickstart",), True, lambda page: show(page, "time", "#time-plot .main-svg")),
    "config": (("quickstart", "gspo"), True, lambda page: show(page, "config", "tbody td")),
}
"""Of each picture the runs, whether it is dark, and what a reader does before."""


def take(browser: Browser, name: str, trained: Path, pictures: Path) -> Path:
    """Write a picture, with few colours so that it is small."""
    runs, dark, act = PICTURED[name]
    with contextlib.chdir(trained):  # from where the runs' models are found
        report = write_report([trained / run for run in runs], trained / "report.html")
    page = open_file(browser, report, dark=dark)
    act(page)
    path = pictures / f"{name}.png"
    page.screenshot(path=path)
    page.close()
    image = Image.open(path).convert("RGB")
    image.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def main(words: Sequence[str] | None = None) -> None:
    """Train the runs, and draw the pictures."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/report")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/report")
    parser.add_argument("--small", action="store_true", help="train two steps of each run")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    options.runs = options.runs.resolve()
    with open_browser() as browser:
        train_missing(options.runs, small=options.small)
        for name in PICTURED:
            if options.small and name in ("episode", "prompt"):
                continue
            path = take(browser, name, options.runs, options.out)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
