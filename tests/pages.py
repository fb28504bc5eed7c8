"""What the pages of the documentation have in them: code blocks, files and commands."""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of code, without the indentation of a list around it."""

    language: str
    text: str

    @property
    def file(self):
        """The file that a reader writes it to, whose name its first line has; else None."""
        named = re.match(r"# ([\w/]+\.\w+)\n", self.text)
        return named[1] if named else None

    @property
    def commands(self):
        """The commands of a shell's block, without comments; long lines joined."""
        joined = self.text.replace("\\\n", " ")
        bare = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
        return [line for line in bare if line]


def blocks_of(page):
    """List the blocks of a page."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [
        Block(language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE))
        for indent, language, text in found
    ]


def all_pages():
    """List the pages that a reader may follow: README, CONTRIBUTING and docs/, sorted."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
