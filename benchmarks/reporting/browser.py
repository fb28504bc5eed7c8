"""Opens pages in the machine's headless Chromium."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Open a browser.

    Raises:
        SystemExit: none is installed.
    """
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit(f"error: expected a browser, one of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_file(browser: Browser, path: Path, *, dark: bool = False) -> Page:
    """Open a run's page from disk, and wait until it has drawn itself."""
    scheme = "dark" if dark else "light"
    page = browser.new_page(viewport={"width": 1360, "height": 850}, color_scheme=scheme)
    page.goto(path.resolve().as_uri())
    page.wait_for_selector("body[data-ready]")
    return page
