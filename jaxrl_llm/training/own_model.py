"""The model that a function of the config returns, instead of one of a Hugging Face directory."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import FunctionSpec, closest, load_function, signature_of
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.nnx import from_module
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.rules import DEFAULT_RULES, UNSPLIT

KEY = "model.function"

PASSED = ("rngs", "vocab_size")
"""What the trainer gives a function that asks for it: an `nnx.Rngs`, and how many tokens the
tokenizer has."""


def make_model(spec: FunctionSpec, path: str, *, seed: int) -> Model:
    """Call the function that makes a model; one that asks for `rngs` returns an `nnx.Module`.

    Args:
        spec: the function.
        path: directory or repository of the tokenizer.
        seed: for the variables of a module that are not trained.

    Raises:
        ConfigError: there is no such function, it returns no model, or flax is not installed.
    """
    make = load_function(spec, functions.MODELS, passed=PASSED, key=KEY)
    asked = signature_of(make.func if isinstance(make, functools.partial) else make).parameters
    with config_errors_at("model.path"):
        given = {"vocab_size": len(load_tokenizer(path))} if "vocab_size" in asked else {}
    with config_errors_at(KEY):
        make = functools.partial(make, **given)
        model = _from_module(make, seed) if "rngs" in asked else make()
        if not isinstance(model, Model):
            raise TypeError(
                f"{spec.fn} returned {type(model).__name__}, expected an nnx.Module, of a function "
                "that takes rngs, or a Model such as models.functional.FunctionalModel"
            )
        _ = model.vocab_size, model.declare()  # what is no model fails here, and not in a step
    return model


def _from_module(make: Callable[..., Any], seed: int) -> Any:
    try:
        import flax  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{KEY}: {error}: install the extra, pip install -e '.[flax]'") from error
    return from_module(make, seed=seed)


def check_axes(model: Model, layout: Layout) -> None:
    """Require a rule for each logical axis of a model, and an array for each rule of the config's.

    Raises:
        ConfigError: a rule is missing, or of no array.
    """
    axes = {axis for array in jax.tree.leaves(model.declare()) for axis in array.axes}
    for axis in sorted(layout.rules.keys() - DEFAULT_RULES.keys() - axes):
        raise ConfigError(f"mesh.rules.{axis}: no array of {KEY} has it; {closest(axis, axes)}")
    for axis in sorted(axes - layout.rules.keys()):
        if not axis.startswith(UNSPLIT):
            raise ConfigError(
                f"{KEY}: there is no rule for the logical axis {axis!r}, so say what splits it, as "
                f"in mesh.rules.{axis}: null; {closest(axis, layout.rules)}"
            )
