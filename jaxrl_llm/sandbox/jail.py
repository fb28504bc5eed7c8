"""What surrounds the process that runs code: namespaces, a small root folder, another user, limits.

Landlock and the filter of system calls are always there; namespaces and another user where the
machine allows them. All of this is done by a process that ends with the code.
"""

import ctypes
import errno
import os
import resource
import stat
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class CodeLimits(NamedTuple):
    """What bounds one run of code, or all runs of one session.

    Attributes:
        cpu_s: seconds of processor time of one run.
        wall_s: seconds of one run, waiting included.
        memory_mb: megabytes that it may hold.
        processes: processes and threads at once, the interpreter included.
        file_mb: megabytes of the files in its folder, and of each.
        output_bytes: of its output and of its errors, each; of more the middle is left out.
    """

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_mb: int = 256
    processes: int = 16
    file_mb: int = 16
    output_bytes: int = 65536


SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446  # on every architecture
LANDLOCK = "Landlock"  # in messages
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


# Landlock: which files a process may open, for itself and all it starts.
#
# Where the kernel has them, its rules are also for TCP, abstract Unix sockets and signals.


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
    ruleset = _syscall(SYS_CREATE_RULESET, attributes, len(attributes), 0, what=LANDLOCK)
    for path, rights in rules:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES):
                continue
            raise
        possible = handled if stat.S_ISDIR(os.fstat(opened).st_mode) else handled & FILE_RIGHTS
        rule = struct.pack("=Qi", rights & possible, opened)
        _syscall(SYS_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0, what=LANDLOCK)
        os.close(opened)
    _syscall(SYS_RESTRICT_SELF, ruleset, 0, what=LANDLOCK)
    os.close(ruleset)


CALLS = """
    read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68;
    preadv 295 69; pwritev 296 70; preadv2 327 286; pwritev2 328 287; open 2 -; openat 257 56;
    close 3 57; close_range 436 436; creat 85 -; lseek 8 62; stat 4 -; fstat 5 80; lstat 6 -;
    newfstatat 262 79; statx 332 291; access 21 -; faccessat 269 48; faccessat2 439 439;
    readlink 89 -; readlinkat 267 78; getcwd 79 17; chdir 80 49; fchdir 81 50; statfs 137 43;
    fstatfs 138 44; getdents 78 -; getdents64 217 61; mkdir 83 -; mkdirat 258 34; rmdir 84 -;
    unlink 87 -; unlinkat 263 35; rename 82 -; renameat 264 38; renameat2 316 276; link 86 -;
    linkat 265 37; symlink 88 -; symlinkat 266 36; ftruncate 77 46; fallocate 285 47; fsync 74 82;
    fdatasync 75 83; sync_file_range 277 84; flock 73 32; fadvise64 221 223; sendfile 40 71;
    copy_file_range 326 285; umask 95 166; getxattr 191 8; lgetxattr 192 9; fgetxattr 193 10;
    listxattr 194 11; llistxattr 195 12; flistxattr 196 13; dup 32 23; dup2 33 -; dup3 292 24;
    pipe 22 -; pipe2 293 59; fcntl 72 25; ioctl 16 29; poll 7 -; ppoll 271 73; select 23 -;
    pselect6 270 72; epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -;
    epoll_pwait 281 22; epoll_pwait2 441 441; eventfd 284 -; eventfd2 290 19;
    timerfd_create 283 85; timerfd_settime 286 86; timerfd_gettime 287 87; signalfd 282 -;
    signalfd4 289 74; mmap 9 222; munmap 11 215; mprotect 10 226; mremap 25 216; madvise 28 233;
    brk 12 214; msync 26 227; mlock 149 228; munlock 150 229; membarrier 324 283; futex 202 98;
    futex_waitv 449 449; set_robust_list 273 99; rseq 334 293; set_tid_address 218 96;
    arch_prctl 158 -; clone 56 220; clone3 435 435; fork 57 -; vfork 58 -; execve 59 221;
    exit 60 93; exit_group 231 94; wait4 61 260; waitid 247 95; getpid 39 172; getppid 110 173;
    gettid 186 178; getpgid 121 155; setpgid 109 154; getpgrp 111 -; getsid 124 156;
    setsid 112 157; getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177;
    getresuid 118 148; getresgid 120 150; getgroups 115 158; kill 62 129; tkill 200 130;
    tgkill 234 131; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139;
    rt_sigpending 127 136; rt_sigtimedwait 128 137; rt_sigsuspend 130 133; sigaltstack 131 132;
    pause 34 -; restart_syscall 219 128; alarm 37 -; getitimer 36 102; setitimer 38 103;
    timer_create 222 107; timer_settime 223 110; timer_gettime 224 108; timer_getoverrun 225 109;
    timer_delete 226 111; nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113;
    clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153; getrlimit 97 163;
    setrlimit 160 164; prlimit64 302 261; getrusage 98 165; sysinfo 99 179; uname 63 160;
    getcpu 309 168; getrandom 318 278; getpriority 140 141; sched_yield 24 124;
    sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120;
    sched_get_priority_max 146 125; sched_get_priority_min 147 126; socketpair 53 199;
    sendto 44 206; recvfrom 45 207; sendmsg 46 211; recvmsg 47 212; shutdown 48 210;
    getsockopt 55 209; getsockname 51 204; getpeername 52 205; prctl 157 167; chmod 90 -;
    fchmod 91 52; fchmodat 268 53; utime 132 -; utimes 235 -; utimensat 280 88; futimesat 261 -;
"""
"""The calls that are allowed: name, number on x86-64, number on aarch64 (- where there is none)."""

SIGNAL_CALLS = ("kill", "tkill", "tgkill")
METADATA_CALLS = ("chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "futimesat")
AUDIT_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # of linux/bpf_common.h
ARCH_OFFSET, ARGUMENTS_OFFSET = 4, 16  # in struct seccomp_data

SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
SECCOMP_SET_MODE_FILTER = 1
PR_SET_NO_NEW_PRIVS = 38

NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
CLONE_PARENT = 0x00008000  # a child of whoever has started the code, with a signal at its end
PRCTL_ALLOWED = (3, 15, 16, 0x53564D41)  # GET_DUMPABLE, SET_NAME, GET_NAME, SET_VMA
FCNTL_REFUSED = (8, 10, 15, 1024, 1026)  # SETOWN, SETSIG, SETOWN_EX, SETLEASE, NOTIFY: signals
IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX; others change even files that were
opened to be read, or send signals."""

AF_UNIX, SOCK_STREAM, SOCK_FLAGS = 1, 1, 0o2004000  # CLOEXEC and NONBLOCK
O_ACCMODE, O_TRUNC = 3, 0o1000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


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
    def guard_metadata(self) -> bool:
        """Whether modes and times of files, which Landlock does not guard, can't be changed."""
        return self.namespaces or self.own_user

    @property
    def guard_signals(self) -> bool:
        """Whether signals reach no other processes; else a process may signal itself alone."""
        return self.guard_metadata or self.landlock >= SCOPE_VERSION


# A filter of system calls (seccomp), so that code can only ask the kernel for what it needs.
#
# What the table does not name is refused. Some calls are allowed for some arguments alone.


def call_numbers(machine: str) -> dict[str, int]:
    """Return the numbers of the calls that are allowed, by name.

    Args:
        machine: as of `platform.machine()`.

    >>> call_numbers("aarch64")["read"]
    63
    """
    column = 1 if machine == "x86_64" else 2
    rows = [row.split() for row in CALLS.replace("\n", " ").split(";") if row.strip()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def build_filter(machine: str, layers: Layers, own_pid: int) -> bytes:
    """Return the program that the kernel runs at each call.

    Args:
        machine: as of `platform.machine()`: `x86_64` or `aarch64`.
        layers: that make calls harmless, so that the filter lets them pass.
        own_pid: of the process, which it may signal in any case.
    """
    numbers = call_numbers(machine)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCH_OFFSET),
        (EQUAL, 1, 0, AUDIT_ARCHS[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, 0),
        (AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL_PROCESS),
    ]
    checks = _checks(layers, own_pid)
    for name, number in numbers.items():
        if name in METADATA_CALLS and not layers.guard_metadata:
            continue
        body = checks.get(name, [(RETURN, 0, 0, ALLOW)])
        program += [(EQUAL, 0, len(body), number), *body]
    refusal = ERRNO | errno.EPERM
    # libraries have another way where the kernel is too old for a call, and none if it is refused
    program += [
        (AT_LEAST, 0, 1, max(numbers.values()) + 1),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
        (RETURN, 0, 0, refusal),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _checks(layers: Layers, own_pid: int) -> dict[str, list[Instruction]]:
    """Return what is run for calls of which the arguments decide."""
    truncating = {name: _opens(place) for name, place in (("open", 1), ("openat", 2))}
    pids = (own_pid,)
    signals = {} if layers.guard_signals else {name: _one_of(0, pids) for name in SIGNAL_CALLS}
    return (
        truncating
        | signals
        | {
            "clone": _without(0, NAMESPACE_FLAGS | CLONE_PARENT),
            "clone3": [(RETURN, 0, 0, ERRNO | errno.ENOSYS)],  # its flags are in memory
            "fcntl": _none_of(1, FCNTL_REFUSED),
            "ioctl": _one_of(1, IOCTL_ALLOWED),
            "prctl": _one_of(0, PRCTL_ALLOWED),
            "prlimit64": _one_of(0, (0,)),  # of itself
            "sendto": _no_address(4),
            "socketpair": _stream_pairs(),
        }
    )


def _argument(place: int, *, high: bool = False) -> Instruction:
    return (LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * place + 4 * high)


def _verdict() -> list[Instruction]:
    """Return the two ends of a check: refused, and behind it allowed."""
    return [(RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ALLOW)]


def _one_of(place: int, values: Sequence[int]) -> list[Instruction]:
    count = len(values)
    tests = [(EQUAL, count - i, 0, value & 0xFFFFFFFF) for i, value in enumerate(values)]
    return [_argument(place), *tests, *_verdict()]


def _none_of(place: int, values: Sequence[int]) -> list[Instruction]:
    count = len(values)
    tests = [(EQUAL, count - i, 0, value) for i, value in enumerate(values)]
    refused, passed = _verdict()
    return [_argument(place), *tests, passed, refused]


def _without(place: int, flags: int) -> list[Instruction]:
    return [_argument(place), (AND, 0, 0, flags), (EQUAL, 1, 0, 0), *_verdict()]


def _no_address(place: int) -> list[Instruction]:
    high = _argument(place, high=True)
    return [_argument(place), (EQUAL, 0, 2, 0), high, (EQUAL, 1, 0, 0), *_verdict()]


def _opens(place: int) -> list[Instruction]:
    """Refuse to empty a file that is not opened to be written, which old Landlocks let pass."""
    refused, passed = _verdict()
    return [
        _argument(place),
        (AND, 0, 0, O_TRUNC | O_ACCMODE),
        (EQUAL, 2, 0, O_TRUNC),
        (EQUAL, 1, 0, O_TRUNC | O_ACCMODE),
        passed,
        refused,
    ]


def _stream_pairs() -> list[Instruction]:
    """Allow pairs that can have no other end; datagrams can be sent anywhere."""
    return [
        _argument(0),
        (EQUAL, 0, 3, AF_UNIX),
        _argument(1),
        (AND, 0, 0, 0xFFFFFFFF ^ SOCK_FLAGS),
        (EQUAL, 1, 0, SOCK_STREAM),
        *_verdict(),
    ]


def install_filter(layers: Layers, own_pid: int) -> None:
    """Filter the calls of this thread from now on, and of all it starts; there is no way back.

    Raises:
        OSError: the kernel has no such filters, or this process may not set one.
    """
    program = build_filter(machine(), layers, own_pid)
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    pointer = Program(len(program) // 8, ctypes.addressof(instructions))
    number = SYS_SECCOMP[machine()]
    arguments = (ctypes.c_long(SECCOMP_SET_MODE_FILTER), ctypes.c_long(0), ctypes.byref(pointer))
    if libc.syscall(ctypes.c_long(number), *arguments) != 0:
        raise OSError(ctypes.get_errno(), "can't filter system calls")


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
    if _prctl(PR_SET_NO_NEW_PRIVS, 1) != 0:
        raise _error("can't do without new privileges")
    _check_access(options)
    rules = [(path, READ) for path in options.readable]
    rules += [(path, RUN) for path in options.programs]
    rules += [(path, READ | WRITE_FILE) for path in DEVICES]
    own = OWN_FILES if options.layers.namespaces else options.folder
    rules.append((own, OWN))
    restrict_files(rules, options.layers.landlock)
    install_filter(options.layers, os.getpid())


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


def _syscall(number: int, *arguments: int | bytes, what: str = "") -> int:
    words = [a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise _error(what or f"system call {number}")
    return result


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
