"""Attacks of code on the machine that runs it, as attacks.toml has them.

In the code stand names of what `Target` has: SECRET (a file of the parent's user), FOLDER (its run
folder), PORT (where the parent listens, on loopback), ABSTRACT and SOCKET (its Unix sockets),
PARENT and BYSTANDER (ids of processes of its user).
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

TRIES = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)

def tries(*acts):
    for number, act in enumerate(acts):
        try:
            value = act()
        except (OSError, ValueError, ImportError) as error:
            last = error
        else:
            print("BROKEN", number, value)
    raise last

def call(number, *words):
    words = [w if isinstance(w, bytes) else ctypes.c_long(w) for w in words]
    if (value := libc.syscall(ctypes.c_long(number), *words)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value
"""


class Attack(NamedTuple):
    """Code that does harm, if it can.

    Attributes:
        name: what it tries.
        code: Python.
        ends: how the run may end at the level `process`: failures, or None where it may run to its
            end because nothing harmful comes of it.
        slow: whether it takes a time limit to end it.
    """

    name: str
    code: str
    ends: tuple[str | None, ...]
    slow: bool = False


def read_attacks() -> list[Attack]:
    """Return all attacks.

    >>> read_attacks()[0]
    Attack(name='infinite loop', code='while True: pass', ends=('timeout',), slow=True)
    """
    text = Path(__file__).with_name("attacks.toml").read_text()
    return [
        Attack(
            name=given["name"],
            code=_code(given),
            ends=tuple(None if end == "end" else end for end in given["ends"]),
            slow=given.get("slow", False),
        )
        for given in tomllib.loads(text)["attack"]
    ]


def _code(given: dict) -> str:
    if "tries" in given:
        acts = "".join(f"\n    lambda: {act}," for act in given["tries"])
        return f"{TRIES}\ntries({acts}\n)"
    return TRIES + given["code"] if given.get("calls") else given["code"]
