"""Names of the hub, found in a cache that the test lays out by hand; nothing asks the network."""

import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, utils

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


def test_a_directory_comes_first_then_the_cache(cache, tmp_path, monkeypatch):
    snapshot = cache()
    monkeypatch.chdir(tmp_path)
    for name in (REPO, f"{REPO}@main", f"{REPO}@{COMMIT}"):
        assert resolve(name) == snapshot
    with pytest.raises(FileNotFoundError, match=REPO):
        resolve(Path(REPO))  # a path is always local
    (tmp_path / REPO).mkdir(parents=True)
    assert resolve(REPO).samefile(tmp_path / REPO)


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

    with pytest.raises(ValueError, match=COMMIT):
        load_tokenizer(REPO)
    for path in QUICKSTART.glob("tokenizer*"):
        (snapshot / path.name).symlink_to(path)
    tokenizer = load_tokenizer(REPO)
    assert stop_ids(tokenizer, REPO) == tuple(sorted({3, 4, tokenizer.eos_token_id}))


def test_what_is_not_cached_or_no_name_is_an_error_offline(cache, tmp_path, monkeypatch):
    cache()
    monkeypatch.chdir(tmp_path)
    for name in ("someone/other", f"{REPO}@v2"):
        with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
            resolve(name)
    with pytest.raises(ValueError, match="someone/other"):
        load_tokenizer("someone/other")
    monkeypatch.setattr(hub, "_snapshot", None)  # is not asked
    for name in ("nowhere", "./a/b", "a/b/c", "a/b@"):
        with pytest.raises(FileNotFoundError, match=name):
            resolve(name)


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
