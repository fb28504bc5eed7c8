"""Publish the files outside of docs/ to which pages link, so that the links work on the site, too.

Markdown becomes a page, a notebook a page of its cells, and any other file one with its text. They
are below `repository/`, under their own paths.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "repository/"
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
"""Those that the navigation names."""

FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
BY_FILE = re.compile(r"\[([\w/]+\.md)\](?=\(([^)\s#]+))")
"""A link whose text is the file's name, as in `[models.md](models.md)`."""

TITLE = re.compile(r"^# (.+)", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file that is linked, and for those that these link."""
    waiting = [*ALWAYS, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    for path in waiting:
        text = as_page(path)
        if not path.startswith("docs/"):
            files.append(
                File.generated(
                    config, page_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV
                )
            )
        for link in links(text):
            target = resolve(path, link)
            if not target.startswith(("docs/", "..", "/")) and target not in seen:
                seen.add(target)
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page on disk into those of the site, with titles for names of files."""
    source = source_of(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = resolve(source, link[0])
        return posixpath.relpath(page_of(target), here or ".")

    def titled(link: re.Match[str]) -> str:
        title = TITLE.search((ROOT / resolve(source, link[2])).read_text(encoding="utf-8"))
        return f"[{title[1]}]" if title else link[0]

    parts = FENCE.split(markdown)
    return "".join(
        part if n % 2 else LINK.sub(moved, BY_FILE.sub(titled, part))
        for n, part in enumerate(parts)
    )


def as_page(path: str) -> str:
    """Return a file of the repository as Markdown."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return "\n\n".join(cells(json.loads(text)))
    return f"# {path}\n\n````{Path(path).suffix[1:] or 'text'}\n{text}\n````\n"


def cells(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a notebook, without what they have printed."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"


def links(text: str) -> list[str]:
    """List the paths that a page links, without those in its code.

    >>> links("[a](b.md#c), [d](https://e.org)")
    ['b.md']
    """
    return LINK.findall(FENCE.sub("", text))


def resolve(path: str, link: str) -> str:
    """Return the path in the repository of what a file links.

    >>> resolve("docs/models.md", "../configs/quickstart.yaml")
    'configs/quickstart.yaml'
    """
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def page_of(path: str) -> str:
    """Return the path below docs/ of what the site has for a file of the repository.

    >>> page_of("docs/models.md"), page_of("configs/quickstart.yaml")
    ('models.md', 'repository/configs/quickstart.yaml.md')
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{FOLDER}{path}{'' if path.endswith('.md') else '.md'}"


def source_of(page: str) -> str:
    """Return the file of the repository of which a page is made; the inverse of `page_of`."""
    if not page.startswith(FOLDER):
        return f"docs/{page}"
    path = page.removeprefix(FOLDER)
    return path if (ROOT / path).exists() else path.removesuffix(".md")
