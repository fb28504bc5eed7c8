"""Actors in this process, behind the interface of Ray's handles."""

import asyncio


class Handle:
    """An object whose methods are called by `.remote`; `wrap` makes what comes of a call."""

    def __init__(self, of, wrap=lambda value: value):
        self.object, self.wrap = of, wrap

    def __getattr__(self, name):
        method, handle = getattr(self.object, name), self

        class Method:
            @staticmethod
            def remote(*arguments):
                return handle.wrap(asyncio.run(method(*arguments)))

        return Method
