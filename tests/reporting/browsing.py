"""What a reader does with a page."""

import time


def until(page, expression):
    """Wait until an expression of JavaScript is true; the page's own policy forbids to poll it."""
    deadline = time.monotonic() + 120
    while not page.evaluate(f"() => Boolean({expression})"):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


def show(page, view):
    page.click(f"#tab-{view}")
    page.wait_for_selector(f"#{view}:not([hidden])")
    return page.locator(f"#{view}")


def plot_data(page, family, wanted=1):
    """Return the traces of a metric's plot, once there are so many."""
    plot = f"#curve-groups [data-family='{family}']"
    page.locator(plot).scroll_into_view_if_needed()
    until(page, f"document.querySelector(`{plot}`)?.data?.length === {wanted}")
    return page.evaluate(
        """plot => document.querySelector(plot).data.map(
            t => ({x: [...t.x], y: [...t.y], meta: t.meta, name: t.name}))""",
        plot,
    )
