"""Names that a package exports from its modules, imported when they are first used."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package whose exported names are looked up in its modules.

    A module may have the name of an exported function, as the program `jaxrl_llm.train` has. Python
    binds a module to its package once it is imported; the exported name stays the function's.
    """

    def __getattr__(self, name: str) -> Any:
        """Import what an exported name stands for."""
        home = self.__dict__.get("__exports__", {}).get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but hide no exported name behind a module."""
        if not (isinstance(value, ModuleType) and name in self.__exports__):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """List the exported names, too."""
        return sorted({*super().__dir__(), *self.__exports__})


def attach(package: str, exports: Mapping[str, Sequence[str]]) -> None:
    """Let a package export names of its modules, which are imported when a name is used.

    The package imports the same names under `if TYPE_CHECKING:`, where editors see them.

    Args:
        package: its `__name__`.
        exports: names by the module, relative to the package, that defines them.

    >>> import jaxrl_llm
    >>> jaxrl_llm.load_config.__module__
    'jaxrl_llm.config.train'
    """
    module = sys.modules[package]
    module.__dict__["__exports__"] = {
        name: f"{package}.{home}" for home, names in exports.items() for name in names
    }
    module.__dict__["__all__"] = sorted(module.__dict__["__exports__"])
    module.__class__ = LazyPackage
