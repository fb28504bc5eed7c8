"""Landlock: which files a process may open, for itself and all it starts.

Where the kernel has them, its rules are also for TCP, abstract Unix sockets and signals.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446  # on every architecture
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
FILE_RIGHTS_OF_VERSION = {1: (1 << 13) - 1, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV}
TCP_RIGHTS, TCP_VERSION = 0b11, 4  # to bind and to connect
SCOPES, SCOPE_VERSION = 0b11, 6  # abstract Unix sockets and signals

READ = READ_FILE | READ_DIR
RUN = READ | EXECUTE
OWN = READ | WRITE_FILE | TRUNCATE | REFER | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG
OWN |= MAKE_SYM
"""What code may do in its folder: no programs, sockets, pipes with a name, or devices."""


def landlock_version() -> int:
    """Return the version of the kernel's Landlock, 0 where it has none or it is off."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_long(CREATE_RULESET_VERSION))
    return max(0, libc.syscall(ctypes.c_long(SYS_CREATE_RULESET), *arguments))


def restrict_files(rules: Iterable[tuple[str, int]], version: int) -> None:
    """Allow this thread nothing but what the rules say; there is no way back.

    `no_new_privs` must have been set.

    Args:
        rules: paths, each with the rights to it and to all below it. What is not there is left out.
        version: of Landlock to use, at most the kernel's.

    Raises:
        OSError: the kernel refuses.
    """
    handled = 0
    for first, rights in FILE_RIGHTS_OF_VERSION.items():
        handled |= rights if first <= version else 0
    attributes = struct.pack("=Q", handled)
    if version >= TCP_VERSION:
        attributes += struct.pack("=Q", TCP_RIGHTS)
    if version >= SCOPE_VERSION:
        attributes += struct.pack("=Q", SCOPES)
    ruleset = _call(SYS_CREATE_RULESET, attributes, len(attributes), 0)
    for path, rights in rules:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES):
                continue
            raise
        possible = handled if stat.S_ISDIR(os.fstat(opened).st_mode) else handled & FILE_RIGHTS
        rule = struct.pack("=Qi", rights & possible, opened)
        _call(SYS_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0)
        os.close(opened)
    _call(SYS_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _call(number: int, *arguments: int | bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
