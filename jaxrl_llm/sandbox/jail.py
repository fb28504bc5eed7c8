"""What surrounds the process that runs code: namespaces, a small root folder, another user, limits.

Landlock and the filter of system calls are always there; namespaces and another user where the
machine allows them. All of this is done by a process that ends with the code.
"""

import ctypes
import os
import resource
import struct
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.sandbox import landlock, seccomp

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 0x1, 0x2, 0x4
AT_RECURSIVE = 0x8000
SYS_MOUNT_SETATTR = 442  # on every architecture
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

STAGING = "/tmp"  # is covered, in our own view of the files, until the new root is complete
OWN_FILES = "/tmp"  # where code may write, in the new root
FOLDER = "/tmp/code"  # the code's current folder there; more may be shown beside it
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
MAX_FILES = 4096  # in the folder of the code
MAX_DESCRIPTORS = 128
STACK_BYTES = 8 * 2**20
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_DUMPABLE = 1, 24, 4
CAPABILITY_VERSION = 0x20080522
LAST_CAPABILITY = 63
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


class Layers(NamedTuple):
    """What keeps code from the machine, as far as the machine has it.

    Attributes:
        landlock: its version; at least 1.
        namespaces: whether the code has processes, network, files and memory of its own.
        own_user: whether it runs as a user that nothing else runs as, for we are root.
    """

    landlock: int
    namespaces: bool
    own_user: bool

    @property
    def allowed(self) -> seccomp.Allowed:
        """Return what the filter need not refuse."""
        apart = self.namespaces or self.own_user
        return seccomp.Allowed(
            signals=apart or self.landlock >= landlock.SCOPE_VERSION, metadata=apart
        )


class JailOptions(NamedTuple):
    """What a jail is made of.

    Attributes:
        layers: to use.
        readable: files and folders that the code may read.
        programs: files that it may run.
        folder: its current one.
        user: id of the user that it becomes; None stays the one who we are.
        file_bytes: of the files in its folder.
        memory_bytes: of the address space of each of its processes.
        processes: at once.
        cpu_s: seconds of processor time of each process; None for no such limit.
    """

    layers: Layers
    readable: tuple[str, ...]
    programs: tuple[str, ...]
    folder: str
    user: int | None
    file_bytes: int
    memory_bytes: int
    processes: int
    cpu_s: int | None


def machine() -> str:
    """Return the architecture, as the tables of system calls have it."""
    return os.uname().machine


def die_with_parent(parent: int) -> None:
    """Have this process killed when the thread that has started it ends.

    Args:
        parent: the process id that we should have as parent; another one means it is too late.
    """
    _prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(1)


def enter_namespaces() -> None:
    """Give this process, and its next child, namespaces of their own, but for files.

    Raises:
        OSError: this machine does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    _unshare(NAMESPACES if user == 0 else NAMESPACES | CLONE_NEWUSER)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def enter_small_root(options: JailOptions) -> None:
    """Leave all files but those that code may read, and give it a folder in memory.

    Raises:
        OSError: this machine does not allow it.
    """
    _unshare(CLONE_NEWNS)
    _mount(None, "/", None, MS_REC | MS_SLAVE)
    paths = [*options.readable, *options.programs, *DEVICES]
    opened = {path: os.open(path, os.O_PATH) for path in dict.fromkeys(paths)}
    _mount(
        "tmpfs", STAGING, "tmpfs", MS_NOSUID | MS_NODEV, f"size=1m,nr_inodes={MAX_FILES},mode=755"
    )
    own = STAGING + OWN_FILES
    os.mkdir(own)  # noqa: PTH102
    size = f"size={options.file_bytes},nr_inodes={MAX_FILES},mode=755"
    _mount("tmpfs", own, "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.mkdir(STAGING + FOLDER, 0o700)  # noqa: PTH102
    if options.user is not None:
        for folder in (own, STAGING + FOLDER):
            os.chown(folder, options.user, options.user)
    for path, source in opened.items():
        _show(source, path)
        os.close(source)
    os.chdir(STAGING)
    _syscall(SYS_PIVOT_ROOT[machine()], b".", b".")
    if ctypes.CDLL(None, use_errno=True).umount2(b".", MNT_DETACH) != 0:
        raise _error("can't leave the files of the machine")
    _set_attributes("/", MOUNT_ATTR_RDONLY, recursive=False)
    os.chdir(FOLDER)


def _show(source: int, path: str) -> None:
    """Show a file or folder of the machine, read-only, at the same path below the new root.

    What is in the folder of the code, such as an environment below /tmp, is shown there.
    """
    target = Path(STAGING + path)
    if target.exists():  # a folder above it is shown
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shown = f"/proc/self/fd/{source}"
    if Path(shown).is_dir():
        target.mkdir()
    else:
        target.touch()
    _mount(shown, str(target), None, MS_BIND | MS_REC)
    attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    attributes |= 0 if path in DEVICES else MOUNT_ATTR_NODEV
    _set_attributes(str(target), attributes, recursive=True)


def confine(options: JailOptions, parent: int) -> None:
    """Take from this process what code must not have; there is no way back.

    Args:
        options: of the jail.
        parent: process id of the one that we must not outlive.

    Raises:
        OSError: the kernel refuses a part of it.
    """
    os.setsid()
    _limit_resources(options)
    for capability in range(LAST_CAPABILITY + 1):
        _prctl(PR_CAPBSET_DROP, capability)  # fails for those that we do not have
    if options.user is not None:
        os.setgroups([])
        os.setresgid(options.user, options.user, options.user)
        os.setresuid(options.user, options.user, options.user)
    _drop_capabilities()
    die_with_parent(parent)  # which a change of the user has undone
    if _prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1) != 0:
        raise _error("can't do without new privileges")
    _check_access(options)
    rules = [(path, landlock.READ) for path in options.readable]
    rules += [(path, landlock.RUN) for path in options.programs]
    rules += [(path, landlock.READ | landlock.WRITE_FILE) for path in DEVICES]
    own = OWN_FILES if options.layers.namespaces else options.folder
    rules.append((own, landlock.OWN))
    landlock.restrict_files(rules, options.layers.landlock)
    seccomp.install_filter(options.layers.allowed, os.getpid())


def _check_access(options: JailOptions) -> None:
    """Refuse to go on as a user who can't read the standard library, or use the code's folder."""
    library = os.path.dirname(os.__file__)  # noqa: PTH120
    what = {
        f"read the standard library in {library}": (f"{library}/traceback.py", os.R_OK),
        f"write to {options.folder}": (options.folder, os.R_OK | os.W_OK | os.X_OK),
    }
    for words, (path, mode) in what.items():
        if not os.access(path, mode):
            raise PermissionError(f"code runs as user {os.getuid()}, who can't {words}")


def _limit_resources(options: JailOptions) -> None:
    limits = {
        resource.RLIMIT_AS: options.memory_bytes,
        resource.RLIMIT_FSIZE: options.file_bytes,
        resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
        resource.RLIMIT_CORE: 1,  # with 0 the machine's program for crashes would still be started
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: MAX_DESCRIPTORS,
    }
    if options.processes:
        limits[resource.RLIMIT_NPROC] = options.processes
    if options.cpu_s is not None:
        limits[resource.RLIMIT_CPU] = options.cpu_s
    for kind, wanted in limits.items():
        _, hard = resource.getrlimit(kind)
        bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (bound, bound))


def reserved_bytes() -> int:
    """Return what this process has reserved of its address space, most of which it never uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    _syscall(SYS_CAPSET[machine()], header, b"\0" * 24)


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(ctypes.c_int(flags)) != 0:
        raise _error("can't have namespaces")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if text is None else text.encode() for text in (source, target, kind)]
    arguments = (*words, ctypes.c_ulong(flags), data.encode())
    if ctypes.CDLL(None, use_errno=True).mount(*arguments) != 0:
        raise _error(f"can't mount {target}")


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    given = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    _syscall(SYS_MOUNT_SETATTR, -100, path.encode(), flags, given, len(given))


def _prctl(option: int, value: int) -> int:
    arguments = [ctypes.c_ulong(v) for v in (value, 0, 0, 0)]
    return ctypes.CDLL(None, use_errno=True).prctl(ctypes.c_int(option), *arguments)


def _syscall(number: int, *arguments: int | bytes) -> None:
    words = [a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *words) != 0:
        raise _error(f"system call {number}")


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
