"""The messages that the page about symptoms quotes are those of the library."""

import ast
import re
from functools import cache

from tests.pages import ROOT, blocks_of

PAGE = ROOT / "docs/troubleshooting.md"
FOLDERS = ("jaxrl_llm", "algorithms", "models", "sharding")
SHORTEST = 10


@cache
def texts_of_the_library():
    """Every text in the code, with … for what a run puts into it."""
    texts = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(re.sub(r"%[\d.]*[a-z]", "…", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "…") for part in node.values)
                texts.add("".join(p if isinstance(p, str) else "…" for p in parts))
    return texts


def is_said(message):
    """Tell whether a text of the library has the message in it."""
    bare = " ".join(message.split())
    return len(bare) >= SHORTEST and any(bare in text for text in texts_of_the_library())


def test_messages_are_those_of_the_library():
    quoted = [block.text for block in blocks_of(PAGE) if block.language == "text"]
    assert len(quoted) > 25
    assert [message for message in quoted if not is_said(message)] == []


def test_a_message_that_was_reworded_is_found():
    said = max(t for t in texts_of_the_library() if t.startswith("nothing to do: the run"))
    assert is_said(said)
    assert not is_said(said.replace("taken", "made"))


def test_every_message_has_its_fix():
    for part in re.split(r"^##+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert "```text" not in part or "**Fix.**" in part, part.partition("\n")[0]
