"""An exported model on the Hugging Face hub."""

import logging
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.workers.answers import shorten

Result = TypeVar("Result")

WAITS_S = (1.0, 4.0, 16.0)
"""Seconds before each new attempt, where the hub does not answer or fails."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
"""Files of the repository that must not outlive the model that they were pushed with."""

log = logging.getLogger(__name__)


class PushError(RunError):
    """The hub did not take a model; it is still where it was exported to."""


def check_push(repo_id: str) -> None:
    """Check all that can be known before there is anything to push.

    Args:
        repo_id: `ORG/NAME` on the hub.

    Raises:
        ConfigError: it is no such name, there is no token, or `HF_HUB_OFFLINE` is set.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{repo_id!r} is no repository's name: {error}") from error
    if repo_id.count("/") != 1:
        raise ConfigError(f"expected a repository's name as ORG/NAME, got {repo_id!r}")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it")
    if not get_token():
        raise ConfigError(
            "no token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN to one that "
            "may write (https://huggingface.co/settings/tokens)"
        )


def push_model(folder: str | Path, repo_id: str, *, private: bool = False) -> str:
    """Push a directory to a repository of the Hugging Face hub, which is made if need be.

    In a repository that exists, files of the same name are replaced and other weights removed, by
    one commit; the versions before stay in its history. What fails on the way is tried again.

    Args:
        folder: the directory.
        repo_id: `ORG/NAME`.
        private: only you and your organization can see the repository.

    Returns:
        The repository's address.

    Raises:
        ConfigError: as for `check_push`, or there is no such directory.
        PushError: the hub refuses it or can't be reached. The directory stays as it is.
    """
    check_push(repo_id)
    if not Path(folder).is_dir():
        raise ConfigError(f"no directory {str(folder)!r} to push")
    from huggingface_hub import HfApi

    api = HfApi()

    def push() -> str:
        address = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise PushError(
                f"{repo_id} exists, and everybody can see it: make it private in its settings, or "
                "leave --private out"
            )
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Push a model of jaxrl_llm",
            delete_patterns=[*WEIGHTS],
        )
        return str(address)

    try:
        return _patiently(push)
    except PushError:
        raise
    except Exception as error:  # what the hub's client raises differs by its version
        raise PushError(f"{_reason(error, repo_id)}. {_remedy(folder, repo_id)}") from error


def _patiently(action: Callable[[], Result]) -> Result:
    """Do what may fail for a moment; each attempt goes on where the one before has ended."""
    for wait in WAITS_S:
        try:
            return action()
        except PushError:
            raise
        except Exception as error:
            status = _status(error)
            if status is not None and status != 429 and status < 500:
                raise
            log.warning("the hub: %s; again in %g s", _text(error), wait)
            time.sleep(wait)
    return action()


def _status(error: BaseException | None) -> int | None:
    """Return the hub's HTTP status behind an error; None where it has not answered."""
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            return response.status_code
        error = error.__cause__
    return None


def _reason(error: Exception, repo_id: str) -> str:
    """Return why the hub has not taken a model."""
    status = _status(error)
    if status is None:
        from huggingface_hub import constants

        return f"the push to {constants.ENDPOINT}/{repo_id} broke off: {_text(error)}"
    reasons = {
        401: "the hub does not know your token: run `hf auth login` again, or set HF_TOKEN",
        403: f"your token may not write to {repo_id}: it needs the permission, and you the right",
        404: f"the hub has no {repo_id}, or does not let you see it",
    }
    return f"{reasons.get(status, f'the hub has not taken {repo_id}')} ({_text(error)})"


def _text(error: BaseException | None) -> str:
    """Return what an error and those behind it say, on one line; of the hub's answer its status."""
    texts = []
    while error is not None:
        response = getattr(error, "response", None)
        text = getattr(error, "server_message", None) if response is not None else str(error)
        text = shorten(" ".join((text or type(error).__name__).split()), 200).rstrip(".")
        texts.append(text if response is None else f"{response.status_code}: {text}")
        error = error.__cause__ if response is None else None
    return ": ".join(dict.fromkeys(texts))


def _remedy(folder: str | Path, repo_id: str) -> str:
    shown = os.fspath(folder)
    command = shlex.join(["hf", "upload", repo_id, shown])
    return f"The model is in {shown}; `{command}` pushes it later"
