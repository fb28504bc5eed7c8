"""Which keys of a `config.json` transformers' code does not read, and so can't change a model."""

import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHARED = (
    "configuration_utils.py",
    "modeling_utils.py",
    "modeling_rope_utils.py",
    "modeling_layers.py",
    "masking_utils.py",
    "cache_utils.py",
    "integrations/*attention*.py",
    "integrations/moe.py",
)
"""Code that the models of all families run."""


def without_effect(model_type: str, config: Mapping[str, Any]) -> set[str]:
    """Return the keys of a config that transformers' code for its family does not read.

    These are those that begin with an underscore, and those whose names occur nowhere in the
    sources of the family and in the code that all families run. The sources are read as text.

    Args:
        model_type: The family, as in `config.json`.
        config: Its keys.

    >>> config = {"rope_interleaved": True, "_name_or_path": "a/b", "attention_dropout": 0.1}
    >>> sorted(without_effect("llama", config))
    ['_name_or_path', 'rope_interleaved']
    """
    words = _words(model_type)
    return {key for key in config if key.startswith("_") or key not in words}


@functools.cache
def _words(model_type: str) -> frozenset[str]:
    """Return all names in the sources that a family's models run."""
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.submodule_search_locations, "the library depends on it"
    root = Path(package.submodule_search_locations[0])
    family = f"models/{model_type.removesuffix('_text')}/*.py"
    files = [path for pattern in (*SHARED, family) for path in root.glob(pattern)]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text("utf-8")))
