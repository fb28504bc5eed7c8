"""A headless Chromium for a file of tests; an error in a page's console fails its test."""

import shutil

import pytest

from jaxrl_llm.reporting.page import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")  # until it ends, its event loop is there: no other can be run
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: expected one of {', '.join(BROWSERS)}")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_address(browser):
    """Open an address; the test fails if the page has an error, or asks the network for a thing."""
    errors, pages = [], []

    def listen(message):
        if message.type == "error":
            errors.append(message.text)

    def opened(address):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(120_000)  # of a machine with other work
        page.on("console", listen)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda r: errors.append(r.url) if is_foreign(r.url) else None)
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert errors == []


def is_foreign(address):
    return not address.startswith(("file:", "data:", "blob:", "http://127.0.0.1:"))


@pytest.fixture
def open_runs(open_address, tmp_path):
    """Write the page of runs, and open it from disk."""

    def opened(*runs):
        path = write_report(list(runs), tmp_path / "page" / "report.html")
        assert path.stat().st_size < 10_000_000
        return open_address(path.as_uri())

    return opened
