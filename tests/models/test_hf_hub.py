"""Names of the hub, found in a cache that the test lays out by hand; nothing asks the network."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, errors, utils

from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.models.hf import hub
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.hub import WANTED_FILES, resolve
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/tiny-model"
QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a function that puts a directory there as a repository's `main`."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asking = hub._snapshot
    asking.cache_clear()

    def put(repo=REPO):
        home = folder / f"models--{repo.replace('/', '--')}"
        snapshot = home / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(COMMIT)
        return snapshot

    yield put
    asking.cache_clear()


def test_a_directory_comes_first(cache, tmp_path, monkeypatch):
    snapshot = cache()
    monkeypatch.chdir(tmp_path)
    assert resolve(REPO) == snapshot
    (tmp_path / REPO).mkdir(parents=True)
    assert resolve(REPO).samefile(tmp_path / REPO)


@pytest.mark.parametrize("name", [REPO, f"{REPO}@main", f"{REPO}@{COMMIT}"])
def test_cached_repository_is_found_offline(cache, name):
    snapshot = cache()
    assert resolve(name) == snapshot


def test_model_and_tokenizer_of_a_repository(cache, spec, params, tmp_path):
    snapshot = cache()
    save_params(tmp_path / "x", params, spec, source=None, dtype=np.float32)
    for path in (tmp_path / "x").iterdir():
        (snapshot / path.name).symlink_to(path)
    (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert read_spec(REPO) == spec
    loaded = load_params(REPO, spec)
    np.testing.assert_array_equal(loaded["embed"], params["embed"])
    save_params(tmp_path / "y", loaded, spec, source=REPO, dtype=np.float32)
    assert (tmp_path / "y" / "generation_config.json").exists()

    with pytest.raises(ValueError, match=r"can't load one from .*/0123.*: there is none of tokeni"):
        load_tokenizer(REPO)
    for path in QUICKSTART.glob("tokenizer*"):
        (snapshot / path.name).symlink_to(path)
    tokenizer = load_tokenizer(REPO)
    assert stop_ids(tokenizer, REPO) == tuple(sorted({3, 4, tokenizer.eos_token_id}))


def test_what_is_not_cached_is_an_error_offline(cache, tmp_path):
    cache()
    for name, message in (
        (
            "someone/other",
            r"no directory 'someone/other' here, and the hub's cache .*hub does not ",
        ),
        (f"{REPO}@v2", r"does not hold it at revision 'v2', and HF_HUB_OFFLINE is set"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            resolve(name)
    with pytest.raises(ValueError, match=r"tokenizer: .*no directory 'someone/other' here"):
        load_tokenizer("someone/other")


@pytest.mark.parametrize("name", ["nowhere", "./a/b", "/a/b", "a/b/c", "a/b@", "a b/c"])
def test_what_is_no_name_of_the_hub(cache, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_snapshot", None)  # is not asked
    with pytest.raises(FileNotFoundError, match=r"no directory '.*'$"):
        resolve(name)


def test_a_path_is_always_local(cache, tmp_path, monkeypatch):
    cache()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no directory '{REPO}'$"):
        resolve(tmp_path.relative_to(tmp_path) / REPO)


def test_only_what_a_model_needs_is_downloaded(monkeypatch, tmp_path):
    asked = []

    def download(repo, **options):
        asked.append((repo, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub._snapshot.cache_clear()
    assert resolve("a/b@v1") == resolve("a/b@v1") == tmp_path
    assert asked == [("a/b", {"revision": "v1", "allow_patterns": [*WANTED_FILES]})]
    hub._snapshot.cache_clear()
    expected = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
    expected += ["chat_template.jinja", "adapter_model.safetensors"]
    refused = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json", "x.py"]
    kept = utils.filter_repo_objects(expected + refused, allow_patterns=WANTED_FILES)
    assert list(kept) == expected


def test_failing_download_names_the_repository(monkeypatch):
    def download(repo, **options):
        raise errors.LocalEntryNotFoundError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    message = r"no directory 'a/b' here, and it can't be had from the Hugging Face hub: no route"
    with pytest.raises(FileNotFoundError, match=message):
        resolve("a/b")


def test_environment_is_respected(tmp_path):
    """HF_HUB_CACHE and HF_HUB_OFFLINE, as a user sets them."""
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--a--b" / "refs").mkdir()
    (tmp_path / "hub" / "models--a--b" / "refs" / "main").write_text(COMMIT)
    code = "from jaxrl_llm.models.hf.hub import resolve; print(resolve('a/b'))"
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(snapshot)
