"""Render pages as a forge shows them, and equations without scripts."""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.blockprocessors import build_block_parser
from markdown.preprocessors import Preprocessor

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
"""What pymdownx.arithmatex makes of `$…$` and `$$…$$`."""


EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
"""The examples of a docstring, which else would be quotations."""


class AsElsewhere(Extension):
    """Reads Markdown as forges do, and docstrings as `help` shows them."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Nest what two spaces indent, where Python-Markdown wants four; fence examples."""
        md.tab_length = 2
        md.parser = build_block_parser(md)  # which has read the width already
        md.preprocessors.register(Examples(md), "examples", priority=100)


class Examples(Preprocessor):
    """Fences the examples of a docstring."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines with a fence around each block of `>>> `."""
        text = "\n".join(lines)
        return EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text).split("\n")


def on_config(config: Any) -> None:
    """Put the extension before all others, which add to the parser that it makes."""
    config.markdown_extensions.insert(0, AsElsewhere())


def on_page_content(content: str, **_: Any) -> str:
    """Write the equations of a page in MathML, which browsers draw themselves."""
    return EQUATION.sub(as_mathml, content)


def as_mathml(equation: re.Match[str]) -> str:
    """Return the MathML of an equation in TeX."""
    display = "block" if equation[1] == "div" else "inline"
    return convert(html.unescape(equation[2]), display=display)
