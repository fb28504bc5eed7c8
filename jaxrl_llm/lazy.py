"""Names that a package exports from its modules, imported when they are first used."""

import ast
import functools
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package that exports what its `__init__.py` imports under `if TYPE_CHECKING:`.

    There editors see the names; here the module of a name is imported when the name is used.

    A module may have the name of an exported function, as the program `jaxrl_llm.train` has. Python
    binds a module to its package once it is imported; the exported name stays the function's.
    """

    @functools.cached_property
    def __exports__(self) -> Mapping[str, str]:
        """The module of each exported name."""
        loader: Any = self.__spec__ and self.__spec__.loader
        statements = ast.parse(loader.get_source(self.__name__)).body
        guarded = [s for block in statements if isinstance(block, ast.If) for s in block.body]
        imports = [s for s in guarded if isinstance(s, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    @property
    def __all__(self) -> list[str]:
        """The exported names."""
        return sorted(self.__exports__)

    def __getattr__(self, name: str) -> Any:
        """Import what an exported name stands for."""
        if name.startswith("__") or name not in self.__exports__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self.__exports__[name]), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but hide no exported name behind a module."""
        if not (isinstance(value, ModuleType) and name in self.__exports__):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """List the exported names, too."""
        return sorted({*super().__dir__(), *self.__exports__})


def attach(package: str) -> None:
    """Let a package export what it imports under `if TYPE_CHECKING:`, lazily.

    Args:
        package: its `__name__`.

    >>> import jaxrl_llm
    >>> jaxrl_llm.load_config.__module__
    'jaxrl_llm.config.programs'
    """
    sys.modules[package].__class__ = LazyPackage
