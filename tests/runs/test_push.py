"""Pushing a directory to the hub, for which a server on this machine stands in."""

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.training import export
from jaxrl_llm.training.export import PushError, check_push, push_model
from tests.runs.hub_server import DROP, DROP_HALF, HubServer

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
    assert push_model(model, NAME, private=True) == f"{hub.address}/{NAME}"
    assert pushed(hub) == files_of(model)
    assert hub.repositories[NAME].private
    push_model(model, NAME)
    assert len(hub.repositories[NAME].commits) == 2, "nothing had changed"


def test_other_weights_do_not_outlive_a_push_and_other_files_do(hub, model):
    push_model(model, NAME)
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    hub.repositories[NAME].files["notes.txt"] = b"mine"
    push_model(model, NAME)
    assert pushed(hub) == {**files_of(model), "notes.txt": b"mine"}
    assert len(hub.repositories[NAME].commits) == 3


def test_the_clients_other_way_to_upload_works_too(hub, model, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    (model / "model.safetensors").unlink()  # xet's own server has no stand-in
    push_model(model, NAME)
    assert pushed(hub) == files_of(model)


@pytest.mark.parametrize(
    ("request_", "how"),
    [
        ("POST /api/repos/create", [500, 503]),
        ("POST /api/models/.*/preupload/main", [500]),
        ("PUT /lfs/.*", [DROP_HALF]),
        ("POST .*/objects/batch", [DROP]),
        ("POST /api/models/.*/commit/main", [DROP, 500]),
    ],
)
def test_what_fails_for_a_moment_is_tried_again(hub, model, request_, how):
    hub.fail(request_, *how)
    push_model(model, NAME)
    assert pushed(hub) == files_of(model)
    assert hub.asked(request_) > len(how)


@pytest.mark.parametrize(
    ("request_", "how", "said"),
    [
        ("POST /api/repos/create", [401], "the hub does not know your token: run `hf auth login`"),
        ("POST .*/preupload/main", [403], "your token may not write to ours/adder"),
        ("POST /api/repos/create", [500] * 4, "the hub has not taken ours/adder (500: as the"),
        ("POST /api/repos/create", [DROP] * 4, "the push to http://127.0.0.1:"),
    ],
)
def test_what_keeps_failing_is_one_line_and_the_model_stays(hub, model, request_, how, said):
    hub.fail(request_, *how)
    with pytest.raises(PushError) as failed:
        push_model(model, NAME)
    text = str(failed.value)
    assert text.startswith(said)
    assert text.endswith(f"The model is in {model}; `hf upload ours/adder {model}` pushes it later")
    assert "\n" not in text
    assert (model / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("exists", [False, True])
def test_another_ones_repository_is_refused(hub, model, exists, monkeypatch):
    if exists:
        monkeypatch.setenv("HF_TOKEN", "hf_other")
        push_model(model, "other/adder")
        monkeypatch.setenv("HF_TOKEN", "hf_ours")
    (model / "config.json").write_text("{1: 2}")
    why = "you must have write access" if exists else "You don't have the rights to create a model"
    message = rf"your token may not write to other/adder: .* \(403: {why}"
    with pytest.raises(PushError, match=message):
        push_model(model, "other/adder")
    assert not exists or pushed(hub, "other/adder")["config.json"] == b"{}"


def test_a_public_repository_is_no_private_one(hub, model):
    push_model(model, NAME)
    with pytest.raises(PushError, match="ours/adder exists, and everybody can see it"):
        push_model(model, NAME, private=True)
    assert len(hub.repositories[NAME].commits) == 2


def test_a_card_that_the_hub_refuses_is_no_push(hub, model):
    (model / "README.md").write_text("---\nlicense: nonsense\n---\n")
    with pytest.raises(PushError, match="no such license"):
        push_model(model, NAME)
    assert pushed(hub) == {}


def test_what_is_missing_is_said_before_anything_is_asked(hub, model, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="no directory '/no/model' to push"):
        push_model("/no/model", NAME)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no token of the Hugging Face hub: run `hf auth login`"):
        push_model(model, NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set, so nothing can be pushed"):
        push_model(model, NAME)
    assert hub.requests == []


def test_a_host_that_is_not_there(hub, model, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://no-such-host.invalid")
    with pytest.raises(PushError, match=r"the push to http://no-such-host.invalid/.* broke off: "):
        push_model(model, NAME)


@pytest.mark.parametrize("name", ["adder", "a/b/c", "our org/adder", "ours/adder.git", "/adder"])
def test_names_that_no_repository_can_have(name):
    with pytest.raises(ConfigError, match="repository's name"):
        check_push(name)
