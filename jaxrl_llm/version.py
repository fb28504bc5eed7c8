"""The package's version, which `pyproject.toml` takes from here; a release's tag is `v` and it."""

__version__ = "0.1.0"
