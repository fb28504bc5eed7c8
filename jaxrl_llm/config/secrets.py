"""What in a config is for nobody else: no page, model card or tracker gets it."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(not published)"
"""What stands in place of a secret."""

SECRET = re.compile(
    r"secret|passw(or)?d|credential|authorization|(api|access|private)_?key|(^|[_-])token$",
    re.IGNORECASE,
)
"""What a key is called that has a secret."""

LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""The user and password in an address."""


def without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, as nested mappings, with `(not published)` in place of its secrets.

    They are the values of environment variables (`env`) and of keys such as `api_key` or
    `hf_token`, and the logins in addresses. Functions of one's own may have such keys.

    >>> without_secrets({"env": {"HF_TOKEN": "hf_x"}, "max_new_tokens": 8, "api_key": None})
    {'env': {'HF_TOKEN': '(not published)'}, 'max_new_tokens': 8, 'api_key': None}
    >>> without_secrets({"trackers": [{"fn": "mlflow", "tracking_uri": "http://me:pass@host"}]})
    {'trackers': [{'fn': 'mlflow', 'tracking_uri': 'http://(not published)@host'}]}
    """
    return {key: _shown(value, _is_secret(key, value)) for key, value in tree.items()}


def _shown(value: Any, is_hidden: bool) -> Any:
    if isinstance(value, Mapping):
        return {k: _shown(v, is_hidden or _is_secret(k, v)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item, is_hidden) for item in value]
    if is_hidden and value is not None:
        return HIDDEN
    return LOGIN.sub(HIDDEN, value) if isinstance(value, str) else value


def _is_secret(key: Any, value: Any) -> bool:
    return (key == "env" and isinstance(value, Mapping)) or bool(SECRET.search(str(key)))
