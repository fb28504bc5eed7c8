"""The site is built without a warning, needs no other server, and has what its pages promise.

It needs the extra `docs`. A link that leads nowhere, a heading that is not there and a page that is
not in the navigation are warnings of the build, which fail it.
"""

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks.code import api
from tests.pages import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.guards("docs/", "mkdocs.yml", "README.md"),
    pytest.mark.skipif(
        find_spec("material") is None or find_spec("mkdocstrings") is None,
        reason="the extra docs is not installed",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def read(site, page):
    return (site / page / "index.html").read_text(encoding="utf-8")


def test_no_page_loads_anything_from_elsewhere(site):
    loads = re.compile(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="?((?:https?:)?//[^"\s>]*)')
    found = {
        (path.relative_to(site).as_posix(), url)
        for path in site.rglob("*.html")
        for url in loads.findall(path.read_text(encoding="utf-8"))
    }
    assert found == set()


def test_every_public_name_has_its_entry(site):
    for package in ("jaxrl_llm", *(f"jaxrl_llm.{part}" for part in api.PARTS)):
        text = read(site, f"reference/{package}")
        for name, home in importlib.import_module(package).__exports__.items():
            config = package == "jaxrl_llm" and name.endswith("Config")  # has a page of its keys
            assert f'id="{name.lower() if config else f"{home}.{name}"}"' in text, name


def test_pages_have_what_a_forge_shows(site):
    text = read(site, "reference/jaxrl_llm.algorithms")
    assert "<math" in text and "&gt;&gt;&gt; " in text and "<blockquote>" not in text
    assert re.search(r"<ul>\s*<li>(<p>)?<code>\.\w+", read(site, "api")), "no nested lists"
    for page in ("notebooks/04_grpo_by_hand.ipynb", "CONTRIBUTING"):
        assert read(site, f"repository/{page}")
    assert "clip_high" in read(site, "repository/configs/recipes/dapo.yaml")
    assert 'href="../repository/configs/recipes/dapo.yaml/"' in read(site, "algorithms")
    assert "<code>rollout.vllm.engine_args</code>" in read(site, "reference/keys_train")
