"""Render pages as a forge shows them, and equations without scripts."""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
"""What pymdownx.arithmatex makes of `$…$` and `$$…$$`."""


class NarrowLists(Extension):
    """Nests what two spaces indent, as forges do; Python-Markdown's own width is four."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (Python-Markdown's name)
        """Set the width."""
        md.tab_length = 2


def on_config(config: Any) -> None:
    """Add the extension to those of mkdocs.yml."""
    config.markdown_extensions.append(NarrowLists())


def on_page_content(content: str, **_: Any) -> str:
    """Write the equations of a page in MathML, which browsers draw themselves."""
    return EQUATION.sub(as_mathml, content)


def as_mathml(equation: re.Match[str]) -> str:
    """Return the MathML of an equation in TeX."""
    display = "block" if equation[1] == "div" else "inline"
    return convert(html.unescape(equation[2]), display=display)
