"""Actors in this process, behind the interface of Ray's handles."""

import asyncio
from types import SimpleNamespace


class Handle:
    """An object whose methods are called by `.remote`; `wrap` makes what comes of a call."""

    def __init__(self, of, wrap=lambda value: value):
        self.object, self.wrap = of, wrap

    def __getattr__(self, name):
        method = getattr(self.object, name)
        return SimpleNamespace(remote=lambda *given: self.wrap(asyncio.run(method(*given))))
