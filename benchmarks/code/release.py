"""Check that a tag is the package's version, and print what CHANGELOG.md says of it.

    python -m benchmarks.code.release v0.1.0 > notes.md

A release's section is headed `## 0.1.0 (2026-12-31)`; CONTRIBUTING.md has the steps of a release.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import parser_of
from jaxrl_llm.version import __version__

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"


def read_notes(tag: str, version: str, changelog: str) -> str:
    """Return a release's section of the changelog, without its heading.

    Args:
        tag: of the commit, `v` and the version.
        version: of the package.
        changelog: the whole text.

    Raises:
        ValueError: the tag is another version's, or the release has no section.

    >>> read_notes("v1.0", "1.0", "## Unreleased\\n\\n## 1.0 (2030-01-31)\\n\\n- A thing.\\n")
    '- A thing.\\n'
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, expected v{version} as in jaxrl_llm/version.py")
    heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)"
    found = re.search(heading, changelog, re.DOTALL | re.MULTILINE)
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md: expected a section ## {version} (YYYY-MM-DD), with text")
    return found[1].strip() + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("tag", help="of the commit, v and the version")
    tag = parser.parse_args(words).tag
    try:
        sys.stdout.write(read_notes(tag, __version__, CHANGELOG.read_text("utf-8")))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
