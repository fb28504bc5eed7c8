"""Pushing a directory to the hub, for which a server on this machine stands in."""

import json
import os
import subprocess
import sys

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.runs.push import check_push
from tests.runs.hub_server import DROP, DROP_HALF, HubServer

NAME = "ours/adder"
WEIGHTS = bytes(range(256)) * 4000
CARD = b"---\nlicense: apache-2.0\n---\n# An adder\n"
PUSH = """if True:
    import json, sys
    from jaxrl_llm.runs import push
    push.WAITS_S = (0.01,) * 3
    folder, name, private = json.loads(sys.argv[1])
    try:
        print(push.push_model(folder, name, private=private))
    except (push.ConfigError, push.PushError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def hub():
    with HubServer().running() as server:
        yield server
        assert server.unknown == []


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_bytes(CARD)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


@pytest.fixture
def push(hub, model, tmp_path):
    """Pushes the model in a process of its own, as the client reads its settings when imported."""

    def run(name=NAME, *, private=False, address=None, **variables):
        kept = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
        env = {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_ours", "HF_HUB_OFFLINE": "0"}
        env |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": address or hub.address}
        words = [sys.executable, "-c", PUSH, json.dumps([str(model), name, private])]
        return subprocess.run(
            words, env=kept | env | variables, capture_output=True, text=True, check=False
        )

    return run


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pushed(hub, name=NAME):
    return {k: v for k, v in hub.repositories[name].files.items() if k != ".gitattributes"}


def test_a_directory_is_pushed_and_pushed_again(hub, push, model):
    done = push(private=True)
    assert (done.returncode, done.stdout) == (0, f"{hub.address}/{NAME}\n"), done.stderr
    assert pushed(hub) == files_of(model)
    assert hub.repositories[NAME].private
    assert push().returncode == 0
    assert len(hub.repositories[NAME].commits) == 2, "nothing had changed"


def test_other_weights_do_not_outlive_a_push_and_other_files_do(hub, push, model):
    push()
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    hub.repositories[NAME].files["notes.txt"] = b"mine"
    assert push().returncode == 0
    assert pushed(hub) == {**files_of(model), "notes.txt": b"mine"}
    assert len(hub.repositories[NAME].commits) == 3


def test_the_clients_other_way_to_upload_works_too(hub, push, model):
    (model / "model.safetensors").unlink()  # xet's own server has no stand-in
    assert push(HF_HUB_DISABLE_XET="0").returncode == 0
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
def test_what_fails_for_a_moment_is_tried_again(hub, push, model, request_, how):
    hub.fail(request_, *how)
    done = push()
    assert done.returncode == 0, done.stderr
    assert pushed(hub) == files_of(model)
    assert hub.asked(request_) > len(how)


@pytest.mark.parametrize(
    ("request_", "how", "said"),
    [
        ("POST /api/repos/create", [401], "the hub does not know your token: run `hf auth login`"),
        ("POST .*/preupload/main", [403], "your token may not write to ours/adder"),
        ("POST /api/repos/create", [500] * 4, "the hub has not taken ours/adder (500"),
        ("POST /api/repos/create", [DROP] * 4, "can't reach the hub at http://127.0.0.1:"),
    ],
)
def test_what_keeps_failing_is_one_line_and_the_model_stays(hub, push, model, request_, how, said):
    hub.fail(request_, *how)
    done = push()
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"PushError: {said}"), done.stderr
    assert last.endswith(f"The model is in {model}; `hf upload ours/adder {model}` pushes it later")
    assert "Traceback" not in done.stderr
    assert (model / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("exists", [False, True])
def test_another_ones_repository_is_refused(hub, push, exists):
    if exists:
        assert push("other/adder", HF_TOKEN="hf_other").returncode == 0
    before = pushed(hub, "other/adder") if exists else {}
    done = push("other/adder")
    assert "PushError: your token may not write to other/adder" in done.stderr
    assert exists or "You don't have the rights to create a model" in done.stderr
    assert (pushed(hub, "other/adder") if exists else {}) == before


def test_a_public_repository_is_no_private_one(hub, push):
    push()
    done = push(private=True)
    assert done.returncode == 1
    assert "ours/adder exists, and everybody can see it" in done.stderr
    assert len(hub.repositories[NAME].commits) == 2


def test_a_card_that_the_hub_refuses_is_no_push(hub, push, model):
    (model / "README.md").write_text("---\nlicense: nonsense\n---\n")
    done = push()
    assert "no such license" in done.stderr.splitlines()[-1]
    assert pushed(hub) == {}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"HF_TOKEN": ""},
            "no token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN",
        ),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, so nothing can be pushed: unset it"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_asked(hub, push, variables, said):
    done = push(**variables)
    assert done.stderr.startswith(f"ConfigError: {said}")
    assert hub.requests == []


def test_a_host_that_is_not_there(push):
    done = push(address="http://no-such-host.invalid")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("PushError: can't reach the hub at http://no-such-host.invalid: ")


@pytest.mark.parametrize("name", ["adder", "a/b/c", "our org/adder", "ours/adder.git", "/adder"])
def test_names_that_no_repository_can_have(name):
    with pytest.raises(ConfigError, match="repository's name"):
        check_push(name)
