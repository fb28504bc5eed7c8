"""Pushing a directory to the hub, for which a server on this machine stands in."""

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.training import export
from jaxrl_llm.training.export import PushError, check_push, push_model
from tests.runs.hub_server import DROP, HubServer

NAME = "ours/adder"
WEIGHTS = bytes(range(256)) * 4000
CARD = b"---\nlicense: apache-2.0\n---\n# An adder\n"

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning"  # the client's own
)


@pytest.fixture
def hub(monkeypatch):
    """The stand-in, which the client takes for the hub."""
    with HubServer().running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_ours")
        monkeypatch.setattr(export, "WAITS_S", (0.01,) * 3)
        yield server
        close_session()
        assert server.unknown == []


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_bytes(CARD)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pushed(hub, name=NAME):
    return {k: v for k, v in hub.repositories[name].files.items() if k != ".gitattributes"}


def test_a_directory_is_pushed_and_pushed_again(hub, model):
    """Other weights do not outlive a push, and other files do."""
    assert push_model(model, NAME, private=True) == f"{hub.address}/{NAME}"
    assert pushed(hub) == files_of(model)
    assert hub.repositories[NAME].private
    push_model(model, NAME)
    assert len(hub.repositories[NAME].commits) == 2, "nothing had changed"
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    hub.repositories[NAME].files["notes.txt"] = b"mine"
    push_model(model, NAME)
    assert pushed(hub) == {**files_of(model), "notes.txt": b"mine"}
    assert len(hub.repositories[NAME].commits) == 3


def test_what_fails_for_a_moment_is_tried_again(hub, model):
    failing = {
        "POST /api/repos/create": [500, 503],
        "PUT /lfs/.*": [DROP],
        "POST /api/models/.*/commit/main": [DROP, 500],
    }
    for number, (request, how) in enumerate(failing.items()):
        (model / "model.safetensors").write_bytes(WEIGHTS + bytes([number]))
        before = hub.asked(request)
        hub.fail(request, *how)
        push_model(model, NAME)
        assert pushed(hub) == files_of(model), request
        assert hub.asked(request) > before + len(how), request


@pytest.mark.parametrize(
    ("request_", "how", "said"),
    [
        ("POST /api/repos/create", [401], "token"),
        ("POST .*/preupload/main", [403], "ours/adder"),
        ("POST /api/validate-yaml", [400], "as the test wants it"),
        ("POST /api/repos/create", [DROP] * 4, "127.0.0.1"),
    ],
)
def test_what_keeps_failing_is_one_line_and_the_model_stays(hub, model, request_, how, said):
    hub.fail(request_, *how)
    with pytest.raises(PushError) as failed:
        push_model(model, NAME)
    text = str(failed.value)
    assert said in text and f"hf upload ours/adder {model}" in text and "\n" not in text
    assert (model / "model.safetensors").read_bytes() == WEIGHTS


def test_what_is_to_be_private_is_not_pushed_to_a_public_repository(hub, model):
    push_model(model, NAME)
    (model / "config.json").write_text("{1: 2}")
    with pytest.raises(PushError, match="everybody"):
        push_model(model, NAME, private=True)
    assert pushed(hub)["config.json"] == b"{}"


def test_what_is_missing_is_said_before_anything_is_asked(hub, model, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="/no/model"):
        push_model("/no/model", NAME)
    for name in ("adder", "a/b/c", "our org/adder", "ours/adder.git", "/adder"):
        with pytest.raises(ConfigError, match="name"):
            check_push(name)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="token"):
        push_model(model, NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        push_model(model, NAME)
    assert hub.requests == []
